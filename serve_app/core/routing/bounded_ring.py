"""Which replica a request should run on: the one that caches its prefix, unless its load is above its bound; and why.

Rules
- A request with a key (a session, else a prefix) goes to the first replica on the ring, from the key's point on, that
  has capacity: consistent hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam, SODA 2018).
- A replica has capacity up to `LOAD_BOUND` times its share of the total load, this request included; its share is its
  slots divided by all slots. It never has capacity for more than its slots.
- Up to `FREE_SHARE` of its slots a replica always has capacity: at low load no replica is busy, and to leave a cached
  prefix for a bound of one request would only cost.
- A request without a key goes to the less busy of two replicas drawn at random (Mitzenmacher, 2001).
- If these rules find no replica with capacity, the least busy replica takes the request.
- A closed replica (draining, unhealthy, ejected) gets no requests, and keeps its points on the ring: its keys return.

Invariants: a key's preference order among the remaining replicas does not change when others are added or removed, and
is equal in all routers that know the same names. No choice for one slot brings a replica above its present
`load_bound`; a choice for several slots may exceed the bound, but not the replica's slots, if no replica has capacity
within the bound.
"""

from __future__ import annotations

import enum
import hashlib
import math
import random
import struct
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from serve_app.core.keyed_heap import KeyedHeap

LOAD_BOUND = 1.25  # c of the paper; walks are 1 / (c - 1)^2 = 16 points long at most, on average
FREE_SHARE = 0.25  # of a replica's slots; at light load it keeps 28% of the prefixes of Mooncake's trace cached, 0: 21%
MAX_WALK = 64  # points; after so long a walk most replicas are full, and the least busy one is as good
POINTS_PER_REPLICA = 128  # the replicas' shares of the keys then differ by 9% (1 / sqrt(128))
_POINTS_PER_DIGEST = 8  # of eight bytes, in the longest digest of blake2b


class Route(enum.StrEnum):
    """The rule by which a replica was chosen."""

    HOME = "home"  # first on the ring for its key: its prefix is cached there if anywhere
    NEXT = "next"  # its home is closed or at its load bound: the next one on the ring
    TWO_CHOICES = "two_choices"  # no key
    LEAST_BUSY = "least_busy"  # no replica that was tried had capacity


class TargetReason(enum.StrEnum):
    """Why a request runs on its replica; a label of the metrics."""

    SESSION = "session"
    PREFIX = "prefix"
    PROBE = "probe"  # the replica was ejected, and this request tests whether it works again
    MOST_FREE = "most_free"  # the queue's own choice: no key, or no free capacity on the preferred replica


@dataclass(frozen=True, slots=True)
class AffinityKey:
    """Requests with one key prefer one replica. `text` includes the tenant: caches are salted per tenant."""

    text: str
    reason: TargetReason


@dataclass(frozen=True, slots=True)
class RoutingTarget:
    """The preferred replica of a request. `route`: the rule that chose it; None: no rule was applied."""

    replica_id: str
    reason: TargetReason
    route: Route | None = None


@dataclass(frozen=True, slots=True)
class ReplicaChoice:
    """The chosen replica, and the rule that chose it."""

    replica_id: str
    route: Route


