"""Which replica a request should go to: where its prefix is cached, unless that one has more than its share to do.

Rules
- With a key (a session, else a prefix) a request goes to the first replica on the ring from the key's place on that has
  room: consistent hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam, SODA 2018).
- Room is for slots up to `BOUND` times the replica's share of all that runs, this request included, its share being
  that of its slots in all slots; and never for more than its slots.
- Up to `FREE_SHARE` of its slots a replica has room in any case: while little runs, no replica is busy, and to leave a
  cached prefix for a bound of one request would be all loss.
- Without a key it goes to the less busy of two drawn at random (Mitzenmacher, 2001).
- Where that finds none with room, the least busy replica takes it.
- A closed replica (draining, unhealthy, ejected) gets nothing, and keeps its place on the ring: its keys come home.

Invariant: no choice of one slot brings a replica above `room_for`, the bound of its moment; a larger one may pass the
bound, but not the replica's slots, where no replica could take it within.
"""

from __future__ import annotations

import enum
import math
import random
from dataclasses import dataclass
from itertools import islice

from serve_app.core.keyed_heap import KeyedHeap
from serve_app.core.routing.hash_ring import Ring

BOUND = 1.25  # c of the paper; walks are 1 / (c - 1)^2 = 16 points long at most, on average
FREE_SHARE = (
    0.25  # of a replica's slots; on Mooncake's trace at light load it keeps 28% of prefixes cached, 0 keeps 21%
)
MAX_WALK = 64  # points; a walk so long means that most are full, and then the least busy will do as well


class Route(enum.StrEnum):
    """Why a request goes where it goes."""

    HOME = "home"  # first on the ring for its key: its prefix is cached there if anywhere
    NEXT = "next"  # its home is closed or has its share: the next one on the ring
    TWO_CHOICES = "two_choices"  # no key
    LEAST_BUSY = "least_busy"  # the others looked at had no room


@dataclass(frozen=True, slots=True)
class Choice:
    """A replica, and why this one."""

    replica_id: str
    route: Route


@dataclass(slots=True)
class _Replica:
    slots: int
    load: int = 0
    is_open: bool = True
    place: int = -1  # in the list of open ones; -1: not in it


