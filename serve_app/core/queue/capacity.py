"""Which replica runs a request: slots and KV tokens of every replica, taken and given back.

Invariant: a take never brings a replica above the slots or the KV tokens it has; what was taken is given back once, or
goes with the replica. A replica may hold more than it has only because it shrank, and then gets nothing until it is
below.

A request may be constrained to one replica, or from some (`Where`). What sessions hold on a replica (`reserved`) comes
free only when they end, so it does not count where the question is whether a request can ever run there. A replica in
KV debt (running requests have outgrown their estimates by more than was free) takes no requests of the debtors' classes
and below; `turn` says for which class is asked.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from serve_app.core.queue.events import ReplicaUse, Where
from serve_app.types import RequestClass

_Size = tuple[int, float, float]  # slots, KV tokens, and those of them that sessions do not hold
_NONE: frozenset[str] = frozenset()
Entry = tuple[float, int, int, str]  # minus free tokens, minus free slots, last take, replica: the best comes first


@dataclass(slots=True)
class _Replica:
    slots: int = 0
    kv_tokens: float = math.inf
    reserved: int = 0  # of these, held by sessions
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

    @property
    def size(self) -> _Size:
        return self.slots, self.kv_tokens, max(0.0, self.kv_tokens - self.reserved)


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
        self._sizes: Counter[_Size] = Counter()  # how many replicas of this size there are
        self._debts: dict[str, RequestClass] = {}  # the highest class that is in KV debt, by replica
        self._kept: set[str] = set()  # closed by `close`
        self._closed: set[str] = set()  # these, and those in debt for whose turn it is
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

    def possible(self, slots: int, tokens: int, where: Where | None = None) -> bool:
        """Whether some replica is large enough, were nothing on it but its sessions. O(distinct sizes of replicas)."""
        if where is None:
            # A loop, since this is asked for every head: `any` costs thrice as much.
            for size, _, kv_tokens in self._sizes:  # noqa: SIM110
                if size >= slots and kv_tokens >= tokens:
                    return True
            return False
        only, avoid = where
        if only is not None:
            return only not in avoid and only in self._replicas and self._holds(only, slots, tokens)
        hidden = Counter(self._replicas[one].size for one in avoid if one in self._replicas)
        return any(
            size[0] >= slots and size[2] >= tokens and replicas > hidden[size] for size, replicas in self._sizes.items()
        )

    def too_large(self, slots: int, tokens: int, only: str | None = None) -> bool:
        """Whether no replica would be large enough even without sessions; one that has no slots now may be, once it
        has. O(distinct sizes of replicas)."""
        if only is not None:
            one = self._replicas.get(only)
            return one is not None and one.slots > 0 and (one.slots < slots or one.kv_tokens < tokens)
        return not any(size >= slots and kv_tokens >= tokens for size, kv_tokens, _ in self._sizes)

    def fits(self, slots: int, tokens: int, where: Where | None = None) -> bool:
        """Whether some open replica has this much free. O(1) for one slot, else O(distinct numbers of free slots)."""
        if tokens > self.most_tokens:
            return False
        return (slots == 1 and where is None) or self._find(slots, tokens, where) is not None

    def set_replica(
        self,
        replica_id: str,
        slots: int,
        kv_tokens: int | None = None,
        lent: tuple[int, int] = (0, 0),
        reserved: int = 0,
    ) -> None:
        """Add a replica or change its size, or how much of it is in other hands (slots and tokens), or how many tokens
        of these sessions hold. What runs there goes on."""
        replica = self._replicas.setdefault(replica_id, _Replica())
        before = replica.free
        self._resize(replica.size, -1)
        replica.slots, replica.kv_tokens = slots, math.inf if kv_tokens is None else kv_tokens
        replica.lent, replica.kv_lent = lent
        replica.reserved = reserved
        self._resize(replica.size, 1)
        self.free += replica.free - before
        self._index(replica_id, replica)

    def drop(self, replica_id: str) -> list[str]:
        """Forget a replica and what it runs; returns the ids of that."""
        replica = self._replicas.pop(replica_id, None)
        if replica is None:
            return []
        self._debts.pop(replica_id, None)
        self._resize(replica.size, -1)
        self.free -= replica.free
        self.used -= replica.used
        self.kv_used -= replica.kv_used
        replica.slots = 0
        self._index(replica_id, replica)
        for request_id in replica.running:
            del self._home[request_id]
        return list(replica.running)

    def set_debt(self, replica_id: str, level: RequestClass | None) -> None:
        """Requests of this class and below start nothing on a replica; None: all may."""
        if level is None:
            self._debts.pop(replica_id, None)
        elif replica_id in self._replicas:
            self._debts[replica_id] = level
        self.changes += 1

    def turn(self, level: RequestClass) -> None:
        """What is asked for and taken from now on is for this class: replicas in debt to it or above are closed.
        O(replicas in debt)."""
        if self._debts:
            self._closed = self._kept | {replica_id for replica_id, debt in self._debts.items() if debt >= level}
            self._looked = False

    def take(
        self, request_id: str, slots: int, tokens: int, affinity: str | None = None, where: Where | None = None
    ) -> str:
        """Occupy a part of one replica: the affinity's where it fits, else where most tokens are free, then most slots.

        Returns the replica. O(distinct numbers of free slots) for more than one slot.

        Raises:
            ValueError: no open replica has that much, or the request runs already; nothing has changed then.
        """
        replica_id = self._choose(slots, tokens, affinity, where)
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

    def close(self, slots: int, tokens: int, where: Where | None = None) -> None:
        """Keep one replica with something free out of every take until `reopen`: the one nearest to having this much.

        That is the one with most free tokens where no open one has enough of them, else the one with most free slots;
        none that a request of this constraint could not run on. O(log replicas) while that one is large enough to hold
        it at all, else one pass over all.
        """
        only, avoid = where or (None, _NONE)
        if only is not None:
            entry = self._replicas[only].entry if only in self._replicas else None
            top = None if entry is None or only in avoid or only in self._closed else entry
        elif avoid:
            top = self._first(self._by_tokens, avoid)
            if top is not None and -top[0] >= tokens:
                firsts = (self._first(self._by_free[count], avoid) for count in reversed(self._counts))
                top = next(first for first in firsts if first is not None)  # `top` itself is among them
        else:
            if not self._looked:
                self._look()
            top = self._best
            if top is not None and -top[0] >= tokens:
                top = self._first(self._by_free[self._most_free])
        if top is None:
            return
        replica_id = top[-1]
        if not self._holds(replica_id, slots, tokens):
            others = [] if only is not None else self._by_tokens
            able = [e for e in others if self._open(e, avoid) and self._holds(e[-1], slots, tokens)]
            if not able:
                return
            replica_id = min(able, key=lambda entry: (entry[1], entry))[-1]
        self._kept.add(replica_id)
        self._closed.add(replica_id)
        self._looked = False

    def reopen(self) -> None:
        """Let takes reach every replica again."""
        if self._closed:
            self._kept.clear()
            self._closed.clear()
            self._looked = False

    def use(self) -> Iterator[tuple[str, ReplicaUse]]:
        """Every replica with its slots and tokens and those in use."""
        for replica_id, replica in self._replicas.items():
            kv_tokens = None if math.isinf(replica.kv_tokens) else int(replica.kv_tokens)
            yield replica_id, ReplicaUse(replica.slots, replica.used, kv_tokens, replica.kv_used)

    def _holds(self, replica_id: str, slots: int, tokens: int) -> bool:
        replica = self._replicas[replica_id]
        size, _, kv_tokens = replica.size
        return size >= slots and kv_tokens >= tokens

    def _choose(self, slots: int, tokens: int, affinity: str | None, where: Where | None) -> str | None:
        if affinity is not None and (where is None or where[0] is None):
            found = self._find(slots, tokens, (affinity, _NONE if where is None else where[1]))
            if found is not None:
                return found
        return self._find(slots, tokens, where)

    def _find(self, slots: int, tokens: int, where: Where | None) -> str | None:
        avoid = _NONE
        if where is None:
            if not self._looked:
                self._look()
            top = self._best
        else:
            only, avoid = where
            if only is not None:
                one = self._replicas.get(only)
                fits = one is not None and one.free >= slots and one.kv_free >= tokens
                return only if fits and only not in avoid and only not in self._closed else None
            top = self._first(self._by_tokens, avoid)
        if top is not None and -top[1] < slots:
            counts = self._counts[bisect_left(self._counts, slots) :]
            firsts = [self._first(self._by_free[count], avoid) for count in counts]
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

    def _first(self, entries: list[Entry], avoid: frozenset[str] = _NONE) -> Entry | None:
        """The best of those that are open and not to be avoided."""
        if not self._closed and not avoid:
            return entries[0] if entries else None
        for entry in entries:
            if entry[-1] not in self._closed and entry[-1] not in avoid:
                return entry
        return None

    def _open(self, entry: Entry, avoid: frozenset[str]) -> bool:
        return entry[-1] not in self._closed and entry[-1] not in avoid

    def _resize(self, size: _Size, by: int) -> None:
        """Count a replica of this size in or out; one without slots has no size."""
        slots = size[0]
        if not slots:
            return
        self.slots += by * slots
        self._sizes[size] += by
        if not self._sizes[size]:
            del self._sizes[size]
        self.kv_tokens = sum(kv_tokens * replicas for (_, kv_tokens, _), replicas in self._sizes.items())

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
