"""The tree that leases of GPU memory make: nodes with a capacity, and what lies on them.

Invariant: `held` of a node is the sum of what its children hold of it.
"""

from __future__ import annotations

from collections.abc import Sequence

from serve_app.core.memory.leases import LIES_ON, Hold, Kind, Lease, Phase
from serve_app.errors import InsufficientMemory, LeaseConflict


class Node:
    """Something leases lie on: a device, or a lease. `limit` is what may be reserved of its capacity; the rest is for
    growth."""

    __slots__ = ("capacity", "children", "held", "limit", "name")

    def __init__(self, name: str, capacity: int) -> None:
        self.name = name
        self.capacity = self.limit = capacity
        self.held = 0
        self.children: dict[str, LeaseNode] = {}

    def free(self, *, growth: bool) -> int:
        """What can still be taken, with what is kept for growth or without."""
        return max(0, (self.capacity if growth else self.limit) - self.held)

    def check(self, amount: int, *, growth: bool) -> None:
        """Raises InsufficientMemory, with the figures."""
        free = self.free(growth=growth)
        if amount > free:
            raise InsufficientMemory(f"{self.name}: {amount} asked, {free} of {self.capacity} free")


class LeaseNode(Node):
    """A lease, and what lies on it."""

    __slots__ = ("expires_at", "holds", "kind", "owner", "phase")

    def __init__(self, name: str, kind: Kind, owner: str, holds: list[tuple[Node, int]]) -> None:
        super().__init__(name, holds[0][1] if kind in (Kind.SHARE, Kind.SESSION) else 0)
        self.kind = kind
        self.owner = owner
        self.holds = holds
        self.phase = Phase.RESERVED if kind is Kind.ENGINE else Phase.COMMITTED
        self.expires_at: float | None = None

    def attach(self) -> None:
        """Take what it holds."""
        for node, amount in self.holds:
            node.held += amount
            node.children[self.name] = self

    def detach(self) -> None:
        """Give back what it holds."""
        for node, amount in self.holds:
            node.held -= amount
            del node.children[self.name]

    def change(self, amounts: Sequence[int]) -> None:
        """Hold other amounts of the same nodes."""
        for (node, before), amount in zip(self.holds, amounts, strict=True):
            node.held += amount - before
        self.holds = [(node, amount) for (node, _), amount in zip(self.holds, amounts, strict=True)]
        if self.kind in (Kind.SHARE, Kind.SESSION):
            self.capacity = self.limit = amounts[0]

    def let_go_of(self, gone: Node) -> None:
        """A device is no more, and what it held there neither."""
        self.holds = [(node, amount) for node, amount in self.holds if node is not gone]

    def view(self) -> Lease:
        """The lease as it is now."""
        holds = tuple(Hold(node.name, amount) for node, amount in self.holds)
        return Lease(self.name, self.kind, self.owner, self.phase, holds, self.capacity, self.held, self.expires_at)


def check_holds(kind: Kind, holds: Sequence[Hold]) -> None:
    """What can be said of the holds of a lease without looking at the nodes.

    Raises:
        LeaseConflict: two ranks of an engine on one device.
        ValueError: none, too many, or one that is not above zero.
    """
    if not holds or (kind is not Kind.ENGINE and len(holds) > 1):
        where = {Kind.ENGINE: "devices", Kind.BERTH: "one device"}.get(kind, "one other lease")
        raise ValueError(f"a lease of a {kind} lies on {where}")
    for hold in holds:
        if hold.amount <= 0:
            raise ValueError(f"{hold.on}: {hold.amount} asked")
    if len({hold.on for hold in holds}) < len(holds):
        raise LeaseConflict("two ranks of one engine cannot be on one device")


def check_may_lie(kind: Kind, on: Node) -> None:
    """Raises LeaseConflict when a lease of this kind cannot lie on this node, by what it is or how far it is."""
    under = on.kind if isinstance(on, LeaseNode) else None
    allowed = LIES_ON[kind]
    if (under is not None) if allowed is None else (under not in allowed):
        raise LeaseConflict(f"a lease of a {kind} cannot lie on {on.name!r}")
    if isinstance(on, LeaseNode) and on.phase is not Phase.COMMITTED:
        raise LeaseConflict(f"nothing can lie on {on.name!r}: it is {on.phase}")
