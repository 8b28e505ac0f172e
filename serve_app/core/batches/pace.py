"""How many rows of a model may be in flight now, and which batch's rows come next.

A row in flight runs in a slot, waits in the model's queue, or is on its way. The rows in flight are those that the
figures of the queue allow: every slot that nobody uses or waits for, and in the queue no more rows than end during one
hand-over. A hand-over is the time from the end of a row in its slot until the next row reaches the queue; during it the
slot would be idle.

Invariant: at least one row of a model with rows is in flight, so that a model scaled to zero starts; never more than a
bound.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from serve_app.core.messages import message

RATE_WINDOW_S = 2.0  # over which ends are counted: short enough to follow people, hundreds of ends of short rows
RATE_ENDS = 8  # the last ends count whatever their age: one end of a long row is no rate
IDLE_LOSS = 0.02  # of the slots: a loss by hand-overs below this needs no row that waits
MAX_HAND_OVER_S = 2.0  # a longer one is a stall and no reason to queue more rows
FIGURES_VALID_S = 5.0  # older figures say nothing about now: a router starts again in this time


@message
@dataclass(frozen=True, slots=True)
class ModelFigures:
    """Figures of one model's queue, at one moment.

    Args:
        slots: of all replicas that are ready.
        busy: slots in use, by everybody.
        waiting: sequences that wait, of all classes, the rows of batches too.
        waiting_low: those of class `low`.
    """

    slots: int
    busy: int
    waiting: int
    waiting_low: int


class ModelPace:
    """The rows of one model in flight, and how many may be.

    Args:
        max_in_flight: rows.
        workers: processes that run rows at the same time: each fills its part of what is idle.
    """

    def __init__(self, max_in_flight: int, workers: int = 1) -> None:
        self.in_flight = 0
        self._max = max_in_flight
        self._workers = workers
        self._target = 1
        self._valid_until = -math.inf
        self._fill = math.inf  # idle slots to fill at once; one, and twice as many each time, after some were unusable
        self._started: deque[float] = deque()  # of the last `MAX_HAND_OVER_S`
        self._ended: deque[float] = deque()  # of the last `RATE_WINDOW_S`, and the last `RATE_ENDS`

    def on_start(self, now: float) -> None:
        """A row is sent."""
        self.in_flight += 1
        self._started.append(now)

    def on_end(self, now: float) -> None:
        """A row's answer has arrived, or the row was given up."""
        self.in_flight -= 1
        self._ended.append(now)
        while len(self._ended) > RATE_ENDS and self._ended[0] < now - RATE_WINDOW_S:
            self._ended.popleft()

    def on_figures(self, figures: ModelFigures, in_flight: int, now: float, hand_over_s: float) -> None:
        """Decide how many rows may be in flight until the next figures.

        Args:
            in_flight: rows in flight when the figures were asked for, at `now`.
            hand_over_s: measured.
        """
        hand_over_s = min(hand_over_s, MAX_HAND_OVER_S)
        look_ahead = self.look_ahead(figures, now, hand_over_s)
        while self._started and self._started[0] <= now - hand_over_s:
            self._started.popleft()
        recent = sum(1 for started in self._started if started <= now)
        # a burst that was sent just now is not in the figures yet; the steady part of what was sent is the look-ahead
        known = in_flight - min(in_flight, max(0, recent - look_ahead))
        # and rows whose answers are on the way are in the figures no more
        known = min(known, figures.busy + figures.waiting_low + look_ahead)
        idle = figures.slots - figures.busy
        if idle > 0 and figures.waiting_low > 0:
            # not for rows: KV tokens are missing, or they are guard slots
            idle = 0
            self._fill = 1
        elif idle > 0:
            idle, self._fill = math.ceil(min(idle, self._fill) / self._workers), 2 * self._fill
        self._target = known + idle - figures.waiting + look_ahead
        self._valid_until = now + FIGURES_VALID_S

    def look_ahead(self, figures: ModelFigures, now: float, hand_over_s: float) -> int:
        """Rows that should wait in the queue: those that end during one hand-over."""
        ends = self.ends_per_s(now) * hand_over_s
        return 0 if ends <= IDLE_LOSS * figures.slots else math.ceil(ends)

    def ends_per_s(self, now: float) -> float:
        span = max(RATE_WINDOW_S, now - self._ended[0]) if self._ended else RATE_WINDOW_S
        return len(self._ended) / span

    def may_start(self, now: float) -> int:
        """Rows that may be sent now."""
        target = self._target if now <= self._valid_until else 1
        return max(0, min(max(target, 1), self._max) - self.in_flight)


@dataclass(frozen=True, slots=True)
class WaitingRows:
    """Rows of one batch and one model that can be claimed."""

    batch_id: str
    tenant: str
    created_at: float
    rows: int


def share_rows(
    free: int, waiting: Iterable[WaitingRows], in_flight: Mapping[str, int], weights: Mapping[str, float]
) -> dict[str, int]:
    """How many rows of which batch come next, at most `free` together.

    The next row is always of the tenant with the fewest rows in flight over its weight, and of that tenant's oldest
    batch. Equal tenants come in order of their oldest batch.

    Args:
        in_flight: rows of the model in flight, by tenant.
        weights: by tenant; 1.0 where it is missing.
    """
    queues: dict[str, deque[WaitingRows]] = {}
    for batch in sorted(waiting, key=lambda rows_of_batch: (rows_of_batch.created_at, rows_of_batch.batch_id)):
        if batch.rows > 0:
            queues.setdefault(batch.tenant, deque()).append(batch)
    heap = [(in_flight.get(tenant, 0) / weights.get(tenant, 1.0), order, tenant) for order, tenant in enumerate(queues)]
    heapq.heapify(heap)
    counts = {tenant: in_flight.get(tenant, 0) for tenant in queues}
    given: dict[str, int] = {}
    while heap and free > 0:
        _, order, tenant = heapq.heappop(heap)
        batch = queues[tenant][0]
        given[batch.batch_id] = given.get(batch.batch_id, 0) + 1
        counts[tenant] += 1
        free -= 1
        if given[batch.batch_id] == batch.rows:
            queues[tenant].popleft()
        if queues[tenant]:
            heapq.heappush(heap, (counts[tenant] / weights.get(tenant, 1.0), order, tenant))
    return given


class Pauses:
    """Until when the rows of a key and a model are not sent: they were told to come later."""

    def __init__(self) -> None:
        self._until: dict[tuple[str, str], float] = {}

    def pause(self, key: str, model: str, until: float) -> None:
        self._until[key, model] = max(until, self._until.get((key, model), -math.inf))

    def is_paused(self, key: str, model: str, now: float) -> bool:
        until = self._until.get((key, model))
        if until is not None and until <= now:
            del self._until[key, model]
            return False
        return until is not None
