"""One day in virtual time: the queue of each model, the worker of the batch lane, and scaling, all by the pure cores.

A model's queue is `core.queue.Admission`, the worker's numbers are those of `core.batches`, replicas follow
`autoscaling.policies`. Behind the queue every step of an engine takes the same time, so a request runs for its prompt's
reading and one step a token, whoever runs beside it: what people lose by rows is their wait in the queue alone.

Invariant: every request of people and every row ends exactly once; nothing is refused.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from autoscaling.policies import OngoingRequestsPolicy, Signals
from autoscaling.simulator import Clock
from benchmarks.batch_day.plan import HOUR_S, BatchPlan, ModelPlan, Person
from benchmarks.common.own_pools import set_replica
from benchmarks.fairness.simulation import NEVER_S, SHIPPED, Shape
from serve_app.core.batches import ModelFigures, ModelPace, WaitingRows, share_rows
from serve_app.core.queue import Action, Admission, Arrival, Grant
from serve_app.types import RequestClass

DAY_S = 24 * HOUR_S
BIN_S = 60.0  # of what is told of who ran when
ENGINE = Shape()
STEP_S = ENGINE.decode_step_s + ENGINE.slots * ENGINE.sequence_step_s  # of a full batch, whatever runs
FIGURES_S = 0.2  # between the worker's looks at the queue's figures, as it looks
HAND_OVER_S = 0.03  # from a row's end until the next one reaches the queue: about what a worker takes on a busy machine
MAX_IN_FLIGHT = 512  # rows of a worker, as shipped
SCALE_S = 1.0  # between the policy's decisions
TARGET_ONGOING = 64.0  # requests a replica: its slots
LOOK_BACK_S = 30.0
TO_ZERO_S = 300.0  # without a request, after which the last replica is given up
GUARD_SLOTS_SHARE = 0.5  # as shipped: at most, and only while requests of class `high` come
POLICY = replace(SHIPPED, no_replica_wait_s=NEVER_S, guard_slots_share=GUARD_SLOTS_SHARE)


@dataclass(slots=True)
class Minute:
    """Slot-seconds of one bin: of replicas that are ready, used by people, used by rows; and the rows that ended."""

    slots: float = 0.0
    people: float = 0.0
    rows: float = 0.0
    rows_ended: int = 0


@dataclass(frozen=True, slots=True)
class Waited:
    """A request of people that has ended."""

    at_s: float
    model: str
    level: RequestClass
    wait_s: float
    service_s: float


@dataclass(slots=True)
class _Batch:
    plan: BatchPlan
    sent: int = 0
    ended: int = 0
    ended_at: float | None = None

    @property
    def waiting(self) -> WaitingRows:
        plan = self.plan
        return WaitingRows(plan.batch_id, plan.tenant, plan.at_s, len(plan.rows) - self.sent)


@dataclass(slots=True)
class _Job:
    """What waits or runs: a request of people, or a row of a batch."""

    arrived: float
    tokens: tuple[int, int]
    level: RequestClass
    batch: _Batch | None
    wait_s: float = 0.0

    @property
    def service_s(self) -> float:
        prompt, output = self.tokens
        return prompt / ENGINE.prefill_tokens_per_s + output * STEP_S


@dataclass(slots=True)
class Model:
    """One model of the day."""

    plan: ModelPlan
    clock: Clock
    waited: list[Waited] = field(default_factory=list)
    minutes: dict[int, Minute] = field(default_factory=dict)
    batches: dict[str, _Batch] = field(default_factory=dict)
    replica_changes: list[tuple[float, int]] = field(default_factory=list)
    idle_s: float = 0.0  # slot-seconds without people while rows were left to send
    filled_s: float = 0.0  # those of them in which a row ran
    _admission: Admission = field(default_factory=lambda: Admission(POLICY))
    _pace: ModelPace = field(default_factory=lambda: ModelPace(MAX_IN_FLIGHT))
    _policy: OngoingRequestsPolicy = field(default_factory=OngoingRequestsPolicy)
    _jobs: dict[str, _Job] = field(default_factory=dict)
    _running: Counter[bool] = field(default_factory=Counter)  # by whether it is a row
    _rows_out: Counter[str] = field(default_factory=Counter)  # rows in flight, by tenant
    _figures_run: bool = False
    _replicas: int = 0
    _target: int = 0
    _unused_since: float | None = None
    _counted_at: float = 0.0
    _numbers: int = 0

    def __post_init__(self) -> None:
        self._target = self.plan.min_replicas
        for _ in range(self._target):
            self._replica_ready()
        self.clock.every(BIN_S, self._count)
        if self.plan.min_replicas != self.plan.max_replicas:
            self.clock.every(SCALE_S, self._scale)

    # People

    def ask(self, person: Person) -> None:
        """A request of people arrives."""
        tokens = person.prompt_tokens, person.output_tokens
        self._arrive(_Job(self.clock.now, tokens, person.level, None), "people")

    # The worker

    def submit(self, plan: BatchPlan) -> None:
        """A batch has been validated."""
        self._count()
        self.batches[plan.batch_id] = _Batch(plan)
        if not self._figures_run:
            self._figures_run = True
            self._look()

    def _look(self) -> None:
        """The worker gets the queue's figures and sends what they allow."""
        if not self._pace.in_flight and not self._rows_left:
            self._figures_run = False
            return
        busy = self._running.total()
        waiting = self._admission.waiting
        waiting_rows = sum(1 for job in self._waiting_jobs() if job.batch is not None) if waiting else 0
        figures = ModelFigures(self._slots, busy, waiting, waiting_rows)
        self._pace.on_figures(figures, self._pace.in_flight, self.clock.now, HAND_OVER_S)
        self._send()
        self.clock.after(FIGURES_S, self._look)

    def _send(self) -> None:
        free = self._pace.may_start(self.clock.now)
        if not free:
            return
        waiting = [batch.waiting for batch in self.batches.values() if batch.waiting.rows]
        for batch_id, count in share_rows(free, waiting, self._rows_out, {}).items():
            batch = self.batches[batch_id]
            for _ in range(count):
                tokens = batch.plan.rows[batch.sent]
                batch.sent += 1
                self._rows_out[batch.plan.tenant] += 1
                self._pace.on_start(self.clock.now)
                self.clock.after(HAND_OVER_S / 2, partial(self._row, batch, tokens))
        self._count()

    def _row(self, batch: _Batch, tokens: tuple[int, int]) -> None:
        """A row reaches the queue."""
        self._arrive(_Job(self.clock.now, tokens, RequestClass.LOW, batch), batch.plan.tenant)

    def _row_ended(self, batch: _Batch) -> None:
        """The worker has a row's answer."""
        self._rows_out[batch.plan.tenant] -= 1
        batch.ended += 1
        if batch.ended == len(batch.plan.rows):
            batch.ended_at = self.clock.now
        self._pace.on_end(self.clock.now)
        self._send()

    @property
    def _rows_left(self) -> int:
        return sum(batch.waiting.rows for batch in self.batches.values())

    # The queue and the engines

    @property
    def _slots(self) -> int:
        return self._replicas * self.plan.slots

    def _waiting_jobs(self) -> list[_Job]:
        return [self._jobs[request_id] for request_id in self._admission.queue.by_id]

    def _arrive(self, job: _Job, tenant: str) -> None:
        self._numbers += 1
        request_id = f"request-{self._numbers}"
        self._jobs[request_id] = job
        arrival = Arrival(request_id, job.level, tenant, 1, sum(job.tokens), prompt_tokens=job.tokens[0])
        self._carry_out(self._admission.on_arrive(arrival, self.clock.now))

    def _carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            if not isinstance(action, Grant):
                raise AssertionError(f"nobody is refused here: {action}")
            job = self._jobs[action.request_id]
            job.wait_s = self.clock.now - job.arrived
            self._count()
            self._running[job.batch is not None] += 1
            self.clock.after(job.service_s, partial(self._end, action.request_id))

    def _end(self, request_id: str) -> None:
        job = self._jobs.pop(request_id)
        self._count()
        self._running[job.batch is not None] -= 1
        if job.batch is not None:
            self._minute().rows_ended += 1
            self.clock.after(HAND_OVER_S / 2, partial(self._row_ended, job.batch))
        else:
            self.waited.append(Waited(job.arrived, self.plan.name, job.level, job.wait_s, job.service_s))
        prompt, output = job.tokens
        self._carry_out(self._admission.on_done(request_id, self.clock.now, prompt, output))

    def _scale(self) -> None:
        """Ask the policy, and apply its decision after the delays that Serve applies."""
        now = self.clock.now
        waiting = float(self._admission.waiting)
        granted = float(self._running.total())
        rows = sum(job.batch is not None for job in self._waiting_jobs()) + self._running[True]
        signals = Signals(
            running=self._replicas,
            target=self._target,
            waiting=waiting,
            granted=granted,
            rows=float(rows),
            executing=float(self._running[False]),
            complete=True,
            cold_start_requested=False,
            min_replicas=self.plan.min_replicas,
            max_replicas=self.plan.max_replicas,
            target_ongoing=TARGET_ONGOING,
            look_back_s=LOOK_BACK_S,
            now=now,
        )
        wanted = self._policy.decide(signals).replicas
        if wanted > self._target:
            starts, self._target = wanted - self._target, wanted
            for _ in range(starts):
                self.clock.after(self.plan.start_s, self._replica_ready)
        if wanted >= self._target or self._replicas < self._target:
            self._unused_since = None
        elif self._unused_since is None:
            self._unused_since = now
        elif now - self._unused_since >= TO_ZERO_S and not granted:
            self._target = wanted
            self._unused_since = None
            self._set_replicas(wanted)

    def _replica_ready(self) -> None:
        self._set_replicas(self._replicas + 1)

    def _set_replicas(self, count: int) -> None:
        self._count()
        before, self._replicas = self._replicas, count
        self.replica_changes.append((self.clock.now, count))
        for number in range(before, count):
            self._carry_out(set_replica(self._admission, f"replica-{number}", self.plan.slots, self.clock.now))
        for number in range(count, before):
            self._carry_out(self._admission.on_replica_gone(f"replica-{number}", self.clock.now))

    def _minute(self) -> Minute:
        return self.minutes.setdefault(math.floor(self._counted_at / BIN_S), Minute())

    def _count(self) -> None:
        """Add up who ran since the last change."""
        span_s = self.clock.now - self._counted_at
        if span_s > 0.0:
            minute = self._minute()
            people = self._running[False]
            rows = self._running[True]
            minute.slots += span_s * self._slots
            minute.people += span_s * people
            minute.rows += span_s * rows
            if self._rows_left:
                self.idle_s += span_s * (self._slots - people)
                self.filled_s += span_s * rows
        self._counted_at = self.clock.now


def play(
    models: Sequence[ModelPlan], people: Sequence[Person], batches: Sequence[BatchPlan], span_s: float = DAY_S
) -> dict[str, Model]:
    """The day, by model."""
    clock = Clock()
    found = {plan.name: Model(plan, clock) for plan in models}
    for batch in batches:
        clock.after(batch.at_s, partial(found[batch.model].submit, batch))
    left: deque[Person] = deque(people)

    def following() -> None:
        """The next request of people, one event at a time."""
        if left:
            person = left.popleft()
            clock.after(max(0.0, person.at_s - clock.now), partial(arrive, person))

    def arrive(person: Person) -> None:
        found[person.model].ask(person)
        following()

    following()
    clock.run(span_s)
    return found
