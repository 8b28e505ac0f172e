"""The tree of leases of GPU memory: nodes with a capacity and their child leases; and the owners of leases.

Invariant: `held` of a node is the sum of its children's holds on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from serve_app.core.memory.leases import PARENT_KINDS, Hold, Lease, LeaseKind, Phase
from serve_app.errors import InsufficientMemory, LeaseConflict


@dataclass(slots=True)
class Owner:
    """A process that sends heartbeats, and its leases in order of creation."""

    ttl_s: float
    expires_at: float
    leases: dict[str, LedgerNode] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class LedgerNode:
    """A device, or a lease with its holds on other nodes. `limit`: the reservable part of its capacity; the rest is the
    growth reserve."""

    name: str
    kind: LeaseKind
    owner: str
    holds: list[tuple[LedgerNode, int]]
    capacity: int
    limit: int
    phase: Phase = Phase.COMMITTED
    held: int = 0
    children: dict[str, LedgerNode] = field(default_factory=dict)

    def free(self, *, growth: bool) -> int:
        """Free amount, with or without the growth reserve."""
        return max(0, (self.capacity if growth else self.limit) - self.held)

    def check(self, amount: int, *, growth: bool) -> None:
        """Raises InsufficientMemory, with the figures."""
        free = self.free(growth=growth)
        if amount > free:
            raise InsufficientMemory(f"{self.name}: {amount} asked, {free} of {self.capacity} free")

    def view(self) -> Lease:
        """A snapshot of the lease."""
        holds = tuple(Hold(node.name, amount) for node, amount in self.holds)
        return Lease(self.name, self.kind, self.owner, self.phase, holds, self.capacity, self.held)


def check_holds(kind: LeaseKind, holds: Sequence[Hold]) -> None:
    """Check the holds of a lease, without their nodes.

    Raises:
        LeaseConflict: two ranks of an engine on one device.
        ValueError: no hold, too many, or one that is not above zero.
    """
    if not holds or (kind is not LeaseKind.ENGINE and len(holds) > 1):
        where = {LeaseKind.ENGINE: "devices", LeaseKind.RESERVATION: "one device"}.get(kind, "one other lease")
        raise ValueError(f"a lease of a {kind} lies on {where}")
    for hold in holds:
        if hold.amount <= 0:
            raise ValueError(f"{hold.on}: {hold.amount} asked")
    if len({hold.on for hold in holds}) < len(holds):
        raise LeaseConflict("two ranks of one engine cannot be on one device")


def check_parent(kind: LeaseKind, on: LedgerNode) -> None:
    """Raises LeaseConflict if the node's kind or phase does not allow a lease of this kind on it."""
    if on.kind not in PARENT_KINDS[kind]:
        raise LeaseConflict(f"a lease of a {kind} cannot lie on {on.name!r}")
    if on.phase is not Phase.COMMITTED:
        raise LeaseConflict(f"nothing can lie on {on.name!r}: it is {on.phase}")
