"""The batch worker: sends rows where people leave slots idle, as `serve_app.batch` does, by the same core.

Rules
- While rows are left, the worker reads the figures of each model's queue every `FIGURES_S`, and sends what they allow.
- A row is a request of class `low`. It reaches a router half a hand-over after it was sent, its answer the worker as
  much later. One that was refused or lost is sent again.

Invariant: every row ends exactly once: answered, or as one that no engine could hold.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from autoscaling.simulator.clock import Clock
from autoscaling.simulator.exchange import VirtualActor
from autoscaling.simulator.requests import RequestEnd, SimulatedRequest
from autoscaling.simulator.world import BatchPlan
from serve_app.core.batches import ModelFigures, ModelPace, WaitingRows, share_rows
from serve_app.types import Outcome, RequestClass

FIGURES_S = 0.2  # as in `serve_app.batch`, and the most rows in flight
MAX_IN_FLIGHT = 512
HAND_OVER_S = 0.03  # from a row's end until the next one reaches the queue: about what a worker takes on a busy machine
FINAL = frozenset({Outcome.OK, Outcome.BAD_REQUEST})
NO_FIGURES = ModelFigures(0, 0, 0, 0)

# A request, and what takes its end.
Offer = Callable[[SimulatedRequest, Callable[[RequestEnd], None]], None]


@dataclass(slots=True)
class SubmittedBatch:
    """A batch that was submitted. `ended_s`: when its last row ended; None: some are left."""

    plan: BatchPlan
    left: deque[tuple[int, int]]
    ended: int = 0
    ended_s: float | None = None


@dataclass(slots=True)
class _ModelRows:
    """The rows of one model. `out`: in flight, by tenant."""

    batches: list[SubmittedBatch] = field(default_factory=list)
    pace: ModelPace = field(default_factory=lambda: ModelPace(MAX_IN_FLIGHT))
    out: Counter[str] = field(default_factory=Counter)
    is_looking: bool = False


class VirtualBatchWorker:
    """See the module. `plans` count their moments from `began_s`."""

    def __init__(
        self, plans: Iterable[BatchPlan], clock: Clock, began_s: float, actor: VirtualActor, offer: Offer
    ) -> None:
        self._clock = clock
        self._actor = actor
        self._offer = offer
        self._models: dict[str, _ModelRows] = {}
        self.batches = [SubmittedBatch(plan, deque(plan.rows)) for plan in plans]
        self._open = sum(len(batch.left) for batch in self.batches)
        for batch in self.batches:
            clock.at(began_s + batch.plan.at_s, partial(self._submit, batch))

    @property
    def is_done(self) -> bool:
        """Whether every row of every batch has ended."""
        return not self._open

    def _submit(self, batch: SubmittedBatch) -> None:
        model = batch.plan.model
        rows = self._models.setdefault(model, _ModelRows())
        rows.batches.append(batch)
        if not rows.is_looking:
            rows.is_looking = True
            self._look(model, rows)

    def _look(self, model: str, rows: _ModelRows) -> None:
        """Read the queue's figures, and send what they allow."""
        if not rows.pace.in_flight and not any(batch.left for batch in rows.batches):
            rows.is_looking = False
            return
        now = self._clock.now
        if not self._actor.away:
            found = self._actor.quota.model_figures().get(model, NO_FIGURES)
            rows.pace.on_figures(found, rows.pace.in_flight, now, HAND_OVER_S)
        self._send(rows)
        self._clock.after(FIGURES_S, lambda: self._look(model, rows))

    def _send(self, rows: _ModelRows) -> None:
        now = self._clock.now
        free = rows.pace.may_start(now)
        if not free:
            return
        by_id = {batch.plan.batch_id: batch for batch in rows.batches if batch.left}
        waiting = [WaitingRows(name, one.plan.tenant, one.plan.at_s, len(one.left)) for name, one in by_id.items()]
        for name, count in share_rows(free, waiting, rows.out, {}).items():
            for _ in range(count):
                batch = by_id[name]
                rows.out[batch.plan.tenant] += 1
                rows.pace.on_start(now)
                self._clock.after(HAND_OVER_S / 2, partial(self._reach, rows, batch, batch.left.popleft()))

    def _reach(self, rows: _ModelRows, batch: SubmittedBatch, row: tuple[int, int]) -> None:
        """A row reaches a router."""
        plan = batch.plan
        asked = SimulatedRequest(self._clock.now, plan.tenant, RequestClass.LOW, plan.model, *row, is_row=True)

        def end(found: RequestEnd) -> None:
            again = None if found.outcome in FINAL else row
            self._clock.after(HAND_OVER_S / 2, lambda: self._ended(rows, batch, again))

        self._offer(asked, end)

    def _ended(self, rows: _ModelRows, batch: SubmittedBatch, again: tuple[int, int] | None) -> None:
        """The worker has the end of a row, which is to be sent again, or not."""
        rows.out[batch.plan.tenant] -= 1
        rows.pace.on_end(self._clock.now)
        if again is not None:
            batch.left.append(again)
        else:
            batch.ended += 1
            self._open -= 1
            if batch.ended == len(batch.plan.rows):
                batch.ended_s = self._clock.now
        self._send(rows)
