"""Which replica runs a request: slots and KV tokens of every replica, taken and given back.

Invariant: a take never brings a replica above the slots or the KV tokens it has; what was taken is given back once, or
goes with the replica. A replica may hold more than it has only because it shrank, and then gets nothing until it is
below.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from serve_app.core.waiting.events import ReplicaUse

Entry = tuple[float, int, int, str]  # minus free tokens, minus free slots, last take, replica: the best comes first


@dataclass(slots=True)
class _Replica:
    slots: int = 0
    kv_tokens: float = math.inf
    used: int = 0
    kv_used: int = 0
    lent: int = 0  # in other hands
    kv_lent: int = 0
    last_take: int = 0
    entry: Entry | None = None  # under which it is found; None: nothing is free on it
    running: dict[str, tuple[int, int]] = field(default_factory=dict)  # slots and tokens

    @property
    def free(self) -> int:
        return max(0, self.slots - self.used - self.lent)

    @property
    def kv_free(self) -> float:
        return max(0.0, self.kv_tokens - self.kv_used - self.kv_lent)


class Capacity:
    """Slots and tokens by replica.

    O(log replicas) comparisons per method, and O(distinct numbers of free slots) where said. The indices are sorted
    lists, not heaps: what is closed for a moment stays in them and is stepped over, and moving 10,000 pointers costs
    less than one heap operation.
    """

    def __init__(self) -> None:
        self._replicas: dict[str, _Replica] = {}
        self._home: dict[str, str] = {}  # running request -> replica
        self._by_free: dict[int, list[Entry]] = {}  # replicas by their number of free slots
        self._counts: list[int] = []  # the keys of `_by_free`, rising
        self._by_tokens: list[Entry] = []  # all of them
        self._sizes: Counter[tuple[int, float]] = Counter()  # how many replicas of this size there are
        self._closed: set[str] = set()
        self._best: Entry | None = None  # of `_by_tokens`, among those that are open
        self._most_free = 0
        self._looked = False  # whether these two are known
        self._takes = 0
        self.changes = 0  # how often what is free, or a replica's size, has become another
        self.slots = 0  # of all replicas
        self.used = 0
        self.free = 0  # not slots - used: a shrunken replica's excess is no other's loss
        self.kv_tokens = 0.0  # of all replicas; infinite where one is not bounded
        self.kv_used = 0

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
    def most_free(self) -> int:
        """The most slots one request could take at this moment, closed replicas apart."""
        if not self._looked:
            self._look()
        return self._most_free

    @property
    def most_tokens(self) -> float:
        """The most KV tokens one request could take at this moment, closed replicas apart."""
        if not self._looked:
            self._look()
        return 0.0 if self._best is None else -self._best[0]

    def possible(self, slots: int, tokens: int) -> bool:
        """Whether some replica is large enough, were it empty. O(distinct sizes of replicas)."""
        # A loop, since this is asked for every head: `any` costs thrice as much.
        for size, kv_tokens in self._sizes:  # noqa: SIM110
            if size >= slots and kv_tokens >= tokens:
                return True
        return False

    def fits(self, slots: int, tokens: int) -> bool:
        """Whether some open replica has this much free. O(1) for one slot, else O(distinct numbers of free slots)."""
        if tokens > self.most_tokens:
            return False
        return slots == 1 or self._find(slots, tokens) is not None

    def set_replica(
        self, replica_id: str, slots: int, kv_tokens: int | None = None, lent: tuple[int, int] = (0, 0)
    ) -> None:
        """Add a replica or change its size, or how much of it is in other hands: slots and tokens. What runs there
        goes on. ValueError: negative."""
        if slots < 0 or (kv_tokens is not None and kv_tokens < 0):
            raise ValueError(f"replica {replica_id!r}: slots is {slots}, kv_tokens {kv_tokens}")
        replica = self._replicas.setdefault(replica_id, _Replica())
        before = replica.free
        self._resize((replica.slots, replica.kv_tokens), -1)
        replica.slots, replica.kv_tokens = slots, math.inf if kv_tokens is None else kv_tokens
        replica.lent, replica.kv_lent = lent
        self._resize((replica.slots, replica.kv_tokens), 1)
        self.free += replica.free - before
        self._index(replica_id, replica)

    def drop(self, replica_id: str) -> list[str]:
        """Forget a replica and what it runs; returns the ids of that."""
        replica = self._replicas.pop(replica_id, None)
        if replica is None:
            return []
        self._resize((replica.slots, replica.kv_tokens), -1)
        self.free -= replica.free
        self.used -= replica.used
        self.kv_used -= replica.kv_used
        replica.slots = 0
        self._index(replica_id, replica)
        for request_id in replica.running:
            del self._home[request_id]
        return list(replica.running)

    def free_on(self, replica_id: str) -> tuple[int, float]:
        """Slots and tokens; none of an unknown replica."""
        replica = self._replicas.get(replica_id)
        return (0, 0.0) if replica is None else (replica.free, replica.kv_free)

    def take(self, request_id: str, slots: int, tokens: int, affinity: str | None = None) -> str:
        """Occupy a part of one replica: the affinity's where it fits, else where most tokens are free, then most slots.

        Returns the replica. O(distinct numbers of free slots) for more than one slot.

        Raises:
            ValueError: no open replica has that much, or the request runs already; nothing has changed then.
        """
        replica_id = self._choose(slots, tokens, affinity)
        if replica_id is None or request_id in self._home:
            raise ValueError(f"{request_id!r} cannot take {slots} slots and {tokens} tokens")
        replica = self._replicas[replica_id]
        self._takes += 1
        replica.last_take = self._takes
        replica.running[request_id] = (slots, tokens)
        self._home[request_id] = replica_id
        replica.used += slots
        replica.kv_used += tokens
        self.used += slots
        self.kv_used += tokens
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
        slots, tokens = replica.running.pop(request_id)
        replica.used -= slots
        replica.kv_used -= tokens
        self.used -= slots
        self.kv_used -= tokens
        self.free += replica.free - before
        self._index(replica_id, replica)
        return slots

    def close(self, slots: int, tokens: int) -> None:
        """Keep one replica with something free out of every take until `reopen`: the one nearest to having this much.

        That is the one with most free tokens where no open one has enough of them, else the one with most free slots.
        O(log replicas) while that one is large enough to hold it at all, else one pass over all.
        """
        if not self._looked:
            self._look()
        top = self._best
        if top is None:
            return
        if -top[0] >= tokens:
            top = self._first(self._by_free[self.most_free])
            assert top is not None  # `most_free` has one
        replica_id = top[-1]
        if not self._holds(replica_id, slots, tokens):
            able = [e for e in self._by_tokens if e[-1] not in self._closed and self._holds(e[-1], slots, tokens)]
            if not able:
                return
            replica_id = min(able, key=lambda entry: (entry[1], entry))[-1]
        self._closed.add(replica_id)
        self._looked = False

    def reopen(self) -> None:
        """Let takes reach every replica again."""
        if self._closed:
            self._closed.clear()
            self._looked = False

    def use(self) -> Iterator[tuple[str, ReplicaUse]]:
        """Every replica with its slots and tokens and those in use."""
        for replica_id, replica in self._replicas.items():
            kv_tokens = None if math.isinf(replica.kv_tokens) else int(replica.kv_tokens)
            yield replica_id, ReplicaUse(replica.slots, replica.used, kv_tokens, replica.kv_used)

    def _holds(self, replica_id: str, slots: int, tokens: int) -> bool:
        replica = self._replicas[replica_id]
        return replica.slots >= slots and replica.kv_tokens >= tokens

    def _choose(self, slots: int, tokens: int, affinity: str | None) -> str | None:
        if affinity is not None and affinity not in self._closed:
            wanted = self._replicas.get(affinity)
            if wanted is not None and wanted.free >= slots and wanted.kv_free >= tokens:
                return affinity
        return self._find(slots, tokens)

    def _find(self, slots: int, tokens: int) -> str | None:
        if not self._looked:
            self._look()
        top = self._best
        if top is not None and -top[1] < slots:
            counts = self._counts[bisect_left(self._counts, slots) :]
            firsts = [self._first(self._by_free[count]) for count in counts]
            top = min((first for first in firsts if first is not None), default=None)
        return None if top is None or -top[0] < tokens else top[-1]

    def _look(self) -> None:
        """Find the best open replicas anew."""
        self._looked = True
        if not self._closed:
            self._best = self._by_tokens[0] if self._by_tokens else None
            self._most_free = self._counts[-1] if self._counts else 0
            return
        self._best, self._most_free = self._first(self._by_tokens), 0
        for count in reversed(self._counts):
            if self._first(self._by_free[count]) is not None:
                self._most_free = count
                return

    def _first(self, entries: list[Entry]) -> Entry | None:
        """The best of those that are open."""
        if not self._closed:
            return entries[0] if entries else None
        for entry in entries:
            if entry[-1] not in self._closed:
                return entry
        return None

    def _resize(self, size: tuple[int, float], by: int) -> None:
        """Count a replica of this size in or out; one without slots has no size."""
        slots, _ = size
        if not slots:
            return
        self.slots += by * slots
        self._sizes[size] += by
        if not self._sizes[size]:
            del self._sizes[size]
        self.kv_tokens = sum(kv_tokens * replicas for (_, kv_tokens), replicas in self._sizes.items())

    def _index(self, replica_id: str, replica: _Replica) -> None:
        """Find a replica by what is free on it now."""
        self.changes += 1
        self._looked = False
        if replica.entry is not None:
            count = -replica.entry[1]
            _discard(self._by_tokens, replica.entry)
            same = self._by_free[count]
            _discard(same, replica.entry)
            if not same:
                del self._by_free[count], self._counts[bisect_left(self._counts, count)]
        free, kv_free = replica.free, replica.kv_free
        replica.entry = (-kv_free, -free, replica.last_take, replica_id) if free and kv_free > 0 else None
        if replica.entry is not None:
            if free not in self._by_free:
                self._by_free[free] = []
                insort(self._counts, free)
            insort(self._by_free[free], replica.entry)
            insort(self._by_tokens, replica.entry)


def _discard(entries: list[Entry], entry: Entry) -> None:
    del entries[bisect_left(entries, entry)]
