"""One class of the line: its tenants in fair order, each with its requests by their age.

Fair order is that of weighted virtual token counters (VTC; Sheng et al., "Fairness in Serving Large Language Models",
OSDI 2024): each tenant has a counter of the service it got in this class, over its weight, and the lowest counter is
next. A tenant that comes back from having nobody waiting is raised to the lowest counter of those who wait (or, when
nobody waits, to that of who waited last): idle time is not saved up. Tenants below their guaranteed share come first.
Counters start over when nobody of the class waits or runs.

Of requests of one size (slots, tokens within a factor of two, and the same placement constraint) only the first in fair
order, its head, can be next: among equals nobody passes. What was looked up, the first of all and heads, is kept until
it can be another.

Invariant: a request is in every index or in none; a tenant's key in the heaps is never above its true one; while
`changes` stays the same, so does all that was looked up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from serve_app.core.keyed_heap import KeyedHeap
from serve_app.core.queue.min_share import MinimumShare
from serve_app.core.queue.order_statistics import Ranks
from serve_app.core.queue.tenant_queue import Lane, Possible, Size, Waiting

Head = tuple[tuple[Any, ...], "Waiting", "Lane"]  # first its lane's key with its entry: the order of heads


class Level:
    """The lanes of one class. O(log n) per method, save where it is said."""

    def __init__(self) -> None:
        self.lanes: dict[str, Lane] = {}  # of all tenants since the class was last idle
        self.size = 0  # requests that wait
        self.slots = 0  # that they want
        self.weight = 0.0  # of the tenants who wait
        self.running = 0  # requests that were granted at this level
        self.share = MinimumShare()
        self.changes = 0  # how often something that was looked up has become another
        self._order = (KeyedHeap(), KeyedHeap())  # waiting tenants: those owed, the others
        self._sizes: dict[Size, KeyedHeap] = {}  # waiting tenants that have a request of this size
        self._first: Waiting | None = None  # of all; None: to be looked up
        self._heads: dict[Size, Head] = {}  # those that were looked up
        self._last: Lane | None = None  # the last one to leave
        self._least: float = 0  # no head costs less as long as `changes` is `_least_of`
        self._least_of = -1

    def add(self, waiting: Waiting, weight: float, owed: bool) -> None:
        """Put a request into its tenant's lane, by its age; `weight` and `owed` count where the tenant is new here."""
        tenant, size = waiting.arrival.tenant, waiting.size
        lane = self.lanes.get(tenant)
        if lane is None:
            lane = self.lanes[tenant] = Lane(tenant, weight, owed)
        if not lane.waiting:
            lane.counter = max(lane.counter, self._floor())
            lane.since = waiting.number
            lane.rank()
            if self._first is None or lane.key < self.lanes[self._first.arrival.tenant].key:
                self._forget_first()
            self.weight += lane.weight
            self._order[not lane.owed].set(tenant, lane.key)
        lane.waiting[waiting.entry] = waiting
        lane.ranks.add(waiting.entry)
        lane.slots += waiting.slots
        lane.tokens += waiting.cost
        if lane.ranks.first is waiting.entry:
            if len(lane.waiting) == 1:
                self.share.begin(lane, not self.size)
            else:  # it is older than those who were there
                self.share.changed(lane)
                if self._first is not None and self._first.arrival.tenant == tenant:
                    self._first = None
            self.changes += 1
        queue = lane.by_size.get(size)
        if queue is None:
            queue = lane.by_size[size] = Ranks()
            heap = self._sizes.get(size)
            if heap is None:
                heap = self._sizes[size] = KeyedHeap()
            heap.set(tenant, lane.key)
        queue.add(waiting.entry)
        if queue.first is waiting.entry:
            head = self._heads.get(size)
            if head is None or (*lane.key, waiting.entry) < head[0]:
                self._forget(size)
        self.size += 1
        self.slots += waiting.slots

    def remove(self, waiting: Waiting) -> None:
        """Take a request out that is in."""
        lane, size = self.lanes[waiting.arrival.tenant], waiting.size
        was_first = lane.ranks.first == waiting.entry
        del lane.waiting[waiting.entry]
        lane.ranks.remove(waiting.entry)
        lane.slots -= waiting.slots
        lane.tokens -= waiting.cost
        if waiting is self._first:
            self._forget_first()
        head = self._heads.get(size)
        if head is None or head[1] is waiting:
            self._forget(size)
        queue = lane.by_size[size]
        queue.remove(waiting.entry)
        if not queue:
            del lane.by_size[size]
            heap = self._sizes[size]
            heap.discard(lane.tenant)
            if not len(heap):
                del self._sizes[size]
        self.size -= 1
        self.slots -= waiting.slots
        if not lane.waiting:
            self._order[not lane.owed].discard(lane.tenant)
            self.weight = self.weight - lane.weight if self.size else 0.0
            self._last = lane
            self.share.end(lane, self.lanes)
        elif was_first:
            self.share.changed(lane)
        self._tidy()

    def first(self) -> Waiting | None:
        """The next one in fair order."""
        if self._first is None:
            lane = self._top(self._order[0]) or self._top(self._order[1])
            self._first = None if lane is None else lane.first
        return self._first

    def first_where(self, fits: Possible, most_slots: float, most_tokens: float) -> Waiting | None:
        """The next head whose slots and tokens fit, none of them above these. O(sizes), O(1) while nothing changes and
        even the cheapest does not fit."""
        if self._least_of == self.changes and most_tokens < self._least:
            return None
        found: Head | None = None
        least: float = math.inf
        for size in self._sizes:
            slots, bits, where = size
            at_least = 1 << (bits - 1)
            if slots > most_slots or at_least > most_tokens:
                least = at_least if at_least < least else least  # `min` takes three times as long
                continue
            head = self._heads.get(size) or self._look_up(size)
            cost = head[1].cost
            least = cost if cost < least else least
            if cost <= most_tokens and (found is None or head[0] < found[0]) and fits(slots, cost, where):
                found = head
        self._least, self._least_of = least, self.changes
        return None if found is None else found[1]

    def _look_up(self, size: Size) -> Head:
        """The head of a size that somebody has."""
        lane = self._top(self._sizes[size])
        assert lane is not None  # empty heaps are deleted
        waiting = lane.waiting[lane.by_size[size].first]
        head = self._heads[size] = (*lane.key, waiting.entry), waiting, lane
        lane.leads.add(size)
        return head

    def _forget(self, size: Size) -> None:
        """The head of this size can be another from now on."""
        head = self._heads.pop(size, None)
        if head is not None:
            head[2].leads.discard(size)
        self.changes += 1

    def _forget_first(self) -> None:
        self._first = None
        self.changes += 1

    def charge(self, lane: Lane, tokens: float) -> None:
        """Count weighted tokens of service for a tenant; negative: it was charged too much."""
        lane.counter += tokens / lane.weight
        self._rank(lane)
        if tokens < 0:
            self._lowered(lane)

    def charge_elsewhere(self, tenant: str, weight: float, owed: bool, tokens: float) -> None:
        """A tenant was served in this class, and not by this line. Nothing counts while nobody of the class is here."""
        if not self.size and not self.running:
            return
        lane = self.lanes.get(tenant)
        if lane is None:
            lane = self.lanes[tenant] = Lane(tenant, weight, owed, self._floor())
        self.charge(lane, tokens)

    def begin(self, tenant: str) -> Lane:
        """A request of this tenant that is in begins to run; `remove` follows."""
        self.running += 1
        return self.lanes[tenant]

    def end(self) -> None:
        """A request that was granted at this level has ended."""
        self.running -= 1
        self._tidy()

    def _tidy(self) -> None:
        """Start over with all counters once nobody of the class waits or runs."""
        if not self.size and not self.running:
            self.lanes.clear()
            self._last = None

    def set_owed(self, tenant: str, owed: bool) -> None:
        """A tenant has come below its guaranteed share, or has it now."""
        lane = self.lanes.get(tenant)
        if lane is None or lane.owed is owed:
            return
        self._order[not lane.owed].discard(tenant)
        lane.owed = owed
        self._rank(lane)
        if lane.waiting:
            self._lowered(lane)

    def reweigh(self, weight: Callable[[str], float]) -> None:
        """Other weights from now on. O(tenants)."""
        for lane in self.lanes.values():
            lane.weight = weight(lane.tenant)
        self.weight = sum(lane.weight for lane in self.active())
        for lane in self.active():
            self.share.changed(lane)
        self.changes += 1

    def active(self) -> Iterator[Lane]:
        """The tenants who wait. O(of them)."""
        return (self.lanes[tenant] for heap in self._order for tenant in heap)

    @property
    def tenants(self) -> int:
        """How many tenants wait."""
        return sum(len(heap) for heap in self._order)

    def _floor(self) -> float:
        """What a returning tenant's counter is raised to."""
        lowest = [lane.counter for heap in self._order if (lane := self._top(heap)) is not None]
        if lowest:
            return min(lowest)
        return 0.0 if self._last is None else self._last.counter

    def _rank(self, lane: Lane) -> None:
        """The lane's place in fair order has changed: it may lead no more where it led."""
        lane.rank()
        if self._first is not None and self._first.arrival.tenant == lane.tenant:
            self._forget_first()
        for size in tuple(lane.leads):
            self._forget(size)

    def _lowered(self, lane: Lane) -> None:
        """Heaps find by themselves that a key has risen, not that it has fallen: then the lane may lead now."""
        if lane.waiting:
            self._order[not lane.owed].set(lane.tenant, lane.key)
            self._forget_first()
            for size in lane.by_size:
                self._sizes[size].set(lane.tenant, lane.key)
                self._forget(size)

    def _top(self, heap: KeyedHeap) -> Lane | None:
        while (top := heap.peek()) is not None:
            lane = self.lanes[top[1]]
            if top[0] == lane.key:
                return lane
            heap.replace_first(lane.key)
        return None
