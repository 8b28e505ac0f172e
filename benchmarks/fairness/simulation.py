"""The arms on the simulated engine, in virtual time: a run is a function of its requests.

The world is `autoscaling.simulator`: three routers, the quota actor, one replica. Arms differ in what the queue knows
of tenants, in nothing else: `fifo` has one tenant for all, which is order of arrival; `ours` a tenant for each client.

Invariant: nobody is refused, and every request of the trace is served whole.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from autoscaling.simulator import EngineProfile, RequestEnd, SimulatedRequest, Simulation
from benchmarks.common.traces import MODEL, Request, request
from benchmarks.common.worlds import one_model, play_all
from benchmarks.fairness.metric import Answer
from benchmarks.fairness.trace import Lengths, arrivals
from serve_app.types import RequestClass

OVERLOADED = 2.6  # times what the engine serves, where its capacity is measured: about what is measured with it
CROWD = 30  # requests a slot, all at once, for a first guess of the capacity
ENGINE = EngineProfile(
    "24gb",
    "about an 8B model in bfloat16 on a 24 GB GPU: 16 GB of weights at 600 GB/s, 128 KiB of KV a token",
    slots=64,
    kv_tokens=36_000,
    step_s=0.027,
    sequence_s=0.0003,
    kv_token_s=0.0,
    prefill_tokens_per_s=4000.0,
    start_s=0.0,
)


@dataclass(frozen=True, slots=True)
class Arm:
    """Whether each client is a tenant, or all are one."""

    name: str
    by_client: bool = True


FIFO = Arm("fifo", by_client=False)
OURS = Arm("ours")
ARMS = (FIFO, OURS)


@dataclass(frozen=True, slots=True)
class Played:
    """What became of every request, in the order of the trace; `ended_s` is the moment of the last end."""

    answers: tuple[Answer, ...]
    ended_s: float


def play(requests: Sequence[Request], arm: Arm, engine: EngineProfile) -> Played:
    """One run of one arm."""
    simulation, ends = play_all(one_model(engine), _simulated(requests, arm))
    began_s = simulation.began_s
    answers = tuple(_answer(asked, end, began_s) for asked, end in zip(requests, ends, strict=True))
    return Played(answers, simulation.clock.now - began_s)


def capacity(lengths: Sequence[Lengths], engine: EngineProfile, span_s: float, seed: int = 0) -> float:
    """Requests per second that the engine ends while there are always more.

    Found in two turns, since an estimate is made when a request comes: of those that come all at once none is learned.
    The first third of the span is not counted: the batch fills and the estimates are learned in it.
    """
    draw = random.Random(seed)
    chosen = [draw.choice(lengths) for _ in range(CROWD * engine.slots)]
    at_once = [request(draw, 0.0, "all", one.prompt, one.output) for one in chosen]
    about = len(at_once) / play(at_once, FIFO, engine).ended_s
    more = arrivals(seed, lengths, {"all": 1.0}, OVERLOADED * about, span_s)
    ended: list[RequestEnd] = []
    simulation = Simulation(one_model(engine), _simulated(more, FIFO), ended.append)
    simulation.run_for(span_s)
    first_s = simulation.began_s + span_s / 3
    return sum(end.ended_s >= first_s for end in ended) / (span_s * 2 / 3)


def _simulated(requests: Sequence[Request], arm: Arm) -> list[SimulatedRequest]:
    normal = RequestClass.NORMAL
    tenants = [one.tenant if arm.by_client else "all" for one in requests]
    return [
        SimulatedRequest(one.at_s, tenant, normal, MODEL, one.prompt_tokens, one.output_tokens)
        for one, tenant in zip(requests, tenants, strict=True)
    ]


def _answer(asked: Request, end: RequestEnd, began_s: float) -> Answer:
    if end.first_s is None:
        raise AssertionError(f"nobody is refused here: {end}")
    prompt = asked.prompt_tokens
    output = asked.output_tokens
    return Answer(asked.tenant, asked.at_s, prompt, output, end.first_s - began_s, end.ended_s - began_s, output)
