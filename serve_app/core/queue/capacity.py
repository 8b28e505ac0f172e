"""Which replica runs a request: the pools of all replicas (`core.pools`), found by what is free in them.

A take charges the pool, and what others use of it (credit of routers, sessions) is seen here at once.

Invariant: every take is given back once, or removed with its replica. Only a replica that has shrunk can have more in
use than its size; it takes no request until its use is below its size.

A request may be constrained to one replica, or excluded from some (`PlacementConstraint`). KV tokens that sessions hold
on a replica come free only when the sessions end, so they do not count when the question is whether a request can ever
run there. A replica in KV debt (running requests need more KV tokens than their estimates and more than was free) takes
no request of the class in debt or below; `set_asking_class` sets the class that asks.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial

from serve_app.core.pools import UNBOUNDED, Holder, RequestPool, TokenSpace
from serve_app.core.queue.events import Arrival, PlacementConstraint, WaitReason
from serve_app.core.queue.tenant_queue import QueuedRequest
from serve_app.types import RequestClass

_Size = tuple[int, float, float]  # slots, KV tokens, KV tokens that sessions do not hold
ANYWHERE: PlacementConstraint = None, frozenset()
# Minus free tokens, minus free slots, last take, replica id: the best replica comes first.
IndexEntry = tuple[float, int, int, str]


@dataclass(slots=True)
class _ReplicaCapacity:
    pool: RequestPool
    is_open: bool = False  # closed: it takes nothing, as if it had no slots
    session_kv: int = 0  # KV tokens held by sessions
    counted_size: _Size = (0, 0.0, 0.0)  # as it is in the totals
    slots_left: int = 0
    kv_left: float = 0.0
    counted_free: int = 0  # free slots that `Capacity.free` includes
    last_take: int = 0
    index_entry: IndexEntry | None = None  # its entry in the indices; None: nothing is free on it
    running: dict[str, tuple[int, int]] = field(default_factory=dict)  # slots and tokens by request id

    @property
    def slots(self) -> int:
        return self.pool.slots if self.is_open else 0

    @property
    def kv_tokens(self) -> float:
        if not self.is_open:
            return 0
        limit = self.pool.space.limit
        return math.inf if limit == UNBOUNDED else limit

    def follow_pool(self) -> None:
        """Read what is free in the pool, once for each of its changes. Negative: it has shrunk below its use, or more
        KV tokens are used than there are, the growth reserve included."""
        pool = self.pool
        space = pool.space
        used = space.used
        self.slots_left = (pool.slots if self.is_open else 0) - pool.used_slots
        left = self.kv_tokens - used
        self.kv_left = left if left >= 0 else max(left, min(0, (space.capacity if self.is_open else 0) - used))

    def has_free(self, slots: int, tokens: int) -> bool:
        """For at least one slot and one token."""
        return self.slots_left >= slots and self.kv_left >= tokens

    @property
    def size(self) -> _Size:
        return self.slots, self.kv_tokens, max(0.0, self.kv_tokens - self.session_kv)


class Capacity:
    """Slots and KV tokens by replica.

    O(log replicas) comparisons per method, or O(distinct numbers of free slots) where the method says so. The indices
    are sorted lists, not heaps: a replica that is closed for a moment stays in the list and is skipped, and moving
    10,000 pointers costs less than one heap operation.
    """

    def __init__(self) -> None:
        self.replicas: dict[str, _ReplicaCapacity] = {}
        self._by_free: dict[int, list[IndexEntry]] = {}  # replicas by their number of free slots
        self._free_counts: list[int] = []  # the keys of `_by_free`, rising
        self._by_tokens: list[IndexEntry] = []  # all replicas with something free
        self._sizes: Counter[_Size] = Counter()  # number of replicas by size
        self._kv_debts: dict[str, RequestClass] = {}  # the highest class in KV debt, by replica
        self._held_back: set[str] = set()  # closed by `hold_back`
        self._closed: set[str] = set()  # these, and the replicas in KV debt for the class that asks
        self._best: IndexEntry | None = None  # the first of `_by_tokens` that is open
        self._most_free_slots = 0
        self._best_known = False  # whether `_best` and `_most_free_slots` are up to date
        self._take_count = 0
        self.changes = 0  # version: rises when free capacity, KV debt or a replica's size changes
        self.changed: set[str] = set()  # replicas whose free capacity or size has changed; `.rooms` takes them out
        self.slots = 0  # of all replicas
        self.used = 0  # by the requests that run here
        self.free = 0  # not slots - used: the excess of a shrunken replica does not reduce the free slots of others
        self.kv_tokens = 0.0  # of all replicas; infinite if one is not bounded
        self.kv_used = 0

    @property
    def most_free_slots(self) -> int:
        """The most slots that one request could take now on an open replica."""
        if not self._best_known:
            self._find_best()
        return self._most_free_slots

    @property
    def most_free_tokens(self) -> float:
        """The most KV tokens that one request could take now on an open replica."""
        if not self._best_known:
            self._find_best()
        return 0.0 if self._best is None else -self._best[0]

    def could_fit(self, slots: int, tokens: int, where: PlacementConstraint | None) -> bool:
        """Whether some replica would be large enough if only its sessions were on it. O(distinct replica sizes)."""
        if where is None:
            # A loop: this is called for every head, and `any` takes three times as long.
            for size, _, kv_tokens in self._sizes:  # noqa: SIM110
                if size >= slots and kv_tokens >= tokens:
                    return True
            return False
        only, avoid = where
        if only is not None:
            return only not in avoid and only in self.replicas and self._is_large_enough(only, slots, tokens)
        hidden = Counter(self.replicas[one].counted_size for one in avoid if one in self.replicas)
        sizes = (size for size, replicas in self._sizes.items() if replicas > hidden[size])
        return any(size >= slots and kv_tokens >= tokens for size, _, kv_tokens in sizes)

    def may_take(
        self, replica_id: str, request_class: RequestClass, slots: int, tokens: int, where: PlacementConstraint | None
    ) -> bool:
        """Whether a replica could take this of a class if only its sessions were on it."""
        only, avoid = where or ANYWHERE
        is_closed = self._kv_debts.get(replica_id, -1) >= request_class
        is_allowed = only in (None, replica_id) and replica_id not in avoid
        return is_allowed and not is_closed and self._is_large_enough(replica_id, slots, tokens)

    def all_may_take(
        self, request_class: RequestClass, slots: int, tokens: int, where: PlacementConstraint | None
    ) -> bool:
        """Whether `may_take` is True for every replica with slots, and there is one. O(distinct replica sizes)."""
        if not self._sizes or where is not None or any(debt >= request_class for debt in self._kv_debts.values()):
            return False
        return all(size >= slots and kv_tokens >= tokens for size, _, kv_tokens in self._sizes)

    def is_too_large(self, arrival: Arrival) -> bool:
        """Whether no replica would be large enough even without sessions; False for an only replica that has no slots
        now, since it may get them. O(distinct replica sizes)."""
        slots = arrival.slots
        tokens = arrival.cost
        only = arrival.only_replica
        if only is not None:
            replica = self.replicas.get(only)
            size, kv_tokens, _ = (0, 0.0, 0.0) if replica is None else replica.counted_size
            return size > 0 and (size < slots or kv_tokens < tokens)
        return not any(size >= slots and kv_tokens >= tokens for size, kv_tokens, _ in self._sizes)

    def fits(self, slots: int, tokens: int, where: PlacementConstraint | None) -> bool:
        """Whether some open replica has this much free. O(1) for one slot, else O(distinct numbers of free slots)."""
        if tokens > self.most_free_tokens:
            return False
        return (slots == 1 and where is None) or self._find(slots, tokens, where) is not None

    def shortage(self, slots: int, tokens: int, where: PlacementConstraint | None) -> WaitReason:
        """Why `fits` is False. O(closed replicas); O(replicas) for a request with a placement constraint."""
        only, avoid = where or ANYWHERE
        closed = [
            replica_id
            for replica_id in self._closed
            if self.replicas[replica_id].has_free(slots, tokens)
            and only in (None, replica_id)
            and replica_id not in avoid
        ]
        if closed:
            return WaitReason.KV_DEBT if self._held_back.isdisjoint(closed) else WaitReason.HELD_BACK
        if where is not None and any(replica.has_free(slots, tokens) for replica in self.replicas.values()):
            return WaitReason.PLACEMENT
        most = self._free_counts[-1] if self._free_counts else 0  # 0: nowhere are both free slots and free KV tokens
        return WaitReason.KV_TOKENS if self.free >= slots and (not most or most >= slots) else WaitReason.SLOTS

    def set_pool(self, replica_id: str, pool: RequestPool | None, session_kv: int = 0) -> None:
        """Add a replica with this pool, or follow its size. Running requests stay.

        Args:
            pool: None: it is closed.
            session_kv: KV tokens that sessions hold on it.
        """
        replica = self.replicas.get(replica_id)
        if replica is None:
            empty = RequestPool(replica_id, TokenSpace(), 0)
            replica = self.replicas[replica_id] = _ReplicaCapacity(pool or empty)
        replica.is_open = pool is not None
        if pool is not None and replica.pool is not pool:
            replica.pool.on_change = None
            replica.pool = pool
        replica.pool.on_change = partial(self._index, replica_id, replica)
        replica.session_kv = session_kv
        self._follow_size(replica)
        self._index(replica_id, replica)

    def is_as_known(self, replica_id: str, pool: RequestPool | None, session_kv: int) -> bool:
        """Whether `set_pool` would change nothing."""
        replica = self.replicas.get(replica_id)
        if replica is None or pool not in (None, replica.pool):
            return False
        is_same = replica.is_open is (pool is not None) and replica.session_kv == session_kv
        return is_same and replica.counted_size == replica.size

    def drop_replica(self, replica_id: str) -> list[str]:
        """Remove a replica; returns the ids of the requests that ran on it."""
        replica = self.replicas.pop(replica_id, None)
        if replica is None:
            return []
        self._kv_debts.pop(replica_id, None)
        replica.pool.on_change = None
        replica.is_open = False
        self._follow_size(replica)
        self._index(replica_id, replica)
        for slots, tokens in replica.running.values():
            self._add_use(-slots, -tokens)
        return list(replica.running)

    def set_kv_debt(self, replica_id: str, request_class: RequestClass | None) -> None:
        """Let no request of this class or below start on a replica; None: no KV debt any more."""
        if request_class is None:
            self._kv_debts.pop(replica_id, None)
        elif replica_id in self.replicas:
            self._kv_debts[replica_id] = request_class
        self.changes += 1

    def set_asking_class(self, request_class: RequestClass) -> None:
        """The next queries and takes are for this class: replicas in KV debt at this class or above are closed.
        O(replicas in KV debt)."""
        if self._kv_debts:
            in_debt = {replica_id for replica_id, debt in self._kv_debts.items() if debt >= request_class}
            self._closed = self._held_back | in_debt
            self._best_known = False

    def take(self, waiting: QueuedRequest) -> str:
        """Take what a request needs of one replica: its preferred one if it fits there, else the one with most free
        tokens, then most slots.

        Returns the replica id. O(distinct numbers of free slots) for more than one slot.

        Raises:
            ValueError: no open replica has that much free; the state is unchanged.
        """
        arrival = waiting.arrival
        slots, tokens, where = waiting.need
        only, avoid = where or ANYWHERE
        replica_id = None
        if arrival.affinity is not None and only is None:
            replica_id = self._find(slots, tokens, (arrival.affinity, avoid))
        replica_id = replica_id or self._find(slots, tokens, where)
        if replica_id is None:
            raise ValueError(f"{arrival.request_id!r} cannot take {slots} slots and {tokens} tokens")
        replica = self.replicas[replica_id]
        self._take_count += 1
        replica.last_take = self._take_count  # first: the charge moves it in the indices
        replica.pool.charge(waiting.holder, slots, tokens)
        replica.running[arrival.request_id] = (slots, tokens)
        self._add_use(slots, tokens)
        return replica_id

    def add_run(self, replica_id: str, request_id: str, slots: int, tokens: int) -> None:
        """A request runs on a replica that was not granted here: its account has this already."""
        self.replicas[replica_id].running[request_id] = (slots, tokens)
        self._add_use(slots, tokens)

    def give_back(
        self, replica_id: str, request_id: str, holder: Holder, returned: tuple[int, int] | None = None
    ) -> None:
        """A request of this holder has ended: its account returns what it has taken of a replica, or `returned`."""
        taken = self.replicas[replica_id].running.pop(request_id)
        self._add_use(-taken[0], -taken[1])
        holder.give_back(replica_id, *(taken if returned is None else returned))

    def empty(self, replica_id: str, request_id: str, holder: Holder) -> None:
        """Return the slots and KV tokens that a request has taken of a replica; it runs on with nothing."""
        replica = self.replicas[replica_id]
        slots, tokens = replica.running[request_id]
        replica.running[request_id] = (0, 0)
        self._add_use(-slots, -tokens)
        holder.give_back(replica_id, slots, tokens)

    def hold_back(self, slots: int, tokens: int, where: PlacementConstraint | None) -> None:
        """Close the open replica that is nearest to having this much free, until `release_held_back`.

        That is the replica with most free tokens if no open one has enough tokens, else the one with most free slots;
        only replicas that the constraint allows and that are large enough. O(log replicas) if the first candidate is
        large enough, else one pass over all replicas.
        """
        only, avoid = where or ANYWHERE
        entry = self._first_open(self._entries(only), avoid)
        if entry is not None and (-entry[0] >= tokens or not self._is_large_enough(entry[-1], slots, tokens)):
            by_slots = (one for count in reversed(self._free_counts) for one in self._by_free[count])
            candidates = by_slots if only is None else self._entries(only)
            able = (one for one in candidates if self._is_large_enough(one[-1], slots, tokens))
            entry = self._first_open(able, avoid)
        if entry is not None:
            self._held_back.add(entry[-1])
            self._closed.add(entry[-1])
            self._best_known = False

    def release_held_back(self) -> None:
        """Open all closed replicas again."""
        if self._closed:
            self._held_back.clear()
            self._closed.clear()
            self._best_known = False

    def _is_large_enough(self, replica_id: str, slots: int, tokens: int) -> bool:
        size, _, kv_tokens = self.replicas[replica_id].counted_size
        return size >= slots and kv_tokens >= tokens

    def _find(self, slots: int, tokens: int, where: PlacementConstraint | None) -> str | None:
        """The replica that has this much free: the one with most free tokens, then most slots."""
        only, avoid = where or ANYWHERE
        if where is not None:
            top = self._first_open(self._entries(only), avoid)
        else:
            if not self._best_known:
                self._find_best()
            top = self._best
        if top is not None and -top[1] < slots and only is None:
            counts = self._free_counts[bisect_left(self._free_counts, slots) :]
            firsts = [self._first_open(self._by_free[count], avoid) for count in counts]
            top = min((first for first in firsts if first is not None), default=None)
        return None if top is None or -top[0] < tokens or -top[1] < slots else top[-1]

    def _find_best(self) -> None:
        """Recompute `_best` and `_most_free_slots` over the open replicas."""
        self._best_known = True
        self._best = self._first_open(self._by_tokens)
        self._most_free_slots = 0
        for count in reversed(self._free_counts):
            if self._first_open(self._by_free[count]) is not None:
                self._most_free_slots = count
                return

    def _entries(self, only: str | None) -> list[IndexEntry]:
        """All replicas with something free, by free tokens; with `only`, at most that one."""
        if only is None:
            return self._by_tokens
        replica = self.replicas.get(only)
        return [] if replica is None or replica.index_entry is None else [replica.index_entry]

    def _first_open(self, entries: Iterable[IndexEntry], avoid: frozenset[str] = frozenset()) -> IndexEntry | None:
        """The first entry whose replica is open and not in `avoid`."""
        for entry in entries:
            if entry[-1] not in self._closed and entry[-1] not in avoid:
                return entry
        return None

    def _add_use(self, slots: int, tokens: int) -> None:
        """Count slots and KV tokens that are taken; negative: given back."""
        self.used += slots
        self.kv_used += tokens

    def _follow_size(self, replica: _ReplicaCapacity) -> None:
        """Count a replica's present size in the totals."""
        size = replica.size
        if size != replica.counted_size:
            self._count_size(replica.counted_size, -1)
            self._count_size(size, 1)
            replica.counted_size = size

    def _count_size(self, size: _Size, by: int) -> None:
        """Add (`by` 1) or remove (-1) a replica of this size in the totals; a replica without slots does not count."""
        slots = size[0]
        if not slots:
            return
        self.slots += by * slots
        self._sizes[size] += by
        if not self._sizes[size]:
            del self._sizes[size]
        self.kv_tokens = sum(kv_tokens * replicas for (_, kv_tokens, _), replicas in self._sizes.items())

    def _index(self, replica_id: str, replica: _ReplicaCapacity) -> None:
        """Update the entry of a replica in the indices to its present free slots and tokens."""
        self.changes += 1
        self.changed.add(replica_id)
        self._best_known = False
        if replica.index_entry is not None:
            count = -replica.index_entry[1]
            _discard(self._by_tokens, replica.index_entry)
            same = self._by_free[count]
            _discard(same, replica.index_entry)
            if not same:
                del self._by_free[count], self._free_counts[bisect_left(self._free_counts, count)]
        replica.follow_pool()
        free = max(0, replica.slots_left)
        kv_free = replica.kv_left
        self.free += free - replica.counted_free
        replica.counted_free = free
        replica.index_entry = (-kv_free, -free, replica.last_take, replica_id) if free and kv_free > 0 else None
        if replica.index_entry is not None:
            if free not in self._by_free:
                self._by_free[free] = []
                insort(self._free_counts, free)
            insort(self._by_free[free], replica.index_entry)
            insort(self._by_tokens, replica.index_entry)


def _discard(entries: list[IndexEntry], entry: IndexEntry) -> None:
    del entries[bisect_left(entries, entry)]
