"""The waiting requests of one tenant in one class.

Invariant: a request is in `requests`, in `order` and in `by_size`, or in none of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from serve_app.core.keyed_heap import Key
from serve_app.core.queue.events import Arrival, PlacementConstraint
from serve_app.core.queue.order_statistics import OrderKey, OrderStatistics
from serve_app.types import RequestClass

# Slots, the exponent of the power of two above the tokens, and the placement constraint.
SizeClass = tuple[int, int, PlacementConstraint | None]
# Whether slots and tokens fit, or could fit, on a replica that the constraint allows.
FitsPredicate = Callable[[int, int, PlacementConstraint | None], bool]


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """A waiting request. `order_key`, by which a tenant's requests are sorted, is (`arrived_s`, `arrival_number`)."""

    arrival: Arrival
    arrived_s: float
    arrival_number: int
    # Copies of fields of the arrival: they are read far more often than a request arrives.
    request_id: str = field(init=False)
    slots: int = field(init=False)
    cost: int = field(init=False)
    queue_class: RequestClass = field(init=False)
    placement: PlacementConstraint | None = field(init=False)
    size: SizeClass = field(init=False)
    order_key: OrderKey = field(init=False)

    def __post_init__(self) -> None:
        arrival = self.arrival
        self.request_id, self.slots, self.cost = arrival.request_id, arrival.slots, arrival.cost
        self.queue_class, self.placement, self.order_key = (
            arrival.request_class,
            arrival.placement,
            (self.arrived_s, self.arrival_number),
        )
        self.size = self.slots, self.cost.bit_length(), self.placement


@dataclass(slots=True, eq=False)
class TenantQueue:
    """One tenant in one class. `waiting_since`: the number of the arrival with which it last began to wait."""

    tenant: str
    weight: float
    below_share: bool  # below its guaranteed share
    counter: float = 0.0  # VTC: weighted tokens of service, divided by `weight`
    waiting_since: int = 0
    fair_key: Key = ()  # its sort key in fair order
    slots: int = 0
    tokens: int = 0
    virtual_start: float = 0.0  # virtual time of its minimum share up to which it has paid (`core.queue.min_share`)
    requests: dict[OrderKey, QueuedRequest] = field(default_factory=dict)
    order: OrderStatistics = field(default_factory=OrderStatistics)  # of all order keys
    by_size: dict[SizeClass, OrderStatistics] = field(default_factory=dict)  # order keys by size class
    leading_sizes: set[SizeClass] = field(default_factory=set)  # size classes whose cached head is this tenant's

    def update_fair_key(self) -> None:
        """Recompute the sort key after `below_share`, `counter` or `waiting_since` has changed."""
        self.fair_key = (0 if self.below_share else 1, self.counter, self.waiting_since)

    @property
    def first(self) -> QueuedRequest:
        return self.requests[self.order.first]

    def first_that_could_run(self, could_fit: FitsPredicate) -> QueuedRequest | None:
        """The oldest request that could run. O(size classes) if it is not the oldest of all."""
        first = self.requests[self.order.first]
        if could_fit(first.slots, first.cost, first.placement):
            return first
        heads = (self.requests[queue.first] for queue in self.by_size.values())
        able = (one for one in heads if could_fit(one.slots, one.cost, one.placement))
        return min(able, key=lambda one: one.order_key, default=None)
