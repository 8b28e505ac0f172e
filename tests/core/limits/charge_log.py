"""What was charged, noted by itself, to be checked over every window."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class ChargeLog:
    """What was charged and refunded of one pool, in order of time, and the largest excess over all windows."""

    burst: float
    rate: float
    entries: list[tuple[float, float]] = field(default_factory=list)

    def excess(self) -> float:
        """The most by which any window had more charged than burst + rate x t. One pass: the best window that ends
        here begins where charged - rate x time was lowest."""
        total = 0.0
        lowest = float("inf")
        worst = 0.0
        for at, amount in sorted(self.entries, key=lambda entry: entry[0]):
            lowest = min(lowest, total - self.rate * at)
            total += amount
            worst = max(worst, total - self.rate * at - lowest - self.burst)
        return worst

    def excess_by_brute_force(self) -> float:
        """The same, of every window by itself."""
        entries = sorted(self.entries, key=lambda entry: entry[0])
        worst = 0.0
        for first, (begin, _) in enumerate(entries):
            total = 0.0
            for at, amount in entries[first:]:
                total += amount
                worst = max(worst, total - self.burst - self.rate * (at - begin))
        return worst

    def excess_with_late_refunds(self, late_s: float) -> float:
        """The same where the pool may learn of a refund so much later: charges of a window that begins in between may
        be made of it."""
        entries = sorted(self.entries, key=lambda entry: entry[0])
        worst = 0.0
        for first, (begin, _) in enumerate(entries):
            total = sum(amount for at, amount in entries[:first] if amount < 0 and at >= begin - late_s)
            for at, amount in entries[first:]:
                total += amount
                worst = max(worst, total - self.burst - self.rate * (at - begin))
        return worst
