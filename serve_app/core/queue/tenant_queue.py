"""The waiting requests of one tenant in one class.

Invariant: a request is in `waiting`, in `ranks` and in `by_size`, or in none of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from serve_app.core.keyed_heap import Key
from serve_app.core.queue.events import Arrival, Where
from serve_app.core.queue.order_statistics import Place, Ranks
from serve_app.types import RequestClass

Size = tuple[int, int, Where | None]  # slots, the power of two that the tokens are below, and where it may run
Possible = Callable[[int, int, Where | None], bool]  # whether there is, or could be, room for slots and tokens


@dataclass(slots=True, eq=False)
class Waiting:
    """A request in the line. `arrived_s` is the moment of arrival, `number` counts arrivals; both are its `entry`, by
    which a tenant's requests are in order."""

    arrival: Arrival
    arrived_s: float
    number: int
    # Of the arrival, here since they are read far more often than a request comes.
    request_id: str = field(init=False)
    slots: int = field(init=False)
    cost: int = field(init=False)
    level: RequestClass = field(init=False)
    where: Where | None = field(init=False)
    size: Size = field(init=False)
    entry: Place = field(init=False)

    def __post_init__(self) -> None:
        arrival = self.arrival
        self.request_id, self.slots, self.cost = arrival.request_id, arrival.slots, arrival.cost
        self.level, self.where, self.entry = arrival.request_class, arrival.where, (self.arrived_s, self.number)
        self.size = self.slots, self.cost.bit_length(), self.where


@dataclass(slots=True, eq=False)
class Lane:
    """One tenant in one class. `since` is the number of the arrival with which it last began to wait."""

    tenant: str
    weight: float
    owed: bool  # below its guaranteed share
    counter: float = 0.0
    since: int = 0
    key: Key = ()  # by which it is ordered
    slots: int = 0
    tokens: int = 0
    paid_up: float = 0.0  # how far it has paid of what the class earns per unit of weight (`core.queue.min_share`)
    waiting: dict[Place, Waiting] = field(default_factory=dict)  # by entry
    ranks: Ranks = field(default_factory=Ranks)  # of the entries
    by_size: dict[Size, Ranks] = field(default_factory=dict)  # of their entries
    leads: set[Size] = field(default_factory=set)  # sizes of which the head that was looked up is its own

    def rank(self) -> None:
        """Owed, counter or since have changed."""
        self.key = (0 if self.owed else 1, self.counter, self.since)

    @property
    def first(self) -> Waiting:
        return self.waiting[self.ranks.first]

    def first_possible(self, possible: Possible) -> Waiting | None:
        """The first one that could run. O(sizes) where it is not the first of all."""
        first = self.waiting[self.ranks.first]
        if possible(first.slots, first.cost, first.where):
            return first
        heads = (self.waiting[queue.first] for queue in self.by_size.values())
        able = (one for one in heads if possible(one.slots, one.cost, one.where))
        return min(able, key=lambda one: one.entry, default=None)
