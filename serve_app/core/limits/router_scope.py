"""What a router has of one scope of limits.

Invariant: what a request was not charged, because its scope had no such limit then, does not come back with its end.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from serve_app.core.limits.messages import UNHEARD, Version
from serve_app.core.limits.policy import ALLOWANCES, NOTHING, Amounts, Kind, Limits

MEAN_S = 0.25  # of a request, before one has ended: a client that comes too early waits, one too late wastes a slot


@dataclass(slots=True)
class RouterScope:
    """One scope.

    Args:
        account: the credit; of the concurrency it is below zero by the requests that run without a slot.
        spent: since the last report.
        refund: to give back; negative: a debt.
    """

    limits: Limits
    capacities: dict[Kind, float]
    account: list[float] = field(default_factory=lambda: list(NOTHING))
    spent: list[float] = field(default_factory=lambda: list(NOTHING))
    refund: list[float] = field(default_factory=lambda: list(NOTHING))
    in_use: int = 0  # by requests
    version: Version = UNHEARD
    level: Amounts = NOTHING
    left: Amounts | None = None  # of all routers, at `last_seen`
    last_seen: float = 0.0
    is_near: bool = False
    slots_kept: int = 0
    mean_s: float = MEAN_S
    used_at: float = 0.0

    def has(self, need: Amounts) -> bool:
        for kind in self.capacities:  # noqa: SIM110 - a third of the cost of a generator
            if self.account[kind] < need[kind]:
                return False
        return True

    def change(self, limits: Limits) -> None:
        """Take over changed limits, without any credit. Requests that run take no slots of a new concurrency."""
        if limits.max_concurrent is None:
            self.account[Kind.CONCURRENT] = 0.0
        elif Kind.CONCURRENT not in self.capacities:
            self.account[Kind.CONCURRENT] = -float(self.in_use)
        self.limits = limits
        self.capacities = limits.capacities()

    def charged(self, limits: Limits, need: Amounts, used: Amounts) -> Amounts:
        """What a request of these limits was charged. An allowance that came while it ran has its use at its end, since
        the store does not know it; other limits count it as charged by its use."""
        if limits is self.limits or limits == self.limits:
            return need
        had = limits.capacities()
        return tuple(need[kind] if kind in had else 0.0 if kind in ALLOWANCES else used[kind] for kind in Kind)

    def held(self) -> Amounts:
        """The account, with the concurrency that requests hold."""
        held = list(self.account)
        if Kind.CONCURRENT in self.capacities:
            held[Kind.CONCURRENT] += self.in_use
        return tuple(held)
