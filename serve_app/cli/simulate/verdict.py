"""Which arm to take, in plain sentences. Pure.

Decides: the recommendation. It is the cheapest arm (by cost, then by GPU hours) of those that meet every level; where
none does, the one whose worst class comes closest, with what most of that class's missed requests met.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from autoscaling.simulator import Obstacle
from serve_app.cli.simulate.figures import ArmResult, ClassResult, MissedRequests, ModelResult, Recommendation
from serve_app.settings import DEFAULT_POLICY

CURRENCY = "$"  # of the profiles' prices


def recommendation(arms: Sequence[ArmResult], wanted: float) -> Recommendation:
    """The recommendation of a comparison.

    Args:
        arms: at least one.
        wanted: the attainment that every class with a level is to reach.
    """
    fitting = [arm for arm in arms if arm.meets]
    if fitting:
        best = min(fitting, key=lambda arm: (arm.cost, arm.gpu_hours))
        return Recommendation(best.name, f"{_which(best, arms)}: {_size(best)}.")
    judged = [(worst, arm) for arm in arms if (worst := _worst_class(arm)) is not None]
    if not judged:
        classes = sorted({each.request_class for arm in arms for each in arm.classes})
        given = " ".join(f"--level {name}=2s" for name in classes)
        cheapest = min(arms, key=lambda arm: (arm.cost, arm.gpu_hours))
        return Recommendation(
            None,
            f"No class of this traffic has a level, so nothing tells which arm is good enough; give {given}. "
            f"The cheapest, {cheapest.name}, takes {_size(cheapest)}.",
        )
    worst, arm = max(judged, key=lambda pair: (pair[0].attainment or 0.0, -pair[1].cost, -pair[1].gpu_hours))
    begin = "This configuration does not give" if len(arms) == 1 else "No arm gives"
    closest = "" if len(arms) == 1 else f"{arm.name} comes closest: "
    return Recommendation(
        None,
        f"{begin} {percent(wanted)} of each class a first token within its level. {closest}"
        f"{worst.request_class} has {percent(worst.attainment)} within {worst.level_s:g} s, with {_size(arm)}. "
        f"{_what_binds(worst, arm)}",
    )


def percent(part: float | None) -> str:
    """A part in percent, rounded down to a hundredth: 99.996% is not all."""
    if part is None:
        return "-"
    hundredths = int(part * 10_000 + 1e-9)
    return f"{hundredths / 100:g}%"


def money(cost: float) -> str:
    """A cost; `-`: the profiles have no price."""
    if not cost:
        return "-"
    return f"{CURRENCY}{cost:,.2f}" if cost < 100 else f"{CURRENCY}{cost:,.0f}"


def _which(best: ArmResult, arms: Sequence[ArmResult]) -> str:
    if len(arms) == 1:
        return "This configuration meets every level"
    fitting = sum(bool(arm.meets) for arm in arms)
    others = f"the cheapest of {fitting} arms that meet" if fitting > 1 else "the only arm that meets"
    return f"Take {best.name}, {others} every level"


def _size(arm: ArmResult) -> str:
    cost = f", {money(arm.cost)}" if arm.cost else ""
    gpus = "GPU" if arm.gpus_peak == 1 else "GPUs"
    return f"at most {arm.gpus_peak} {gpus}, {arm.gpus_mean:.1f} in the mean ({arm.gpu_hours:.1f} GPU hours{cost})"


def _worst_class(arm: ArmResult) -> ClassResult | None:
    judged = [each for each in arm.classes if each.level_s is not None and each.attainment is not None]
    return min(judged, key=lambda each: each.attainment or 0.0, default=None)


def _what_binds(worst: ClassResult, arm: ArmResult) -> str:
    """What most of the missed requests of a class met, and what to try."""
    most = max(worst.missed, key=lambda each: each.requests)
    model = next(each for each in arm.models if each.model == most.model)
    all_missed = sum(each.requests for each in worst.missed)
    part = most.requests if most.requests < all_missed else "all"
    why = _WHY[Obstacle(most.why)](most, model, has_target=arm.policy == DEFAULT_POLICY)
    return f"Of its {all_missed} missed requests {part} {why}."


def _limits(missed: MissedRequests, _: ModelResult, *, has_target: bool) -> str:
    return f"were over the limits of their tenants at {missed.model}: raise these"


def _failed(missed: MissedRequests, _: ModelResult, *, has_target: bool) -> str:
    return f"lost their replicas of {missed.model}"


def _gpus(missed: MissedRequests, _: ModelResult, *, has_target: bool) -> str:
    return f"came while a replica of {missed.model} found no GPU: give more with --gpus"


def _max_gpus(missed: MissedRequests, _: ModelResult, *, has_target: bool) -> str:
    return f"waited while scaling.max_gpus kept {missed.model} from a further replica: raise it"


def _max_replicas(missed: MissedRequests, model: ModelResult, *, has_target: bool) -> str:
    more = f"--what-if max_replicas={2 * model.max_replicas}"
    return f"waited while {missed.model} ran all of its max_replicas ({model.max_replicas}): try {more}"


def _starts(missed: MissedRequests, model: ModelResult, *, has_target: bool) -> str:
    earlier = "or a lower target_ongoing_requests starts it earlier" if has_target else "starts it earlier"
    return (
        f"waited while a replica of {missed.model} started, which takes {model.start_s:.0f} s: a higher min_replicas "
        f"{earlier}, and a higher initial_replicas begins with more"
    )


def _decision(missed: MissedRequests, _: ModelResult, *, has_target: bool) -> str:
    sooner = "a lower target_ongoing_requests or upscale_delay_s" if has_target else "a higher min_replicas"
    return f"waited while no further replica of {missed.model} was started: try {sooner}"


def _engine(missed: MissedRequests, _: ModelResult, *, has_target: bool) -> str:
    fewer = "target_ongoing_requests or max_num_seqs" if has_target else "max_num_seqs"
    return (
        f"hardly waited for a replica of {missed.model}: its engines need the time themselves. Try a lower {fewer}, or "
        "faster GPUs"
    )


class _Why(Protocol):
    """What missed requests met, and what to try. `has_target`: the policy divides by `target_ongoing_requests`."""

    def __call__(self, missed: MissedRequests, model: ModelResult, /, *, has_target: bool) -> str: ...


_WHY: Mapping[Obstacle, _Why] = {
    Obstacle.LIMITS: _limits,
    Obstacle.FAILED: _failed,
    Obstacle.GPUS: _gpus,
    Obstacle.MAX_GPUS: _max_gpus,
    Obstacle.MAX_REPLICAS: _max_replicas,
    Obstacle.STARTS: _starts,
    Obstacle.DECISION: _decision,
    Obstacle.ENGINE: _engine,
}
