"""The place of an agent session: one slot and the session's KV tokens, on an engine but apart from its other requests.

A request of the session runs there if the place is free and large enough, whatever waits for the replicas: it uses
nothing of the replica. Otherwise it waits as every other request does, until a replica or the place can take it: never
with a part of both.

Invariant: a place has at most one request.
"""

from __future__ import annotations

from dataclasses import dataclass

from serve_app.core.pools import UNBOUNDED, Holder, RequestPool


@dataclass(frozen=True, slots=True)
class SessionPlace:
    """A session's place. `replica_id`: its engine; `pool`: named by the session's lease, with one slot."""

    replica_id: str
    pool: RequestPool

    def could_take(self, slots: int, cost: int) -> bool:
        """Whether it is large enough."""
        return slots == 1 and cost <= self.pool.space.limit

    def may_take(self, slots: int, cost: int) -> bool:
        """Whether it is free and large enough."""
        return self.could_take(slots, cost) and not self.pool.is_used

    def take(self, holder: Holder, cost: int) -> None:
        """Charge a request to this holder. Raises InsufficientMemory: there is not so much."""
        self.pool.charge(holder, 1, cost)

    def give_back(self, holder: Holder, returned: tuple[int, int] | None = None) -> None:
        """The request has ended: its holder returns this, or all that it has here."""
        self.pool.give_back(holder, *(returned or (1, UNBOUNDED)))