class HashRing:
    """Names and their points. `remove` and the first `walk` after an `add` pass over all points once; finding a key's
    point is O(log points)."""

    def __init__(self) -> None:
        self._points: list[tuple[int, str]] = []
        self._is_sorted = True

    def add(self, name: str) -> None:
        """Add a name that is not on the ring."""
        texts = (f"{number}\0{name}" for number in range(POINTS_PER_REPLICA // _POINTS_PER_DIGEST))
        digests = (hashlib.blake2b(text.encode("utf-8", "surrogatepass"), person=b"point").digest() for text in texts)
        self._points += [(point, name) for digest in digests for (point,) in struct.iter_unpack(">Q", digest)]
        self._is_sorted = False

    def remove(self, name: str) -> None:
        self._points = [entry for entry in self._points if entry[1] != name]

    def walk(self, key: str) -> Iterator[str]:
        """The names at all points, once around from the key's point: the key's home first, with repeated names."""
        points = self._points
        if not self._is_sorted:
            points.sort()
            self._is_sorted = True
        digest = hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8, person=b"key").digest()
        start = bisect_left(points, (int.from_bytes(digest), ""))
        for index in range(start, start + len(points)):
            yield points[index % len(points)][1]


@dataclass(slots=True)
class _RingReplica:
    slots: int = 0
    load: int = 0
    is_open: bool = True
    index: int = -1  # in `open_replicas`; -1: not in it


class BoundedRing:
    """Replicas and their load in slots. Every method is O(log replicas), except O(replicas) to add or remove one, and
    to choose for a request of several slots that the least busy replica has no capacity for.

    Args:
        bound: a replica's load is at most this many times its share; above 1.
        free_share: part of a replica's slots that is always usable; 0: only the bound counts.

    Raises:
        ValueError: an argument out of range.
    """

    def __init__(self, bound: float = LOAD_BOUND, free_share: float = FREE_SHARE) -> None:
        if not bound > 1.0 or not 0.0 <= free_share <= 1.0:
            raise ValueError(f"bound is {bound}, free_share {free_share}")
        self._bound = bound
        self.free_share = free_share
        self._ring = HashRing()
        self._replicas: dict[str, _RingReplica] = {}
        self.open_replicas: list[str] = []  # open and with slots, in arbitrary order, for random draws
        self._by_load = KeyedHeap()  # the same replicas, the lowest load per slot first
        self._slots = 0  # of the open replicas
        self._load = 0  # of the open replicas

    def set_slots(self, replica_id: str, slots: int) -> None:
        """Add a replica, open, or change its slots. ValueError: negative."""
        if slots < 0:
            raise ValueError(f"replica {replica_id!r}: slots is {slots}")
        replica = self._replicas.get(replica_id)
        if replica is None:
            replica = self._replicas[replica_id] = _RingReplica()
            self._ring.add(replica_id)
        self._unindex(replica_id, replica)
        replica.slots = slots
        self._index(replica_id, replica)

    def set_open(self, replica_id: str, is_open: bool) -> None:
        """Close a replica to new requests, or open it again; an unknown replica changes nothing."""
        replica = self._replicas.get(replica_id)
        if replica is not None:
            self._unindex(replica_id, replica)
            replica.is_open = is_open
            self._index(replica_id, replica)

    def drop_replica(self, replica_id: str) -> None:
        """Remove a replica and its load; an unknown replica changes nothing."""
        replica = self._replicas.pop(replica_id, None)
        if replica is not None:
            self._unindex(replica_id, replica)
            self._ring.remove(replica_id)

    def add_load(self, replica_id: str, slots: int) -> None:
        """Add slots in use (negative: remove, at least 0 stay); an unknown replica changes nothing."""
        replica = self._replicas.get(replica_id)
        if replica is None:
            return
        more = max(slots, -replica.load)
        replica.load += more
        if replica.index >= 0:
            self._load += more
            self._by_load.set(replica_id, (replica.load / replica.slots,))

    def load(self, replica_id: str) -> int:
        """The slots in use on a replica; 0 for an unknown one."""
        replica = self._replicas.get(replica_id)
        return 0 if replica is None else replica.load

    def load_bound(self, replica_id: str, slots: int = 1) -> int:
        """The highest load of a replica when `slots` more run in total; 0 if it is unknown, closed or has no slots."""
        replica = self._replicas.get(replica_id)
        if replica is None or replica.index < 0:
            return 0
        share = self._bound * (self._load + slots) * replica.slots / self._slots
        return min(replica.slots, max(math.ceil(share), math.floor(self.free_share * replica.slots)))

    def choose(self, key: str | None, rng: random.Random, slots: int = 1) -> ReplicaChoice | None:
        """Choose a replica for a request of `slots`; None: no replica has them free. Adds no load: see `add_load`.

        Args:
            key: requests with one key prefer one replica: a session id with its tenant, or a prefix key; None: no key.
        """
        if not self.open_replicas:
            return None
        if key is None:
            return self._two_choices(rng, slots) or self._least_busy(slots)
        home: str | None = None
        for replica_id in islice(self._ring.walk(key), MAX_WALK):
            home = replica_id if home is None else home
            if self._has_room(replica_id, slots):
                return ReplicaChoice(replica_id, Route.HOME if replica_id == home else Route.NEXT)
        return self._least_busy(slots)

    def _has_room(self, replica_id: str, slots: int) -> bool:
        return self._replicas[replica_id].load + slots <= self.load_bound(replica_id, slots)

    def _two_choices(self, rng: random.Random, slots: int) -> ReplicaChoice | None:
        """The less busy of two random replicas, if it has capacity."""
        usable = self.open_replicas
        first = rng.randrange(len(usable))
        best = usable[first]
        if len(usable) > 1:
            second = rng.randrange(len(usable) - 1)
            other = usable[second + (second >= first)]
            best = min(best, other, key=self._load_share)
        return ReplicaChoice(best, Route.TWO_CHOICES) if self._has_room(best, slots) else None

    def _load_share(self, replica_id: str) -> float:
        replica = self._replicas[replica_id]
        return replica.load / replica.slots

    def _least_busy(self, slots: int) -> ReplicaChoice | None:
        top = self._by_load.peek()
        if top is None:
            return None
        replica_id = top[1]
        if slots > 1 and self._free_slots(replica_id) < slots:  # a larger, busier replica may have them free
            replica_id = max(self.open_replicas, key=self._free_slots)
        return ReplicaChoice(replica_id, Route.LEAST_BUSY) if self._free_slots(replica_id) >= slots else None

    def _free_slots(self, replica_id: str) -> int:
        replica = self._replicas[replica_id]
        return replica.slots - replica.load

    def _index(self, replica_id: str, replica: _RingReplica) -> None:
        if replica.is_open and replica.slots:
            replica.index = len(self.open_replicas)
            self.open_replicas.append(replica_id)
            self._by_load.set(replica_id, (replica.load / replica.slots,))
            self._slots += replica.slots
            self._load += replica.load

    def _unindex(self, replica_id: str, replica: _RingReplica) -> None:
        if replica.index < 0:
            return
        last = self.open_replicas.pop()
        if last != replica_id:  # the last entry moves to its index
            self.open_replicas[replica.index] = last
            self._replicas[last].index = replica.index
        replica.index = -1
        self._by_load.discard(replica_id)
        self._slots -= replica.slots
        self._load -= replica.load
