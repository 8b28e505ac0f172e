"""The tree of leases of GPU memory: nodes with a capacity, and their child leases.

Invariant: `held` of a node is the sum of its children's holds on it.
"""

from __future__ import annotations

from collections.abc import Sequence

from serve_app.core.memory.leases import PARENT_KINDS, Hold, Lease, LeaseKind, Phase
from serve_app.errors import InsufficientMemory, LeaseConflict


class LedgerNode:
    """A device or a lease that has child leases. `limit`: the reservable part of its capacity; the rest is the growth
    reserve."""

    __slots__ = ("capacity", "children", "held", "limit", "name")

    def __init__(self, name: str, capacity: int) -> None:
        self.name = name
        self.capacity = self.limit = capacity
        self.held = 0
        self.children: dict[str, LeaseNode] = {}

    def free(self, *, growth: bool) -> int:
        """Free amount, with or without the growth reserve."""
        return max(0, (self.capacity if growth else self.limit) - self.held)

    def check(self, amount: int, *, growth: bool) -> None:
        """Raises InsufficientMemory, with the figures."""
        free = self.free(growth=growth)
        if amount > free:
            raise InsufficientMemory(f"{self.name}: {amount} asked, {free} of {self.capacity} free")


class LeaseNode(LedgerNode):
    """A lease and its child leases."""

    __slots__ = ("expires_at", "holds", "kind", "owner", "phase")

    def __init__(self, name: str, kind: LeaseKind, owner: str, holds: list[tuple[LedgerNode, int]]) -> None:
        super().__init__(name, holds[0][1] if kind in (LeaseKind.SHARE, LeaseKind.SESSION) else 0)
        self.kind = kind
        self.owner = owner
        self.holds = holds
        self.phase = Phase.RESERVED if kind is LeaseKind.ENGINE else Phase.COMMITTED
        self.expires_at: float | None = None

    def attach(self) -> None:
        """Add its holds to its parents."""
        for node, amount in self.holds:
            node.held += amount
            node.children[self.name] = self

    def detach(self) -> None:
        """Remove its holds from its parents."""
        for node, amount in self.holds:
            node.held -= amount
            del node.children[self.name]

    def change(self, amounts: Sequence[int]) -> None:
        """Change the amounts of its holds."""
        for (node, before), amount in zip(self.holds, amounts, strict=True):
            node.held += amount - before
        self.holds = [(node, amount) for (node, _), amount in zip(self.holds, amounts, strict=True)]
        if self.kind in (LeaseKind.SHARE, LeaseKind.SESSION):
            self.capacity = self.limit = amounts[0]

    def drop_holds_on(self, gone: LedgerNode) -> None:
        """Remove its holds on a device that is gone."""
        self.holds = [(node, amount) for node, amount in self.holds if node is not gone]

    def view(self) -> Lease:
        """A snapshot of the lease."""
        holds = tuple(Hold(node.name, amount) for node, amount in self.holds)
        return Lease(self.name, self.kind, self.owner, self.phase, holds, self.capacity, self.held, self.expires_at)


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
    under = on.kind if isinstance(on, LeaseNode) else None
    allowed = PARENT_KINDS[kind]
    if (under is not None) if allowed is None else (under not in allowed):
        raise LeaseConflict(f"a lease of a {kind} cannot lie on {on.name!r}")
    if isinstance(on, LeaseNode) and on.phase is not Phase.COMMITTED:
        raise LeaseConflict(f"nothing can lie on {on.name!r}: it is {on.phase}")
