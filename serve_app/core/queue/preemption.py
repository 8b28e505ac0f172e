"""Which running requests stop so that waiting ones can start, and go on later with what they have produced.

Rules
- A waiting request for which no replica has room, not even with what is stopping already, stops requests of lower
  classes: of one replica, and those that lose the fewest KV token-seconds (tokens in the KV cache times the time since
  the grant).
- A request that has gone on is not stopped again before it has run for `RESUMED_S`, which doubles each time. So a
  request is stopped a number of times that grows with the logarithm of its length. For a class below the guarded ones
  (`core.queue.drain_rate`) this holds from its first grant: such a class overloads itself, and in the moments when none
  of it waits lower requests begin, which would be stopped at once, their prefill wasted.
- A request of the same class stops for a shorter one once it has run for `QUANTUM_S`, which doubles each time it was
  stopped, and goes on behind those that wait. So one very long answer does not keep the others out. These are the
  doubling quanta of multi-level feedback queues (Corbato et al., 1962; for language models FastServe, Wu et al., 2023).
- A request that was due by the minimum share is never stopped: that would undo the minimum share.
- Free guard slots are no room for a class below the guarded ones: a lower class stops for it. None stops while guard
  slots are lacking: what it leaves would be kept.
- One that has not stopped after `STOP_S` will not: its engine does not answer, or it cannot go on elsewhere.

Invariant: what stops is counted once, as room for the requests that it stops for, until it has stopped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from operator import itemgetter

from serve_app.core.queue.capacity import Capacity
from serve_app.core.queue.class_queue import ClassQueue
from serve_app.core.queue.events import Preempt
from serve_app.core.queue.rooms import Room, RoomPlan, Rooms
from serve_app.core.queue.stoppable_runs import GROWN_S, GrantedRequest, StoppableRuns
from serve_app.core.queue.tenant_queue import Need, QueuedRequest
from serve_app.types import RequestClass

STOP_S = 2.0  # a stop takes a step of the engine and two messages
REST_S = 0.05  # after a look that has found nothing to stop
MAX_CONSIDERED = 32  # waiting requests of a class for which room is made at once
MAX_LOOKS = 256  # running requests of a class looked at for a waiting one: very many can be of one age and size

LEVELS = tuple(RequestClass)

# The highest class that stops, what is lost, and the number of the first one that stops.
_Price = tuple[int, float, int]


class Preemption:
    """The running requests that can be stopped."""

    def __init__(
        self, class_queues: Sequence[ClassQueue], capacity: Capacity, guard_slots: Callable[[RequestClass], int]
    ) -> None:
        self._class_queues, self._capacity, self._guard_slots = class_queues, capacity, guard_slots
        self.runs = StoppableRuns()  # that are not to stop yet
        self._rooms = Rooms(capacity)
        self._counts = [0] * len(RequestClass)  # running requests that can be stopped, or are to stop, by class
        self._slots = [0] * len(RequestClass)  # that they hold
        self._stopping: dict[str, GrantedRequest] = {}  # those that count as room, in the order of their stops
        self._grants = 0
        self._seen: tuple[int, ...] = ()  # the versions of queues and capacity at the last look
        self._due = [math.inf] * len(RequestClass)  # by class, when time alone lets its waiting requests stop others
        self._rests_until = [-math.inf] * len(RequestClass)  # by class that has found nothing to stop

    def begin(self, run: GrantedRequest) -> None:
        """A request was granted."""
        level = run.arrival.request_class
        if run.arrival.preemptible and not run.was_due:
            self._grants += 1
            run.number = self._grants
            self.runs.add(run)
            self._counts[level] += 1
            self._slots[level] += run.arrival.slots

    def grown(self, run: GrantedRequest) -> None:
        """The tokens of a granted request have changed."""
        if run.number and run.stopping_s is None:
            self.runs.grown(run)

    def end(self, run: GrantedRequest) -> None:
        """A granted request has ended."""
        if not run.number:
            return
        level = run.arrival.request_class
        self._counts[level] -= 1
        self._slots[level] -= run.arrival.slots
        if run.stopping_s is None:
            self.runs.remove(run)
        elif self._stopping.pop(run.arrival.request_id, None) is not None:
            self._rooms.stop(run.replica_id, run.arrival, -1)

    def replica_gone(self) -> None:
        """A replica is gone, after its requests have ended: nothing of it is kept."""
        self._rooms.refresh()

    def slots_below(self, request_class: RequestClass) -> int:
        """Slots of requests that can be stopped for this class."""
        return sum(self._slots[:request_class])

    def next_due(self) -> float:
        """When `choose` is to be called though nothing has changed; infinite: not before something does."""
        return min(self._due)

    def choose(self, now: float) -> list[Preempt]:
        """Stop running requests for those that wait, the highest class first. O(log n) for each waiting request that is
        considered; O(1) while nothing has changed; O(replicas) if one finds no room, then not again for `REST_S`."""
        if not any(self._counts):
            self._due = [math.inf] * len(RequestClass)
            return []
        versions = self._capacity.changes, *(one.size for one in self._class_queues)
        if versions == self._seen and now < self.next_due():
            return []
        self._seen = versions
        due, self._due = self._due, [math.inf] * len(RequestClass)
        levels = [one for one in RequestClass if self._class_queues[one].size and any(self._counts[: one + 1])]
        rests = {one for one in levels if now < min(due[one], self._rests_until[one])}
        for level in rests:
            self._due[level] = min(due[level], self._rests_until[level])
        if len(rests) == len(levels):
            return []
        stop_ends = self._end_late_stops(now)
        self._rooms.refresh()
        stopped: list[Preempt] = []
        plan, lowest = RoomPlan(self._rooms), min(one for one in levels if one not in rests)
        for level in reversed(levels):
            self._due[level] = min(stop_ends, self._due[level])
            if level >= lowest:  # those below only take what room is left
                waiting = (entry[2] for one in self._class_queues[level].waiting_tenants() for entry in one.order)
                first = islice(waiting, MAX_CONSIDERED)
                stopped += self._make_room(level, first, plan, now, may_stop=level not in rests)
        return stopped

    def _end_late_stops(self, now: float) -> float:
        """What has not stopped in time is no room any more. Returns when the next one counts no more."""
        while self._stopping:
            name, run = next(iter(self._stopping.items()))
            assert run.stopping_s is not None
            if now < run.stopping_s + STOP_S:
                break
            del self._stopping[name]
            self._rooms.stop(run.replica_id, run.arrival, -1)
        replicas = self._capacity.replicas
        ends = (run.stopping_s for run in self._stopping.values() if replicas[run.replica_id].slots)
        first = next(ends, None)
        return math.inf if first is None else first + STOP_S

    def _make_room(
        self, level: RequestClass, requests: Iterable[QueuedRequest], plan: RoomPlan, now: float, *, may_stop: bool
    ) -> list[Preempt]:
        """Give the waiting requests of a class the room there is, and stop others for more. The replicas that could
        run one for which no room can be made are left to it."""
        stopped: list[Preempt] = []
        kept: set[str] = set()
        spare = plan.free - self._guard_slots(level)
        for waiting in requests:
            need = waiting.need

            def is_allowed(name: str, need: Need = need) -> bool:
                return name not in kept and self._capacity.may_take(name, level, *need)

            chosen, runs = plan.find(waiting, is_allowed) if spare > 0 else None, list[GrantedRequest]()
            if chosen is None:
                is_first = not kept and self._capacity.all_may_take(level, *need)
                allowed = [] if is_first else [name for name in plan.names() if is_allowed(name)]
                if may_stop and (is_first or allowed):
                    if spare >= 0:
                        chosen, runs = self._cheapest(level, waiting, plan, is_allowed, 1 - spare, now)
                    else:  # time alone lets the guard slots become fewer
                        self._due[level] = min(self._due[level], now + GROWN_S)
                    if chosen is None:
                        self._rests_until[level] = now + REST_S
                if chosen is None:
                    if is_first:
                        break
                    kept.update(allowed)
                    continue
                for run in runs:
                    spare += run.arrival.slots
                    plan.add(chosen, run.arrival)
                    stopped.append(self._stop(run, level, now))
                self._due[level] = min(self._due[level], now + STOP_S)
            plan.add(chosen, waiting.arrival, -1)
            spare -= waiting.slots
        return stopped

    def _stop(self, run: GrantedRequest, level: RequestClass, now: float) -> Preempt:
        self.runs.remove(run)
        run.stopping_s = now
        self._stopping[run.arrival.request_id] = run
        self._rooms.stop(run.replica_id, run.arrival)
        return Preempt(run.arrival.request_id, run.replica_id, keeps_place=run.arrival.request_class < level)

    def _cheapest(
        self,
        level: RequestClass,
        waiting: QueuedRequest,
        plan: RoomPlan,
        is_allowed: Callable[[str], bool],
        slots: int,
        now: float,
    ) -> tuple[str | None, list[GrantedRequest]]:
        """The replica on which room costs least, and what has to stop there, of so many slots at least; None: nowhere
        now, perhaps when `_due`."""

        def in_plan(name: str) -> bool:
            return name in plan and is_allowed(name)

        for most_looks in (MAX_LOOKS, math.inf):
            best: tuple[_Price, str, list[GrantedRequest]] | None = None
            seen, self.runs.was_cut = set[str](), False
            for of in LEVELS[: level + 1]:
                for lost, run in self.runs.cheapest(of, level, waiting, now, most_looks):
                    if best is not None and (of, lost) > best[0][:2]:
                        break
                    name = run.replica_id
                    if name in seen:
                        continue
                    seen.add(name)
                    if not in_plan(name):
                        continue
                    found = self._price(name, level, waiting, plan.room(name), slots, now)
                    if found is not None:
                        best = min(best or found, found, key=itemgetter(0))
                if best is not None and best[0][0] <= of:
                    break
            if best is not None:
                return best[1:]
            if not self.runs.was_cut:
                break
        self._due[level] = min(self._due[level], self.runs.next_able(level, waiting, in_plan, now))
        return None, []

    def _price(
        self, name: str, level: RequestClass, waiting: QueuedRequest, free: Room, slots: int, now: float
    ) -> tuple[_Price, str, list[GrantedRequest]] | None:
        """What room for a request costs on a replica, and what has to stop; None: no stop makes room there."""
        room = Room(min(free.slots, waiting.slots - slots), free.tokens)
        more_slots, more_tokens = self.runs.could_free(name, level)
        if not Room(room.slots + more_slots, room.tokens + more_tokens).fits(waiting):
            return None
        chosen: list[tuple[int, float, int, GrantedRequest]] = []
        for one in self.runs.able_on(name, level, waiting, now):
            if room.fits(waiting):
                break
            room.add(one[-1].arrival)
            chosen.append(one)
        if not room.fits(waiting):
            return None
        for one in chosen[::-1]:  # larger ones may have made the smaller ones before them unneeded
            room.add(one[-1].arrival, -1)
            if room.fits(waiting):
                chosen.remove(one)
            else:
                room.add(one[-1].arrival)
        price = max(of for of, *_ in chosen), sum(lost for _, lost, *_ in chosen), chosen[0][2]
        return price, name, [run for *_, run in chosen]
