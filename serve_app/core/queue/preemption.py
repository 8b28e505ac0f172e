"""Which running requests stop so that waiting ones can start, and continue later with what they have produced.

Rules
- A waiting request for which no replica has room, not even with what is stopping already, stops requests of lower
  classes: of one replica, and those that lose the fewest KV token-seconds (tokens in the KV cache times the time since
  the grant).
- A continued request is not stopped again before it has run for `RESUMED_S`, which doubles each time. So a
  request is stopped a number of times that grows with the logarithm of its length. For a class below the guarded ones
  (`core.queue.drain_rate`) this holds from its first grant: such a class overloads itself, and in the moments when none
  of it waits lower requests begin, which would be stopped at once, their prefill wasted.
- A request of the same class stops for a shorter one once it has run for `QUANTUM_S`, which doubles each time it was
  stopped, and continues behind those that wait. So one very long answer does not keep the others out. These are the
  doubling quanta of multi-level feedback queues (Corbato et al., 1962; for language models FastServe, Wu et al., 2023).
- A request that was due by the minimum share is never stopped: that would undo the minimum share.
- Free guard slots are no room for a class below the guarded ones: a lower class stops for it. None stops while guard
  slots are lacking: what it leaves would be kept.
- One that has not stopped after `STOP_S` will not: its engine does not answer, or it cannot continue elsewhere.
- A look is bounded. It weighs the `MAX_PRICED` replicas with the requests that lose least. If it has not seen all, and
  on these no stop makes room, it tries `MAX_TRIED` replicas in turn, and the next look goes on from there.

Invariant: what stops is counted once, as room for the requests that it stops for, until it has stopped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter

from serve_app.core.queue.capacity import Capacity
from serve_app.core.queue.class_queue import ClassQueue
from serve_app.core.queue.considered import considered
from serve_app.core.queue.events import Preempt
from serve_app.core.queue.rooms import Room, RoomPlan, Rooms
from serve_app.core.queue.stoppable_runs import GROWN_S, GrantedRequest, StoppableRuns
from serve_app.core.queue.tenant_queue import Need, QueuedRequest, SizeClass
from serve_app.types import RequestClass

STOP_S = 2.0  # a stop takes a step of the engine and two messages
REST_S = 0.05  # after a look that has found nothing to stop
MAX_LOOKS = 256  # running requests looked at for a waiting one: very many can be of one age and size
MAX_PRICED = 16  # replicas compared for a waiting request: a comparison walks the requests that run there
MAX_TRIED = 64  # replicas tried in turn in one look; a thousand are tried in a second

LEVELS = tuple(RequestClass)

# The highest class that stops, what is lost, and the number of the first one that stops.
_Price = tuple[int, float, int]


@dataclass(slots=True)
class _Search:
    """For room for a waiting request, by what its look has planned already: on an allowed replica, of at least so many
    slots more than there are."""

    waiting: QueuedRequest
    plan: RoomPlan
    is_allowed: Callable[[str], bool]
    slots: int
    now: float
    saw_all: bool = True  # whether it has seen all replicas that could help


class Preemption:
    """The running requests that can be stopped."""

    def __init__(
        self, class_queues: Sequence[ClassQueue], capacity: Capacity, guard_slots: Callable[[RequestClass], int]
    ) -> None:
        self._class_queues = class_queues
        self._capacity = capacity
        self._guard_slots = guard_slots
        self.runs = StoppableRuns()  # that are not to stop yet
        self._rooms = Rooms(capacity)
        self._slots = [0] * len(RequestClass)  # of running requests that can be stopped, or are to stop, by class
        self._stopping: dict[str, GrantedRequest] = {}  # those that count as room, in the order of their stops
        self._grants = 0
        self._seen: tuple[int, ...] = ()  # the versions of queues and capacity at the last look
        self._due = [math.inf] * len(RequestClass)  # by class, when time alone lets its waiting requests stop others
        self._rests_until = [-math.inf] * len(RequestClass)  # by class that has found nothing to stop
        self._turns = [0] * len(RequestClass)  # by class, the replica that is tried first in the next look
        self._tried: list[str] | None = None  # those that are tried for a class in this look; None: not needed yet

    def begin(self, run: GrantedRequest) -> None:
        """A request was granted, here or elsewhere."""
        self._seen = ()
        level = run.arrival.request_class
        if run.arrival.preemptible and not run.was_due:
            self._grants += 1
            run.number = self._grants
            self.runs.add(run)
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
        if not any(self._slots):
            self._due = [math.inf] * len(RequestClass)
            return []
        versions = self._capacity.changes, *(one.size for one in self._class_queues)
        if versions == self._seen and now < self.next_due():
            return []
        self._seen = versions
        due, self._due = self._due, [math.inf] * len(RequestClass)
        levels = [one for one in RequestClass if self._class_queues[one].size and any(self._slots[: one + 1])]
        rests = {one for one in levels if now < min(due[one], self._rests_until[one])}
        for level in rests:
            self._due[level] = min(due[level], self._rests_until[level])
        if len(rests) == len(levels):
            return []
        stop_ends = self._end_late_stops(now)
        self._rooms.refresh()
        stopped: list[Preempt] = []
        plan = RoomPlan(self._rooms)
        lowest = min(one for one in levels if one not in rests)
        for level in reversed(levels):
            self._due[level] = min(stop_ends, self._due[level])
            if level >= lowest:  # those below only take what room is left
                stopped += self._make_room(level, plan, now, may_stop=level not in rests)
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

    def _make_room(self, level: RequestClass, plan: RoomPlan, now: float, *, may_stop: bool) -> list[Preempt]:
        """Give the waiting requests of a class the room there is, and stop others for more. The replicas that could
        run one for which no room can be made are left to it."""
        stopped: list[Preempt] = []
        kept = set[str]()
        failed = set[SizeClass]()
        self._tried = None
        spare = plan.free - self._guard_slots(level)
        for waiting in considered(self._class_queues[level], failed):
            need = waiting.need

            def is_allowed(name: str, need: Need = need) -> bool:
                return name in plan and name not in kept and self._capacity.may_take(name, level, *need)

            chosen = plan.find(waiting, is_allowed) if spare > 0 else None
            runs = list[GrantedRequest]()
            if chosen is None:
                search = _Search(waiting, plan, is_allowed, 1 - spare, now)
                if may_stop and spare >= 0:
                    chosen, runs = self._cheapest(search)
                if chosen is None:
                    is_first = not kept and self._capacity.all_may_take(level, *need)
                    allowed = plan.names() if is_first else [name for name in plan.names() if is_allowed(name)]
                    if may_stop and allowed:
                        self._rests_until[level] = now + REST_S
                        self._due[level] = min(self._due[level], self._next_look(search))
                    if is_first:
                        break
                    kept.update(allowed)
                    failed.add(waiting.size)
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

    def _cheapest(self, search: _Search) -> tuple[str | None, list[GrantedRequest]]:
        """The replica on which room costs least, and what has to stop there; None: nowhere that this look has seen."""
        best: tuple[_Price, str, list[GrantedRequest]] | None = None
        left = MAX_PRICED
        for of, lost, name in self._replicas_by_loss(search):
            if best is not None and (of, lost) > best[0][:2]:
                break
            room = self._room_there(search, name)
            if room is None:
                continue
            if not left:
                search.saw_all = False
                break
            left -= 1
            found = self._price(search, name, room)
            if found is not None:
                best = min(best or found, found, key=itemgetter(0))
        search.saw_all = search.saw_all and self.runs.looks_left >= 0
        if best is not None:
            return best[1:]
        return (None, []) if search.saw_all else self._try_in_turn(search)

    def _replicas_by_loss(self, search: _Search) -> Iterator[tuple[int, float, str]]:
        """The replicas in the order of their running requests that lose least: the class of that one, what it loses,
        the replica; as far as `MAX_LOOKS` reach."""
        arrival = search.waiting.arrival
        seen = set[str]()
        self.runs.looks_left = MAX_LOOKS
        if arrival.only_replica is not None:
            yield RequestClass.LOW, 0.0, arrival.only_replica
            return
        for of in LEVELS[: arrival.request_class + 1]:
            for lost, run in self.runs.cheapest(of, search.waiting, search.now):
                if run.replica_id not in seen:
                    seen.add(run.replica_id)
                    yield of, lost, run.replica_id

    def _try_in_turn(self, search: _Search) -> tuple[str | None, list[GrantedRequest]]:
        """As `_cheapest`, of the replicas whose turn it is in this look. One on which no stop makes room for a request
        is not tried for the others of its class."""
        level = search.waiting.arrival.request_class
        names = list(self._capacity.replicas)
        if self._tried is None:
            start = self._turns[level] % len(names)
            self._tried = (names[start:] + names[:start])[:MAX_TRIED]
            self._turns[level] = start + len(self._tried)
        search.saw_all = len(self._tried) == len(names)
        found: list[tuple[_Price, str, list[GrantedRequest]]] = []
        rest = []
        for at, name in enumerate(self._tried):
            if len(found) == MAX_PRICED:
                rest += self._tried[at:]
                break
            room = self._room_there(search, name)
            priced = None if room is None else self._price(search, name, room)
            if priced is not None:
                found.append(priced)
            if priced is not None or room is None:
                rest.append(name)
        self._tried = rest
        return min(found, key=itemgetter(0))[1:] if found else (None, [])

    def _next_look(self, search: _Search) -> float:
        """When room may be found for a request for which there was none, though nothing else has changed."""
        if search.slots > 1:
            return search.now + GROWN_S  # time alone lets the guard slots become fewer
        if not search.saw_all:
            return search.now + REST_S
        return self.runs.next_able(search.waiting, search.is_allowed, search.now)

    def _room_there(self, search: _Search, name: str) -> Room | None:
        """The room of a replica, as far as it counts for the request; None: it may not run there, or not even all that
        can be stopped there would be enough."""
        if not search.is_allowed(name):
            return None
        waiting = search.waiting
        free = search.plan.room(name)
        room = Room(min(free.slots, waiting.slots - search.slots), free.tokens)
        more_slots, more_tokens = self.runs.could_free(name, waiting.arrival.request_class)
        return room if Room(room.slots + more_slots, room.tokens + more_tokens).fits(waiting) else None

    def _price(self, search: _Search, name: str, room: Room) -> tuple[_Price, str, list[GrantedRequest]] | None:
        """What room for the request costs on a replica, and what has to stop there; None: no stop makes room now."""
        waiting = search.waiting
        chosen: list[tuple[int, float, int, GrantedRequest]] = []
        for run in self.runs.able_on(name, waiting, search.now):
            if room.fits(waiting):
                break
            room.add(run[-1].arrival)
            chosen.append(run)
        if not room.fits(waiting):
            return None
        for run in chosen[::-1]:  # larger ones may have made the smaller ones before them unneeded
            room.add(run[-1].arrival, -1)
            if room.fits(waiting):
                chosen.remove(run)
            else:
                room.add(run[-1].arrival)
        price = max(of for of, *_ in chosen), sum(lost for _, lost, *_ in chosen), chosen[0][2]
        return price, name, [run for *_, run in chosen]
