"""The choice of what stops as a walk over all running requests and replicas, to compare `Preemption` with."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from serve_app.core.queue.capacity import Capacity
from serve_app.core.queue.class_queue import ClassQueue
from serve_app.core.queue.considered import MAX_CONSIDERED
from serve_app.core.queue.drain_rate import GUARDED_FROM
from serve_app.core.queue.events import Arrival, Preempt
from serve_app.core.queue.preemption import REST_S, STOP_S
from serve_app.core.queue.stoppable_runs import GROWN_S, QUANTUM_S, RESUMED_S, GrantedRequest
from serve_app.core.queue.tenant_queue import QueuedRequest, SizeClass
from serve_app.types import RequestClass


@dataclass(slots=True)
class _Room:
    """Free slots and KV tokens of a replica, with those of requests that stop; negative: it has shrunk."""

    slots: int
    tokens: float

    def fits(self, waiting: QueuedRequest) -> bool:
        return self.slots >= waiting.slots and self.tokens >= waiting.cost

    def add(self, arrival: Arrival, sign: int = 1) -> None:
        self.slots += sign * arrival.slots
        self.tokens += sign * arrival.cost


class ReferencePreemption:
    """The running requests that can be stopped."""

    def __init__(
        self, class_queues: Sequence[ClassQueue], capacity: Capacity, guard_slots: Callable[[RequestClass], int]
    ) -> None:
        self._class_queues = class_queues
        self._capacity = capacity
        self._guard_slots = guard_slots
        self._running: list[dict[str, GrantedRequest]] = [{} for _ in RequestClass]  # by class and id
        self._slots = [0] * len(RequestClass)  # that they hold
        self._seen: tuple[int, ...] = ()  # the versions of queues and capacity at the last look
        self._due = [math.inf] * len(RequestClass)  # by class, when time alone lets its waiting requests stop others
        self._rests_until = [-math.inf] * len(RequestClass)  # by class that has found nothing to stop
        self._grants = 0

    def begin(self, run: GrantedRequest) -> None:
        """A request was granted."""
        if run.arrival.preemptible and not run.was_due:
            self._grants += 1
            run.number = self._grants
            self._running[run.arrival.request_class][run.arrival.request_id] = run
            self._slots[run.arrival.request_class] += run.arrival.slots

    def replica_gone(self) -> None:
        """A replica is gone."""

    def grown(self, run: GrantedRequest) -> None:
        """The tokens of a granted request have changed."""

    def end(self, run: GrantedRequest) -> None:
        """A granted request has ended."""
        if self._running[run.arrival.request_class].pop(run.arrival.request_id, None) is not None:
            self._slots[run.arrival.request_class] -= run.arrival.slots

    def slots_below(self, request_class: RequestClass) -> int:
        """Slots of requests that can be stopped for this class."""
        return sum(self._slots[:request_class])

    def next_due(self) -> float:
        """When `choose` is to be called though nothing has changed; infinite: not before something does."""
        return min(self._due)

    def choose(self, now: float) -> list[Preempt]:
        """Stop running requests for those that wait, the highest class first. O(running requests that can be stopped +
        replicas); O(1) while nothing has changed."""
        if not any(self._running):
            self._due = [math.inf] * len(RequestClass)
            return []
        versions = self._capacity.changes, *(one.size for one in self._class_queues)
        if versions == self._seen and now < self.next_due():
            return []
        self._seen = versions
        due, self._due = self._due, [math.inf] * len(RequestClass)
        levels = [one for one in RequestClass if self._class_queues[one].size and any(self._running[: one + 1])]
        rests = {one for one in levels if now < min(due[one], self._rests_until[one])}
        for level in rests:
            self._due[level] = min(due[level], self._rests_until[level])
        if len(rests) == len(levels):
            return []
        stopped: list[Preempt] = []
        rooms, stop_ends = self._rooms(now)
        for level in reversed(levels):
            self._due[level] = min(stop_ends, self._due[level])
            stopped += self._make_room(level, rooms, now, may_stop=level not in rests)
        return stopped

    def _considered(self, level: RequestClass, failed: set[SizeClass]) -> Iterator[QueuedRequest]:
        """The waiting requests of a class in turns of its tenants in fair order, without the sizes that have failed."""
        tenants = sorted(self._class_queues[level].waiting_tenants(), key=lambda queue: queue.fair_key)
        left = [[entry[2] for entry in one.order] for one in tenants]
        for _ in range(MAX_CONSIDERED):
            left = [able for mine in left if (able := [one for one in mine if one.size not in failed])]
            if not left:
                return
            runs = left.pop(0)
            yield runs.pop(0)
            left.append(runs)

    def _make_room(
        self,
        level: RequestClass,
        rooms: dict[str, _Room],
        now: float,
        *,
        may_stop: bool,
    ) -> list[Preempt]:
        """Give the waiting requests of a class the room there is, and stop others for more. The replicas that could
        run one for which no room can be made are left to it."""
        stopped: list[Preempt] = []
        failed = set[SizeClass]()
        left = dict(rooms)
        spare = sum(max(0, room.slots) for room in rooms.values()) - self._guard_slots(level)
        for waiting in self._considered(level, failed):
            allowed = {name: room for name, room in left.items() if self._capacity.may_take(name, level, *waiting.need)}
            fitting = [(-room.tokens, -room.slots, name) for name, room in allowed.items() if room.fits(waiting)]
            chosen = min(fitting)[2] if fitting and spare > 0 else None
            if chosen is None:
                runs = list[GrantedRequest]()
                if may_stop and allowed:
                    if spare >= 0:
                        chosen, runs = self._cheapest(level, waiting, allowed, 1 - spare, now)
                    else:  # time alone lets the guard slots become fewer
                        self._due[level] = min(self._due[level], now + GROWN_S)
                    if chosen is None:
                        self._rests_until[level] = now + REST_S
                if chosen is None:
                    for name in allowed:
                        del left[name]
                    failed.add(waiting.size)
                    continue
                for run in runs:
                    run.stopping_s = now
                    spare += run.arrival.slots
                    rooms[chosen].add(run.arrival)
                    keeps_place = run.arrival.request_class < level
                    stopped.append(Preempt(run.arrival.request_id, chosen, keeps_place))
                self._due[level] = min(self._due[level], now + STOP_S)
            rooms[chosen].add(waiting.arrival, -1)
            spare -= waiting.slots
        return stopped

    def _cheapest(
        self, level: RequestClass, waiting: QueuedRequest, allowed: dict[str, _Room], slots: int, now: float
    ) -> tuple[str | None, list[GrantedRequest]]:
        """The replica on which room costs least, and what has to stop there, of so many slots at least; None: nowhere
        now, perhaps when `_due`."""
        able: dict[str, list[tuple[float, GrantedRequest]]] = {}
        due = math.inf
        for runs in self._running[: level + 1]:
            for run in runs.values():
                if run.stopping_s is not None or run.replica_id not in allowed:
                    continue
                since = _stoppable_from(run, level, waiting, now)
                if since <= now:
                    lost = run.kv_tokens * (now - run.granted_s)
                    able.setdefault(run.replica_id, []).append((lost, run))
                else:
                    due = min(due, since)
        best: tuple[tuple[int, float, int], str, list[GrantedRequest]] | None = None
        for replica_id, priced in able.items():
            priced.sort(key=lambda option: (option[1].arrival.request_class, option[0], option[1].number))
            room = _Room(min(allowed[replica_id].slots, waiting.slots - slots), allowed[replica_id].tokens)
            chosen: list[tuple[float, GrantedRequest]] = []
            for lost, run in priced:
                if room.fits(waiting):
                    break
                room.add(run.arrival)
                chosen.append((lost, run))
            if not room.fits(waiting):
                continue
            for item in chosen[::-1]:  # larger ones may have made the smaller ones before them unneeded
                room.add(item[1].arrival, -1)
                if room.fits(waiting):
                    chosen.remove(item)
                else:
                    room.add(item[1].arrival)
            top = max(run.arrival.request_class for _, run in chosen)
            lost_here = sum(lost for lost, _ in chosen)
            price = top, lost_here, chosen[0][1].number
            if best is None or price < best[0]:
                best = price, replica_id, [run for _, run in chosen]
        if best is None:
            self._due[level] = min(self._due[level], due)
            return None, []
        return best[1:]

    def _rooms(self, now: float) -> tuple[dict[str, _Room], float]:
        """The rooms, and when the first of the requests that stop now counts no more."""
        replicas = self._capacity.replicas
        stop_ends = math.inf
        rooms = {name: _Room(one.slots_left, one.kv_left) for name, one in replicas.items() if one.slots}
        for runs in self._running:
            for run in runs.values():
                if run.stopping_s is not None and now < run.stopping_s + STOP_S and run.replica_id in rooms:
                    rooms[run.replica_id].add(run.arrival)
                    stop_ends = min(stop_ends, run.stopping_s + STOP_S)
        return rooms, stop_ends


def _stoppable_from(run: GrantedRequest, level: RequestClass, waiting: QueuedRequest, now: float) -> float:
    """From when on a run may stop for a waiting request of this class; infinite: never."""
    preempted = run.arrival.preempted
    if run.arrival.request_class < level:
        has_to_run = preempted or level < GUARDED_FROM
        return run.granted_s + (RESUMED_S * 2.0 ** max(0, preempted - 1) if has_to_run else 0.0)
    if waiting.arrival.preempted > preempted:
        return math.inf
    quantum_ends = run.granted_s + QUANTUM_S * 2.0**preempted
    return quantum_ends if waiting.cost < run.kv_tokens else max(quantum_ends, now + GROWN_S)
