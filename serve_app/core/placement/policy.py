"""Which devices an engine gets: those where the expected fragment of FGD grows least, for a workload learned by use.

FGD ("Beware of Fragmentation", ATC'23) is given its workload; this policy learns it from demands. Before the first is
learned, the policy is best fit: the node with least left over, the smallest free devices that are enough.
"""

from __future__ import annotations

from collections.abc import Sequence

from serve_app.core.placement.fragmentation import Demand, FreeBytes, Workload

RELEARN_GROWTH = 2.0  # the workload is learned again when demands have doubled: a share is off by half at worst
MEMORY_DEMANDS = 16_384  # then all counts are halved: old demands fade, and a share is still known to 1%

ScoredDevices = tuple[float, tuple[int, ...]]  # the score of devices (the lowest is the best), and the devices


class PlacementPolicy:
    """The demands so far, and the choice of devices that follows from them."""

    def __init__(self) -> None:
        self.workload = Workload({})
        self._counts: dict[Demand, float] = {}
        self._demand_count = 0.0
        self._relearn_at = 1.0

    def observe(self, demand: Demand) -> None:
        """Learn the workload from all earlier demands if enough of them are new, then count this demand."""
        if self._demand_count >= self._relearn_at:
            self._learn()
        self._counts[demand] = self._counts.get(demand, 0.0) + 1.0
        self._demand_count += 1.0

    def choose(self, free: FreeBytes, ranks: int, amount: int) -> ScoredDevices | None:
        """The best devices of a node for `ranks` ranks of `amount` bytes; None: they do not fit there.

        Several ranks take the tightest devices; for one rank, each distinct amount of free bytes is tried.
        """
        devices = tightest_fit(free, ranks, amount)
        if devices is None:
            return None
        if not self.workload:
            return float(sum(free) - ranks * amount), devices
        if ranks > 1:
            return self._fragment_growth(free, devices, amount), devices
        tries = {have: (index,) for index, have in reversed(list(enumerate(free))) if have >= amount}
        return min(
            ((self._fragment_growth(free, one, amount), one) for one in tries.values()), key=lambda choice: choice[0]
        )

    def _fragment_growth(self, free: FreeBytes, devices: Sequence[int], amount: int) -> float:
        """By how many bytes the expected fragment grows if these devices are taken."""
        after = list(free)
        for index in devices:
            after[index] -= amount
        return self.workload.usable(free) - self.workload.usable(after) - len(devices) * amount

    def _learn(self) -> None:
        if self._demand_count >= MEMORY_DEMANDS:
            self._counts = {demand: count / 2 for demand, count in self._counts.items() if count >= 1.0}
            self._demand_count = sum(self._counts.values())
        self._relearn_at = min(self._demand_count * RELEARN_GROWTH, MEMORY_DEMANDS)
        self.workload = Workload(self._counts)


def tightest_fit(free: FreeBytes, ranks: int, amount: int) -> tuple[int, ...] | None:
    """The `ranks` devices with the fewest free bytes that are enough; None: there are too few of them."""
    fits = sorted((index for index, have in enumerate(free) if have >= amount), key=lambda index: free[index])
    return tuple(fits[:ranks]) if len(fits) >= ranks else None
