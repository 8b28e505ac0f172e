"""The guaranteed minimum share: a part of all granted tokens for every class that waits, whatever stands above it.

While a class waits it earns `share` of the tokens of every grant. This credit is divided among the tenants who wait in
it, by weight: each earns its part from the moment it begins to wait, and pays the tokens of its own grants. Among the
tenants who have had no more than they have earned (the eligible ones), the one whose next request would be earned first
is next. It goes before the higher classes once the class's credit covers its request, or once the tenant has earned the
request by itself. So

- the class is granted at least `share` of all granted tokens while it waits, less about one request;
- a tenant is granted at least its part of that, less one request, and is never ahead by more than one;
- a large request saves up its tenant's part, while small ones of other tenants pass.

What a tenant has saved is lost when nobody of it waits any more, save for what the class's next request needs. While a
due request finds no replica with room, no more than its cost is kept. What a class is granted in its own turn is paid
down to zero and is no debt later. Nothing runs by the clock: an idle system owes nobody.

Deficits per tenant are those of deficit round robin (Shreedhar and Varghese, 1996); the order of eligible tenants and
the virtual time are those of WF2Q+ (Bennett and Zhang, 1997).

Invariant: a tenant is in one of the two heaps while it waits, and in none otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from serve_app.core.keyed_heap import KeyedHeap

if TYPE_CHECKING:
    from serve_app.core.queue.tenant_queue import Lane, Possible, Waiting


class MinimumShare:
    """What one class has earned, and which of its tenants is next for it. O(log tenants) per method."""

    def __init__(self) -> None:
        self.credit = 0.0  # tokens the class has earned and not been granted
        self._earned = 0.0  # tokens per unit of weight, since somebody began to wait
        self._eligible = KeyedHeap()  # tenants, by what will have been earned when their next request is
        self._ahead = KeyedHeap()  # tenants who had more than they have earned, by what must have been earned

    def begin(self, lane: Lane, alone: bool) -> None:
        """A tenant begins to wait; `alone`: nobody else of the class does."""
        if alone:
            self.credit = self._earned = 0.0
        lane.paid_up = self._earned
        self.changed(lane)

    def changed(self, lane: Lane) -> None:
        """The next request of a tenant who waits, its weight, or what it has paid is another."""
        if lane.paid_up <= self._earned:
            self._ahead.discard(lane.tenant)
            self._eligible.set(lane.tenant, (lane.paid_up + lane.first.cost / lane.weight,))
        else:
            self._eligible.discard(lane.tenant)
            self._ahead.set(lane.tenant, (lane.paid_up,))

    def end(self, lane: Lane, lanes: Mapping[str, Lane]) -> None:
        """A tenant does not wait any more. What it has saved is lost, save for what the class's next request needs."""
        self._eligible.discard(lane.tenant)
        self._ahead.discard(lane.tenant)
        top = self._eligible.peek() or self._ahead.peek()
        needed = 0.0 if top is None else float(lanes[top[1]].first.cost)
        saved = max(0.0, self._earned - lane.paid_up) * lane.weight
        self.credit = max(min(self.credit, needed), self.credit - saved)

    def pay(self, lane: Lane, cost: int, due: bool) -> None:
        """A request of a tenant is granted, because it was due or in its class's turn; its removal follows."""
        paid_up = lane.paid_up + cost / lane.weight
        lane.paid_up = paid_up if due else max(lane.paid_up, min(paid_up, self._earned))
        self.credit = max(0.0, self.credit - cost)

    def earn(self, tokens: float, weight: float, lanes: Mapping[str, Lane]) -> None:
        """The class earns so many tokens; `weight`: of its tenants who wait."""
        self.credit += tokens
        self._earned += tokens / weight
        while (top := self._ahead.peek()) is not None:
            if top[0][0] > self._earned:
                if len(self._eligible):
                    return
                self._earned = top[0][0]  # somebody always is next
            self.changed(lanes[top[1]])

    def due(self, lanes: Mapping[str, Lane], possible: Possible) -> Waiting | None:
        """The request that goes before the higher classes, if any: of the first tenant that has one that could run."""
        top = self._eligible.peek()
        aside: list[Lane] = []
        head: Waiting | None = None
        while top is not None:
            lane = lanes[top[1]]
            head = lane.first_possible(possible)
            if head is not None:
                break
            self._eligible.discard(lane.tenant)  # only a session's end makes room for any of its requests
            aside.append(lane)
            top = self._eligible.peek()
        for one in aside:
            self.changed(one)
        if head is None or (self.credit < head.cost and self._earned < lane.paid_up + head.cost / lane.weight):
            return None
        return head

    def blocked(self, lane: Lane, cost: int) -> None:
        """A due request found no replica with room."""
        self.credit = min(self.credit, cost)
        lane.paid_up = max(lane.paid_up, self._earned - cost / lane.weight)
        self.changed(lane)
