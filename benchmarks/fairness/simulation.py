"""The waiting line in front of one engine, in virtual time: nothing sleeps, a run is a function of its requests.

The line is `core.queue.admission`, told what arrives, what is produced (every few tokens, as routers gather their
words) and what has ended; what a request will need it learns from those that have ended (`core.estimate.estimate`),
never from the trace. Behind it is the scheduler of the simulated engine: continuous batching with chunked prefill, a KV
pool, and vLLM's recompute preemption where an estimate was too small. A tenth of the pool is kept for that, as the
ledger keeps it.

Arms differ in what the line knows of tenants and in its policy, in nothing else:

    fifo       one tenant for all: order of arrival
    ours       a tenant for each client, everything as it is shipped
    untold     ours, told what was produced only at a request's end, as a router's own line is today

Invariant: every request of the trace is granted in the end, unless the run is cut at `until_s`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.common.own_pools import set_replica
from benchmarks.common.traces import MODEL, Request, request
from benchmarks.fairness.metric import Answer
from benchmarks.fairness.trace import Lengths, arrivals
from serve_app.core.estimate import Estimator, ObservedUse
from serve_app.core.memory import GROWTH_SHARE
from serve_app.core.queue import Action, Admission, Arrival, Grant, QueuePolicy
from serve_app.engine import simulated
from serve_app.types import RequestClass

REPLICA = "replica"
NEVER_S = 1e9
OVERLOADED = 2.6  # times what the engine serves, where its capacity is measured: about what is measured with it
MANY_STEPS = 20  # of the engine: no mean answer is shorter, so as many requests as that allows are always enough
REPORTED_TOKENS = (
    8  # a quarter of a second of a stream; told of every token the figures are the same and the run takes twice
)
# As shipped, save for the two bounds that refuse: VTC's server lets everybody wait, and a refused request has no wait.
SHIPPED = QueuePolicy(max_queued=10**9, max_wait_s=NEVER_S)


@dataclass(frozen=True, slots=True)
class Shape:
    """An engine: about an 8B model in bfloat16 on a 24 GB GPU (16 GB of weights at 600 GB/s, 128 KiB of KV a token)."""

    slots: int = 64
    kv_tokens: int = 36_000
    prefill_tokens_per_s: float = 4000.0
    decode_step_s: float = 0.027
    sequence_step_s: float = 0.0003


@dataclass(frozen=True, slots=True)
class Arm:
    """What the line is told and how it decides."""

    name: str
    by_client: bool = True
    reports_progress: bool = True
    policy: QueuePolicy = SHIPPED


FIFO = Arm("fifo", by_client=False)
OURS = Arm("ours")
UNTOLD = Arm("untold", reports_progress=False)
ARMS = (FIFO, OURS, UNTOLD)


@dataclass(frozen=True, slots=True)
class Played:
    """What became of every request that came, in the order of the trace; `ended_s` is the moment of the last event."""

    answers: tuple[Answer, ...]
    preemptions: int
    ended_s: float


@dataclass(slots=True)
class _Job:
    request: Request
    sequence: simulated.Sequence
    first_s: float | None = None
    seen_s: float | None = None


class QueueRun:
    """One run."""

    def __init__(self, arm: Arm, shape: Shape) -> None:
        self._arm = arm
        self._engine = simulated.SimulatedScheduler(
            slots=shape.slots,
            kv_tokens=shape.kv_tokens,
            prefill_tokens_per_s=shape.prefill_tokens_per_s,
            decode_step_s=shape.decode_step_s,
            sequence_step_s=shape.sequence_step_s,
        )
        self._estimator = Estimator()
        self._admission = Admission(arm.policy)
        self._most_tokens = shape.kv_tokens - int(shape.kv_tokens * GROWTH_SHARE)
        set_replica(self._admission, REPLICA, shape.slots, 0.0, self._most_tokens)
        self._jobs: dict[str, _Job] = {}
        self._by_sequence: dict[int, str] = {}  # by the sequence's number in the engine

    def play(self, requests: Sequence[Request], until_s: float = math.inf) -> Played:
        """All requests, in order of arrival, to the end or until a moment."""
        left = iter(requests)
        now = 0.0
        following = next(left, None)
        while True:
            due = math.inf if self._engine.due is None else self._engine.due
            comes = math.inf if following is None else following.at_s
            if min(due, comes) >= until_s or due == comes == math.inf:
                break
            now = min(due, comes)
            if following is not None and comes <= due:
                self._arrive(following, now)
                following = next(left, None)
            else:
                self._step(now)
        met = [self._answer(job) for job in self._jobs.values()]
        return Played(tuple(met), self._engine.preemptions, now)

    def _arrive(self, request: Request, now: float) -> None:
        guess = self._estimator.estimate(request.tenant, MODEL, request.prompt_bytes)
        request_id = f"request-{len(self._jobs)}"
        self._jobs[request_id] = _Job(request, simulated.Sequence(request.prompt_tokens, request.output_tokens))
        tenant = request.tenant if self._arm.by_client else "all"
        cost = min(max(1, guess.prompt_tokens + guess.output_tokens), self._most_tokens)
        arrival = Arrival(request_id, RequestClass.NORMAL, tenant, 1, cost, prompt_tokens=guess.prompt_tokens)
        self._carry_out(self._admission.on_arrive(arrival, now), now)

    def _step(self, now: float) -> None:
        """The engine ends a step and begins the next."""
        for sequence in self._engine.advance(now):
            request_id = self._by_sequence[sequence.order]
            job = self._jobs[request_id]
            job.first_s = now if job.first_s is None else job.first_s
            job.seen_s = now
            if sequence.state is simulated.SequenceState.DONE:
                self._end(request_id, job.request, now)
            elif self._arm.reports_progress and sequence.produced % REPORTED_TOKENS == 0:
                self._carry_out(self._admission.on_progress(request_id, REPORTED_TOKENS, now), now)

    def _end(self, request_id: str, request: Request, now: float) -> None:
        use = ObservedUse(request.tenant, MODEL, request.prompt_bytes, request.prompt_tokens, request.output_tokens)
        self._estimator.observe(use)
        actions = self._admission.on_done(request_id, now, request.prompt_tokens, request.output_tokens)
        self._carry_out(actions, now)

    def _carry_out(self, actions: list[Action], now: float) -> None:
        for action in actions:
            if not isinstance(action, Grant):
                raise AssertionError(f"nobody is refused here: {action}")
            sequence = self._jobs[action.request_id].sequence
            self._engine.add(sequence, now)
            self._by_sequence[sequence.order] = action.request_id

    @staticmethod
    def _answer(job: _Job) -> Answer:
        request = job.request
        served = job.sequence.produced
        return Answer(
            request.tenant, request.at_s, request.prompt_tokens, request.output_tokens, job.first_s, job.seen_s, served
        )


def play(requests: Sequence[Request], arm: Arm, shape: Shape, until_s: float = math.inf) -> Played:
    """One run of one arm."""
    return QueueRun(arm, shape).play(requests, until_s)


def capacity(lengths: Sequence[Lengths], shape: Shape, span_s: float, seed: int = 0) -> float:
    """Requests per second that the engine ends while there are always more.

    Found in two turns, since an estimate is made when a request comes: of those that come all at once none is learned.
    The first third of the span is not counted: the batch fills and the estimates are learned in it.
    """
    draw = random.Random(seed)
    short_s = span_s / 10  # for a first guess
    chosen = [draw.choice(lengths) for _ in range(int(short_s * shape.slots / shape.decode_step_s / MANY_STEPS))]
    at_once = [request(draw, 0.0, "all", one.prompt, one.output) for one in chosen]
    about = _ended_per_s(play(at_once, FIFO, shape, short_s), short_s)
    more = arrivals(seed, lengths, {"all": 1.0}, OVERLOADED * about, span_s)
    return _ended_per_s(play(more, FIFO, shape, span_s), span_s)


def _ended_per_s(played: Played, span_s: float) -> float:
    """Requests that ended in the last two thirds of a span, per second.

    Raises:
        ValueError: nobody waited at its end, so the engine may have been idle.
    """
    if all(one.first_s is not None for one in played.answers):
        raise ValueError(f"{len(played.answers)} requests are too few for {span_s:g} s")
    ended = [one.seen_s for one in played.answers if one.served_tokens == one.output_tokens and one.seen_s is not None]
    return sum(at_s >= span_s / 3 for at_s in ended) / (span_s * 2 / 3)
