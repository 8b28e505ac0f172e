"""Which replica runs a request: slots of every replica, taken and given back.

Invariant: a take never brings a replica above the slots it has; what was taken is given back once, or goes with the
replica. A replica may hold more than it has only because its slots shrank, and then gets nothing until it is below.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from serve_app.core.events import ReplicaUse
from serve_app.core.heap import Key, KeyedHeap


@dataclass(slots=True)
class _Replica:
    slots: int = 0
    used: int = 0
    last_take: int = 0
    running: dict[str, int] = field(default_factory=dict)

    @property
    def free(self) -> int:
        return max(0, self.slots - self.used)

    @property
    def key(self) -> Key:
        return (-self.free, self.last_take)


class Capacity:
    """Slots by replica. Every method is O(log replicas), save `close` where replicas differ in size (see there)."""

    def __init__(self) -> None:
        self._replicas: dict[str, _Replica] = {}
        self._home: dict[str, str] = {}  # running request -> replica
        self._open = KeyedHeap()  # replicas with a free slot, most free first, then least recently taken
        self._sizes = KeyedHeap()  # replicas with slots, largest first
        self._closed: list[str] = []
        self._takes = 0
        self.slots = 0  # of all replicas
        self.used = 0
        self.free = 0  # not slots - used: a shrunken replica's excess is no other's loss

    @property
    def requests(self) -> int:
        """Requests on the replicas that have slots; those on one that drains are none of the others' business."""
        return sum(len(replica.running) for replica in self._replicas.values() if replica.slots)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._home

    def knows(self, replica_id: str) -> bool:
        """Whether the replica has been given slots, or none, since it came."""
        return replica_id in self._replicas

    @property
    def largest(self) -> int:
        """Slots of the largest replica; 0 when no replica can take anything, ever."""
        top = self._sizes.peek()
        return 0 if top is None else -int(top[0][0])

    @property
    def most_free(self) -> int:
        """The most slots one request could take at this moment, closed replicas apart."""
        top = self._open.peek()
        return 0 if top is None else -int(top[0][0])

    def set_slots(self, replica_id: str, slots: int) -> None:
        """Add a replica or change its slots. What runs there goes on. ValueError: negative."""
        if slots < 0:
            raise ValueError(f"replica {replica_id!r}: slots is {slots}")
        replica = self._replicas.setdefault(replica_id, _Replica())
        before = replica.free
        self.slots += slots - replica.slots
        replica.slots = slots
        self.free += replica.free - before
        if slots:
            self._sizes.set(replica_id, (-slots, 0))
        else:
            self._sizes.discard(replica_id)
        self._index(replica_id, replica)

    def drop(self, replica_id: str) -> None:
        """Forget a replica and what ran on it; an unknown one changes nothing."""
        replica = self._replicas.pop(replica_id, None)
        if replica is None:
            return
        for request_id in replica.running:
            del self._home[request_id]
        self.slots -= replica.slots
        self.used -= replica.used
        self.free -= replica.free
        self._sizes.discard(replica_id)
        self._open.discard(replica_id)

    def take(self, request_id: str, slots: int, affinity: str | None) -> str:
        """Occupy slots on one replica: the affinity's where they fit, else where most are free. Returns the replica.

        Raises:
            ValueError: no open replica has them, or the request holds slots already; nothing has changed then.
        """
        if slots > self.most_free or request_id in self._home:
            raise ValueError(f"{request_id!r} cannot take {slots} slots")
        replica_id = self._choose(slots, affinity)
        replica = self._replicas[replica_id]
        self._takes += 1
        replica.last_take = self._takes
        replica.running[request_id] = slots
        self._home[request_id] = replica_id
        replica.used += slots
        self.used += slots
        self.free -= slots
        self._index(replica_id, replica)
        return replica_id

    def give_back(self, request_id: str) -> int:
        """Free what a request holds; returns the slots it held, 0 if it holds none (any more)."""
        replica_id = self._home.pop(request_id, None)
        if replica_id is None:
            return 0
        replica = self._replicas[replica_id]
        before = replica.free
        slots = replica.running.pop(request_id)
        replica.used -= slots
        self.used -= slots
        self.free += replica.free - before
        self._index(replica_id, replica)
        return slots

    def close(self, slots: int) -> None:
        """Keep the replica nearest to `slots` free ones out of every take until `reopen`.

        O(log replicas) while the freest replica is large enough to hold `slots` at all, else one pass over all.
        """
        top = self._open.peek()
        if top is None:
            return
        replica_id = top[1]
        if self._replicas[replica_id].slots < slots:
            fits = [(r.key, i) for i, r in self._replicas.items() if r.free and r.slots >= slots]
            fits = [entry for entry in fits if entry[1] not in self._closed]
            if not fits:
                return
            replica_id = min(fits)[1]
        self._closed.append(replica_id)
        self._open.discard(replica_id)

    def reopen(self) -> None:
        """Let takes reach every replica again."""
        closed, self._closed = self._closed, []
        for replica_id in closed:
            self._index(replica_id, self._replicas[replica_id])

    def use(self) -> Iterator[tuple[str, ReplicaUse]]:
        """Every replica with its slots and those in use."""
        for replica_id, replica in self._replicas.items():
            yield replica_id, ReplicaUse(replica.slots, replica.used)

    def _choose(self, slots: int, affinity: str | None) -> str:
        if affinity is not None and affinity not in self._closed:
            wanted = self._replicas.get(affinity)
            if wanted is not None and wanted.free >= slots:
                return affinity
        top = self._open.peek()
        assert top is not None  # `take` has seen that most_free is at least one
        return top[1]

    def _index(self, replica_id: str, replica: _Replica) -> None:
        if replica.free and replica_id not in self._closed:
            self._open.set(replica_id, replica.key)
        else:
            self._open.discard(replica_id)
