"""One engine replica: its batch, its requests, and how far its life is. Its owner is `fleet`.

Invariant: a run is with its router until the router was told that it has ended or that its replica is lost.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Protocol

from autoscaling.simulator.clock import Clock
from autoscaling.simulator.engine import SimulatedBatch, SimulatedSequence
from autoscaling.simulator.nodes import GpuPlace
from autoscaling.simulator.world import ModelPlan
from serve_app.core.kv_budget import requests_at_once
from serve_app.core.memory import EngineReport


class ReplicaState(enum.Enum):
    """How far a replica is."""

    UNPLACED = "unplaced"  # no node has room
    WAITING = "waiting"  # for its memory
    STARTING = "starting"
    RUNNING = "running"
    DRAINING = "draining"
    ENDED = "ended"


class ReplicaRun(Protocol):
    """A request that runs on a replica, as its router has it."""

    sequence: SimulatedSequence

    @property
    def is_row(self) -> bool:
        """Whether its request is a row of a batch."""

    def on_tokens(self, produced: int) -> None:
        """It has produced so many tokens by now, with those of earlier runs."""

    def on_end(self) -> None:
        """It has produced all."""

    def on_stop(self) -> None:
        """Its replica drains, and it is to go on elsewhere."""

    def on_lost(self, produced: int) -> None:
        """Its replica has died, when it had produced so many."""


@dataclass(slots=True, eq=False)
class Replica:
    """One replica. `number`: in the order of all starts. `report`: its last one to the quota actor."""

    name: str
    number: int
    plan: ModelPlan
    clock: Clock
    state: ReplicaState = ReplicaState.UNPLACED
    place: GpuPlace | None = None
    report: EngineReport | None = None
    placed_s: float = 0.0
    runs: dict[SimulatedSequence, ReplicaRun] = field(default_factory=dict)
    rows: int = 0  # of batches, among the runs
    batch: SimulatedBatch = field(init=False)
    _wakes_at: float | None = None

    def __post_init__(self) -> None:
        self.batch = SimulatedBatch(self.plan.profile)

    @property
    def usable_slots(self) -> float:
        """Requests that it can run at once, as it would report them."""
        profile = self.plan.profile
        running = len(self.batch.running)
        return requests_at_once(profile.slots, running, running, self.kv_use)

    @property
    def kv_use(self) -> float:
        """The share of its KV cache in use."""
        return self.batch.kv_used / self.plan.profile.kv_tokens

    @property
    def slot_use(self) -> float:
        """The share of its slots in use."""
        return min(1.0, len(self.batch.running) / self.plan.profile.slots)

    def begin(self, run: ReplicaRun) -> None:
        """A router sends a request."""
        self.runs[run.sequence] = run
        self.rows += run.is_row
        self.batch.add(run.sequence, self.clock.now)
        self._plan_wake()

    def stop(self, run: ReplicaRun) -> int:
        """A router takes its request back; returns the tokens that it has produced."""
        produced = self.batch.produced(run.sequence, self.clock.now)
        del self.runs[run.sequence]
        self.rows -= run.is_row
        self.batch.cancel(run.sequence, self.clock.now)
        self._plan_wake()
        return produced

    def die(self) -> None:
        """Its process ends at once, and every router is told."""
        lost = [(run, self.batch.produced(run.sequence, self.clock.now)) for run in self.runs.values()]
        self.runs.clear()
        self.rows = 0
        self._wakes_at = None
        for run, produced in lost:
            run.on_lost(produced)

    def count_tokens(self) -> None:
        """Every router gets the number of tokens that its requests have produced."""
        for run in list(self.runs.values()):
            run.on_tokens(self.batch.produced(run.sequence, self.clock.now))

    def _plan_wake(self) -> None:
        due = self.batch.due
        if due is not None and (self._wakes_at is None or due < self._wakes_at):
            self._wakes_at = due
            self.clock.at(due, lambda: self._wake(due))

    def _wake(self, at_s: float) -> None:
        if self._wakes_at != at_s:
            return
        self._wakes_at = None
        for sequence in self.batch.advance(self.clock.now):
            run = self.runs.get(sequence)
            if run is None:
                continue  # its router has stopped it, since another of this step has ended
            if sequence.has_ended:
                del self.runs[sequence]
                self.rows -= run.is_row
                run.on_end()
            else:
                run.on_tokens(self.batch.produced(sequence, self.clock.now))
        self._plan_wake()
