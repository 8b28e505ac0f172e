"""Those of one class who may lose their place in a full line, by who should lose it first (`.eviction` decides).

First the tenant with most for its weight, of it the youngest. A request that was granted before ("accepted") never
does.

Invariant: whoever waits and was not accepted is here exactly once; a tenant's key in the heaps is never above its true
one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from serve_app.core.keyed_heap import KeyedHeap
from serve_app.core.queue.tenant_queue import Waiting

REQUESTS, TOKENS = "requests", "tokens"


@dataclass(frozen=True, slots=True)
class Room:
    """Requests and tokens by which a bound is exceeded, none below zero."""

    requests: int = 0
    tokens: int = 0

    def __bool__(self) -> bool:
        return self.requests > 0 or self.tokens > 0

    def without(self, requests: int, tokens: int) -> Room:
        return Room(max(0, self.requests - requests), max(0, self.tokens - tokens))

    def both(self, other: Room) -> Room:
        """What satisfies either."""
        return Room(max(self.requests, other.requests), max(self.tokens, other.tokens))


@dataclass(slots=True, eq=False)
class _Holding:
    weight: float
    requests: OrderedDict[str, Waiting] = field(default_factory=OrderedDict)
    tokens: int = 0


class Sheddable:
    """Those of one level who may be shed, by tenant. O(log n), save the first time that something is short."""

    def __init__(self) -> None:
        self.requests = 0
        self.tokens = 0
        self._holdings: dict[str, _Holding] = {}
        # Tenants by how many requests, or tokens, they have for their weight: what has been short so far.
        self._heaps: dict[str, KeyedHeap] = {}

    def add(self, waiting: Waiting, weight: float) -> None:
        if waiting.arrival.accepted:
            return
        self.requests += 1
        self.tokens += waiting.cost
        tenant = waiting.arrival.tenant
        holding = self._holdings.get(tenant)
        if holding is None:
            holding = self._holdings[tenant] = _Holding(weight)
        holding.requests[waiting.request_id] = waiting
        holding.tokens += waiting.cost
        self._rank(tenant, holding)

    def remove(self, waiting: Waiting) -> None:
        if waiting.arrival.accepted:
            return
        self.requests -= 1
        self.tokens -= waiting.cost
        tenant = waiting.arrival.tenant
        holding = self._holdings[tenant]
        del holding.requests[waiting.request_id]
        holding.tokens -= waiting.cost
        if holding.requests:
            return  # it has less now, so its key has risen: found when it comes to the top
        del self._holdings[tenant]
        for heap in self._heaps.values():
            heap.discard(tenant)

    def heaviest(self, room: Room) -> str | None:
        """The tenant that has most, for its weight, of what is short: requests, or else tokens."""
        short = REQUESTS if room.requests else TOKENS
        if short not in self._heaps:
            self._heaps[short] = KeyedHeap()
            for tenant, holding in self._holdings.items():
                self._rank(tenant, holding)
        heap = self._heaps[short]
        while (top := heap.peek()) is not None:
            key, tenant = top
            self._rank(tenant, self._holdings[tenant])
            if heap.peek() == (key, tenant):
                return tenant
        return None

    def youngest(self, tenant: str) -> Waiting:
        """The latest request of a tenant who has one here."""
        return next(reversed(self._holdings[tenant].requests.values()))

    def can_give(self, tenant: str, room: Room, newcomer: str) -> bool:
        """Whether a tenant, having given this, still has as much for its weight as the newcomer's tenant."""
        giver, taker = self._holdings[tenant], self._holdings[newcomer]
        return giver is not taker and all(
            left / giver.weight >= has / taker.weight
            for short, left, has in (
                (room.requests, len(giver.requests) - room.requests, len(taker.requests)),
                (room.tokens, giver.tokens - room.tokens, taker.tokens),
            )
            if short
        )

    def reweigh(self, weight: Callable[[str], float]) -> None:
        """Other weights from now on. O(tenants)."""
        for tenant, holding in self._holdings.items():
            holding.weight = weight(tenant)
            self._rank(tenant, holding)

    def _rank(self, tenant: str, holding: _Holding) -> None:
        for short, heap in self._heaps.items():
            has = len(holding.requests) if short is REQUESTS else holding.tokens
            heap.set(tenant, (-has / holding.weight,))
