"""Room on the replicas: free slots and KV tokens, with those of requests that are stopping.

Invariant: after `refresh`, `entries` has every replica with room once, the one with most tokens first.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass

from serve_app.core.queue.capacity import Capacity
from serve_app.core.queue.events import Arrival
from serve_app.core.queue.tenant_queue import QueuedRequest

# Minus tokens, minus slots, replica id.
RoomEntry = tuple[float, int, str]


@dataclass(slots=True)
class Room:
    """Free slots and KV tokens of a replica, with those of requests that stop; negative: it has shrunk below what is
    used."""

    slots: int
    tokens: float

    def fits(self, waiting: QueuedRequest) -> bool:
        return self.slots >= waiting.slots and self.tokens >= waiting.cost

    def add(self, arrival: Arrival, sign: int = 1) -> None:
        self.slots += sign * arrival.slots
        self.tokens += sign * arrival.cost

    def entry(self, name: str) -> RoomEntry:
        return -self.tokens, -self.slots, name


class Rooms:
    """The rooms of all replicas that have slots. O(log replicas) per change."""

    def __init__(self, capacity: Capacity) -> None:
        self._capacity = capacity
        self._stopping: dict[str, Room] = {}  # of what stops, by replica
        self.by_replica: dict[str, Room] = {}
        self.entries: list[RoomEntry] = []
        self.free = 0  # slots of all

    def stop(self, replica_id: str, arrival: Arrival, sign: int = 1) -> None:
        """A request stops; `sign` -1: it has stopped, or is no room any more."""
        room = self._stopping.setdefault(replica_id, Room(0, 0))
        room.add(arrival, sign)
        if not room.slots:
            del self._stopping[replica_id]
        self._capacity.changed.add(replica_id)

    def refresh(self) -> None:
        """Follow what has changed in the capacity. O(log replicas) for each changed replica."""
        for name in self._capacity.changed:
            before = self.by_replica.pop(name, None)
            if before is not None:
                self.free -= max(0, before.slots)
                if before.slots > 0:
                    del self.entries[bisect_left(self.entries, before.entry(name))]
            replica = self._capacity.replicas.get(name)
            if replica is None or not replica.slots:
                continue
            room = self.by_replica[name] = Room(replica.slots_left, replica.kv_left)
            stopping = self._stopping.get(name)
            if stopping is not None:
                room.slots, room.tokens = room.slots + stopping.slots, room.tokens + stopping.tokens
            self.free += max(0, room.slots)
            if room.slots > 0:
                insort(self.entries, room.entry(name))
        self._capacity.changed.clear()


class RoomPlan:
    """The rooms as one look divides them among waiting requests."""

    def __init__(self, rooms: Rooms) -> None:
        self._rooms = rooms
        self._planned: dict[str, Room] = {}  # of replicas from which something was taken, or is to stop
        self._open: dict[str, Room] = {}  # those of them with slots
        self._first = 0  # entries before it are of such replicas
        self.free = rooms.free

    def __contains__(self, name: str) -> bool:
        return name in self._rooms.by_replica

    def room(self, name: str) -> Room:
        return self._planned.get(name) or self._rooms.by_replica[name]

    def names(self) -> list[str]:
        """All replicas. O(replicas)."""
        return list(self._rooms.by_replica)

    def add(self, name: str, arrival: Arrival, sign: int = 1) -> None:
        """A request is to stop there; `sign` -1: it gets the room there."""
        room = self._planned.get(name)
        if room is None:
            base = self._rooms.by_replica[name]
            room = self._planned[name] = Room(base.slots, base.tokens)
        self.free -= max(0, room.slots)
        room.add(arrival, sign)
        self.free += max(0, room.slots)
        if room.slots > 0:
            self._open[name] = room
        else:
            self._open.pop(name, None)

    def find(self, waiting: QueuedRequest, is_allowed: Callable[[str], bool]) -> str | None:
        """The allowed replica with most tokens that has room for a request."""
        only = waiting.arrival.only_replica
        if only is not None:
            return only if only in self and self.room(only).fits(waiting) and is_allowed(only) else None
        planned = (room.entry(name) for name, room in self._open.items() if room.fits(waiting) and is_allowed(name))
        best = min(planned, default=None)
        entries = self._rooms.entries
        planned_names = self._planned.keys()
        while self._first < len(entries) and entries[self._first][2] in planned_names:
            self._first += 1
        for at in range(self._first, len(entries)):
            entry = entries[at]
            if -entry[0] < waiting.cost or (best is not None and best < entry):
                break
            if -entry[1] >= waiting.slots and entry[2] not in planned_names and is_allowed(entry[2]):
                return entry[2]
        return None if best is None else best[2]
