"""The waiting requests of one tenant in one class.

Invariant: a request is in `order` and in its list of `by_size`, or in none; both are sorted by age.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from serve_app.core.keyed_heap import Key
from serve_app.core.pools import Holder
from serve_app.core.queue.events import Arrival, PlacementConstraint, WaitReason
from serve_app.core.queue.session_place import SessionPlace

# Slots, KV tokens, and the replicas that are allowed: what a request needs of one replica.
Need = tuple[int, int, PlacementConstraint | None]
# Slots, the exponent of the power of two above the tokens, and the placement constraint.
SizeClass = tuple[int, int, PlacementConstraint | None]
# Whether slots and tokens fit, or could fit, on a replica that the constraint allows.
FitsPredicate = Callable[[int, int, PlacementConstraint | None], bool]
# A request in a sorted list: when it arrived and the number of its arrival, which is unique, stand before it.
QueueEntry = tuple[float, int, "QueuedRequest"]


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """A waiting request. `order_key`, by which a tenant's requests are sorted, is when it first arrived, and
    `arrival_number`; its longest wait counts from `wait_from_s`. Its grant is charged to `holder`. `place`: of its
    session, which it may take instead of a replica."""

    arrival: Arrival
    arrived_s: float
    arrival_number: int
    holder: Holder
    place: SessionPlace | None = None
    # Of the arrival, computed once: they are read far more often than a request arrives.
    slots: int = field(init=False)
    cost: int = field(init=False)
    unpaid: int = field(init=False)
    need: Need = field(init=False)
    size: SizeClass = field(init=False)
    order_key: tuple[float, int] = field(init=False)
    wait_from_s: float = field(init=False)
    waits_for: WaitReason | None = None  # None: not known yet

    def __post_init__(self) -> None:
        self.wait_from_s = self.arrived_s
        placement = self.arrival.placement
        self.slots = self.arrival.slots
        self.cost = self.arrival.cost
        self.unpaid = self.arrival.unpaid_tokens
        self.need = self.slots, self.cost, placement
        self.size = self.slots, self.cost.bit_length(), placement
        self.order_key = self.arrived_s - self.arrival.age_s, self.arrival_number

    @property
    def may_take_place(self) -> bool:
        """Whether the place of its session is free and large enough."""
        return self.place is not None and self.place.may_take(self.slots, self.cost)


@dataclass(slots=True, eq=False)
class TenantQueue:
    """One tenant in one class. `waiting_since`: the number of the arrival with which it last began to wait."""

    tenant: str
    weight: float
    below_share: bool  # below its guaranteed share
    counter: float = 0.0  # VTC: weighted tokens of service, divided by `weight`
    unconfirmed: float = 0.0  # weighted input tokens in it that are estimates: no engine has counted them yet
    waiting_since: int = 0
    fair_key: Key = ()  # its sort key in fair order
    slots: int = 0
    virtual_start: float = 0.0  # virtual time of its minimum share up to which it has paid (`core.queue.min_share`)
    # Sorted lists, not trees: up to ten thousand entries are moved faster than a tree is walked.
    order: list[QueueEntry] = field(default_factory=list)  # all requests
    by_size: dict[SizeClass, list[QueueEntry]] = field(default_factory=lambda: defaultdict(list))
    begun: dict[SizeClass, list[QueueEntry]] = field(default_factory=dict)  # of these the ones that have begun
    leading_sizes: set[SizeClass] = field(default_factory=set)  # size classes whose cached head is this tenant's
    evictable: OrderedDict[str, QueuedRequest] = field(default_factory=OrderedDict)  # (`.eviction`), the youngest last
    evictable_tokens: int = 0

    def update_fair_key(self) -> None:
        """Recompute the sort key after `below_share`, `counter` or `waiting_since` has changed."""
        self.fair_key = (0 if self.below_share else 1, self.counter, self.waiting_since)

    @property
    def first(self) -> QueuedRequest:
        return self.order[0][2]

    def add_begun(self, waiting: QueuedRequest) -> None:
        insort(self.begun.setdefault(waiting.size, []), (*waiting.order_key, waiting))

    def remove_begun(self, waiting: QueuedRequest) -> None:
        same_size = self.begun[waiting.size]
        del same_size[bisect_left(same_size, waiting.order_key)]
        if not same_size:
            del self.begun[waiting.size]

    def first_begun(self, could_fit: FitsPredicate | None = None) -> QueuedRequest | None:
        """The oldest request that has begun (and could run). O(size classes)."""
        able = [queue[0] for queue in self.begun.values() if could_fit is None or could_fit(*queue[0][2].need)]
        return min(able)[2] if able else None

    def first_that_could_run(self, could_fit: FitsPredicate) -> QueuedRequest | None:
        """The oldest request that could run. O(size classes) if it is not the oldest of all."""
        if could_fit(*self.first.need):
            return self.first
        able = [queue[0] for queue in self.by_size.values() if could_fit(*queue[0][2].need)]
        return min(able)[2] if able else None
