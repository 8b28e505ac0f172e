"""Which devices an engine gets: those where the fragment of FGD grows least, of a workload learned from what is asked.

FGD ("Beware of Fragmentation", ATC'23) is given its workload; this one learns it. While nothing is known it is best
fit: the node left with least, the devices with least that is enough.
"""

from __future__ import annotations

from collections.abc import Sequence

from serve_app.core.placement.fragmentation import Demand, Free, Workload

RELEARN_GROWTH = 2.0  # demands seen since the last time the workload was learned: a share is off by half at worst
MEMORY_DEMANDS = 16_384  # then all counts are halved: what was asked long ago fades, a share is still known to 1%

Choice = tuple[float, tuple[int, ...]]  # a score, of which the lowest is the best, and the devices it is for


class Policy:
    """What has been asked for so far, and the choice that follows from it."""

    def __init__(self) -> None:
        self.workload = Workload({})
        self._counts: dict[Demand, float] = {}
        self._seen = 0.0
        self._relearn_at = 1.0

    def seen(self, demand: Demand) -> None:
        """A demand is asked for: learn from all before it when there are enough new ones, then count it."""
        if self._seen >= self._relearn_at:
            self._learn()
        self._counts[demand] = self._counts.get(demand, 0.0) + 1.0
        self._seen += 1.0

    def choose(self, free: Free, ranks: int, amount: int) -> Choice | None:
        """The best devices of a node for some ranks; None: they do not fit there.

        Several ranks take the tightest devices; one tries each amount there is.
        """
        devices = tightest(free, ranks, amount)
        if devices is None:
            return None
        if not self.workload:
            return float(sum(free) - ranks * amount), devices
        if ranks > 1:
            return self._growth(free, devices, amount), devices
        tries = {have: (index,) for index, have in reversed(list(enumerate(free))) if have >= amount}
        return min(((self._growth(free, one, amount), one) for one in tries.values()), key=lambda choice: choice[0])

    def _growth(self, free: Free, devices: Sequence[int], amount: int) -> float:
        """By how much the expected fragment grows."""
        after = list(free)
        for index in devices:
            after[index] -= amount
        return self.workload.usable(free) - self.workload.usable(after) - len(devices) * amount

    def _learn(self) -> None:
        if self._seen >= MEMORY_DEMANDS:
            self._counts = {demand: count / 2 for demand, count in self._counts.items() if count >= 1.0}
            self._seen = sum(self._counts.values())
        self._relearn_at = min(self._seen * RELEARN_GROWTH, MEMORY_DEMANDS)
        self.workload = Workload(self._counts)


def tightest(free: Free, ranks: int, amount: int) -> tuple[int, ...] | None:
    """The devices with least that is enough; None: there are too few."""
    fits = sorted((index for index, have in enumerate(free) if have >= amount), key=lambda index: free[index])
    return tuple(fits[:ranks]) if len(fits) >= ranks else None