class Routing:
    """Replicas and what they run. Every method is O(log replicas), with two exceptions, O(replicas): one that comes or
    goes, and a request of several slots that the least busy has no room for.

    Args:
        bound: how many times its share a replica may have; above 1.
        free_share: of a replica's slots; 0: the bound alone counts.

    Raises:
        ValueError: an argument out of range.
    """

    def __init__(self, bound: float = BOUND, free_share: float = FREE_SHARE) -> None:
        if not bound > 1.0 or not 0.0 <= free_share <= 1.0:
            raise ValueError(f"bound is {bound}, free_share {free_share}")
        self._bound, self.free_share = bound, free_share
        self._ring = Ring()
        self._replicas: dict[str, _Replica] = {}
        self._usable: list[str] = []  # open, with slots, in no order: drawn from
        self._by_load = KeyedHeap()  # the same, the least busy for its slots first
        self._slots = 0  # of those
        self._load = 0  # of those

    def __contains__(self, replica_id: str) -> bool:
        return replica_id in self._replicas

    def set_slots(self, replica_id: str, slots: int) -> None:
        """Add a replica, open, or change its slots. ValueError: negative."""
        if slots < 0:
            raise ValueError(f"replica {replica_id!r}: slots is {slots}")
        replica = self._replicas.get(replica_id)
        if replica is None:
            replica = self._replicas[replica_id] = _Replica(0)
            self._ring.add(replica_id)
        self._leave(replica_id, replica)
        replica.slots = slots
        self._enter(replica_id, replica)

    def set_open(self, replica_id: str, is_open: bool) -> None:
        """Close a replica to new requests, or open it again; an unknown one changes nothing."""
        replica = self._replicas.get(replica_id)
        if replica is not None:
            self._leave(replica_id, replica)
            replica.is_open = is_open
            self._enter(replica_id, replica)

    def drop(self, replica_id: str) -> None:
        """Forget a replica and what it ran; an unknown one changes nothing."""
        replica = self._replicas.pop(replica_id, None)
        if replica is not None:
            self._leave(replica_id, replica)
            self._ring.remove(replica_id)

    def set_load(self, replica_id: str, load: int) -> None:
        """So many slots of it are taken, by whomever; an unknown one changes nothing. ValueError: negative."""
        if load < 0:
            raise ValueError(f"replica {replica_id!r}: load is {load}")
        replica = self._replicas.get(replica_id)
        if replica is None:
            return
        if replica.place >= 0:
            self._load += load - replica.load
            self._by_load.set(replica_id, (load / replica.slots, 0))
        replica.load = load

    def add_load(self, replica_id: str, slots: int) -> None:
        """So many more slots are taken, or fewer, down to none; an unknown one changes nothing."""
        replica = self._replicas.get(replica_id)
        if replica is not None:
            self.set_load(replica_id, max(0, replica.load + slots))

    def load(self, replica_id: str) -> int:
        """The slots taken on a replica; 0 of an unknown one."""
        replica = self._replicas.get(replica_id)
        return 0 if replica is None else replica.load

    def room_for(self, replica_id: str, slots: int = 1) -> int:
        """How much load a replica may have once `slots` more run somewhere; 0 where it can get nothing."""
        replica = self._replicas.get(replica_id)
        if replica is None or replica.place < 0:
            return 0
        share = self._bound * (self._load + slots) * replica.slots / self._slots
        return min(replica.slots, max(math.ceil(share), math.floor(self.free_share * replica.slots)))

    def choose(self, key: str | None, draw: random.Random, slots: int = 1) -> Choice | None:
        """Where a request of so many slots should run; None: no replica has them free. Takes nothing: see `add_load`.

        Args:
            key: whose requests belong together; a session's id with its tenant's, or a prefix key.
        """
        if not self._usable:
            return None
        if key is None:
            return self._drawn(draw, slots) or self._least_busy(slots)
        home: str | None = None
        for replica_id in islice(self._ring.walk(key), MAX_WALK):
            home = replica_id if home is None else home
            if self._has_room(replica_id, slots):
                return Choice(replica_id, Route.HOME if replica_id == home else Route.NEXT)
        return self._least_busy(slots)

    def _has_room(self, replica_id: str, slots: int) -> bool:
        return self._replicas[replica_id].load + slots <= self.room_for(replica_id, slots)

    def _drawn(self, draw: random.Random, slots: int) -> Choice | None:
        """The less busy of two, if it has room."""
        usable = self._usable
        first = draw.randrange(len(usable))
        best = usable[first]
        if len(usable) > 1:
            second = draw.randrange(len(usable) - 1)
            other = usable[second + (second >= first)]
            best = min(best, other, key=self._busy)
        return Choice(best, Route.TWO_CHOICES) if self._has_room(best, slots) else None

    def _busy(self, replica_id: str) -> float:
        replica = self._replicas[replica_id]
        return replica.load / replica.slots

    def _least_busy(self, slots: int) -> Choice | None:
        top = self._by_load.peek()
        if top is None:
            return None
        replica_id = top[1]
        if slots > 1 and self._free(replica_id) < slots:  # a larger one may have them, busier as it is
            replica_id = max(self._usable, key=self._free)
        return Choice(replica_id, Route.LEAST_BUSY) if self._free(replica_id) >= slots else None

    def _free(self, replica_id: str) -> int:
        replica = self._replicas[replica_id]
        return replica.slots - replica.load

    def _enter(self, replica_id: str, replica: _Replica) -> None:
        if replica.is_open and replica.slots:
            replica.place = len(self._usable)
            self._usable.append(replica_id)
            self._by_load.set(replica_id, (replica.load / replica.slots, 0))
            self._slots += replica.slots
            self._load += replica.load

    def _leave(self, replica_id: str, replica: _Replica) -> None:
        if replica.place < 0:
            return
        last = self._usable.pop()
        if last != replica_id:  # the last one takes its place
            self._usable[replica.place] = last
            self._replicas[last].place = replica.place
        replica.place = -1
        self._by_load.discard(replica_id)
        self._slots -= replica.slots
        self._load -= replica.load
