"""The requests of a real window in `autoscaling.simulator`, and what their clients see there. Pure.

Invariant: a simulated window is a `Window` as a measured one, so every figure of both is made by the same code.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple, replace
from statistics import median

from autoscaling.simulator import RequestEnd, SimulatedRequest, World
from benchmarks.common.worlds import play_all
from benchmarks.overload.answers import Answer, Window
from benchmarks.overload.offered_load import GROUPS, Offer
from benchmarks.overload.open_loop_client import Ended
from benchmarks.overload.plan import Levels
from benchmarks.overload.virtual import class_of
from serve_app.types import Outcome, RequestClass

SIMULATED = "simulated"
ENDS = {
    Outcome.OK: Ended.FINISHED,
    Outcome.REFUSED: Ended.REFUSED,
    Outcome.CANCELLED_QUEUED: Ended.ABANDONED,
    Outcome.CANCELLED_RUNNING: Ended.ABANDONED,
}  # every other one has failed


def requests_of(
    answers: Iterable[Answer], offered: Sequence[Offer], model: str, *, labelled: bool = True
) -> list[SimulatedRequest]:
    """The requests of a real run at their moments, with the tokens that came out; what did not finish, as offered.

    Args:
        offered: by the number of the request.
        labelled: each names the class of its group; else none is named, and each is of the default class.
    """
    found = []
    for answer in sorted(answers, key=lambda each: each.at_s):
        offer = offered[answer.number]
        done = answer.outcome is Ended.FINISHED
        found.append(
            SimulatedRequest(
                answer.at_s,
                f"tenant-{offer.tenant}",
                RequestClass[answer.group.upper()] if labelled else RequestClass.NORMAL,
                model,
                answer.prompt_tokens if done else offer.prompt_tokens,
                answer.output_tokens if done else offer.output_tokens,
                max_tokens=offer.output_tokens,
            )
        )
    return found


def answer_of(end: RequestEnd, group: str, at_s: float) -> Answer:
    """What a client sees of a simulated request that was due at `at_s`."""
    first_s = None if end.first_s is None else end.first_s - end.offered_s
    gaps = end.output_tokens - 1
    return Answer(
        end.number,
        group,
        end.prompt_tokens + end.output_tokens,
        at_s,
        ENDS.get(end.outcome, Ended.FAILED),
        end.refused,
        first_s,
        end.ended_s - end.offered_s,
        end.prompt_tokens,
        end.output_tokens,
        None if end.first_s is None or gaps < 1 else 1e3 * (end.ended_s - end.first_s) / gaps,
        0.0,
    )


def with_clients(world: World, levels: Levels) -> World:
    """The world with clients of these levels."""
    return replace(world, classes={RequestClass[group.upper()]: class_of(group, levels) for group in GROUPS})


def replayed(world: World, real: Window, offered: Sequence[Offer], model: str) -> Window:
    """A real window in virtual time, warm-up and tail included."""
    requests = requests_of(real.everybody, offered, model)
    _, ends = play_all(with_clients(world, real.levels), requests)
    answers = [
        answer_of(end, requests[end.number].request_class.name.lower(), requests[end.number].at_s) for end in ends
    ]
    return Window.of(
        {
            "arm": SIMULATED,
            "multiple": real.multiple,
            "warmup_s": real.raw["warmup_s"],
            "window_s": real.window_s,
            "levels": list(astuple(real.levels)),
            "rows": [list(astuple(answer)) for answer in answers],
            "decisions": [],
        }
    )


def request_s(world: World, unloaded: Sequence[Answer], offered: Sequence[Offer], model: str) -> float:
    """Seconds that an unloaded request takes beside queue and engine: the median by which first tokens of one client,
    who asks when it has its answer, came later than in the world; at least 0."""
    done = [each for each in unloaded if each.outcome is Ended.FINISHED and each.first_s is not None]
    requests = requests_of(done, offered, model, labelled=False)
    _, ends = play_all(replace(world, request_s=0.0), requests)
    firsts = [answer.first_s for answer in sorted(done, key=lambda each: each.at_s)]
    later = [
        real_s - (end.first_s - end.offered_s)
        for real_s, end in zip(firsts, ends, strict=True)
        if real_s is not None and end.first_s is not None
    ]
    return max(0.0, median(later))
