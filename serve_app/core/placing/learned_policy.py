"""The default policy: the fragment of FGD, of a workload learned from what is asked, and what CPU and memory strand.

FGD ("Beware of Fragmentation", ATC'23) asks whether one more demand fits on a node. This one also asks what is left
when the node fills up: device amounts beyond what its CPU or memory can serve, at the rate the demands seen need them,
are stranded however well they are cut. The score of a place is the increase of the fragment and of half the stranded.

Invariant: with nothing learned the choice is that of best fit.
"""

from __future__ import annotations

from collections.abc import Sequence

from serve_app.core.placing.fragmentation import Workload
from serve_app.core.placing.placement import Demand, Room
from serve_app.core.placing.placement_policies import BestFit, Choice, least_fragment

# Of 0, 1/2 and 1: at 100% demand of the openb trace 1/2 and 1 leave the same, a quarter less than FGD (0); with twenty
# times the trace's multi-GPU pods and departures 1/2 leaves what FGD does, 1 a sixth more.
STRANDED_WEIGHT = 0.5
RELEARN_GROWTH = 2.0  # demands seen since the last time the workload was learned: a share is off by half at worst
MEMORY_DEMANDS = 16_384  # then all counts are halved: what was asked long ago fades, a share is still known to 1%


class Learned:
    """FGD for the demands seen so far, beside the amounts that CPU and memory would strand.

    Args:
        largest_cpu_milli: of any node, for best fit while nothing is known.
        largest_amount: free on any node at first, likewise.
    """

    def __init__(self, largest_cpu_milli: int, largest_amount: int) -> None:
        self.epoch = 0
        self._best_fit = BestFit(largest_cpu_milli, largest_amount)
        self._counts: dict[Demand, float] = {}
        self._seen = 0.0
        self._relearn_at = 1.0
        self._workload = Workload({})
        self._cpu_rate = self._memory_rate = 0.0  # milli-cores and bytes for each unit of a device

    def seen(self, demand: Demand) -> None:
        """Learn from all demands before this one when there are enough new ones, then count this one."""
        if self._seen >= self._relearn_at:
            self._learn()
        self._counts[demand] = self._counts.get(demand, 0.0) + 1.0
        self._seen += 1.0

    def choose(self, room: Room, demand: Demand, eligible: Sequence[int]) -> Choice:
        """The devices where the expected fragment grows least; the score is that, and what is stranded more."""
        if not self._workload:
            return self._best_fit.choose(room, demand, eligible)
        score, devices = least_fragment(self._workload, room, demand, eligible)
        free = sum(room.free)
        taken = sum(room.total[i] for i in devices) if demand.whole else demand.amount * demand.ranks
        before = self._stranded(free, room.cpu, room.memory)
        after = self._stranded(free - taken, room.cpu - demand.cpu_milli, room.memory - demand.memory_bytes)
        return score + STRANDED_WEIGHT * (after - before), devices

    def _stranded(self, free: int, cpu_milli: int, memory_bytes: int) -> float:
        """The amount of free devices beyond what CPU and memory can serve."""
        served = float(free)
        if self._cpu_rate:
            served = min(served, cpu_milli / self._cpu_rate)
        if self._memory_rate:
            served = min(served, memory_bytes / self._memory_rate)
        return free - served

    def _learn(self) -> None:
        if self._seen >= MEMORY_DEMANDS:
            self._counts = {demand: count / 2 for demand, count in self._counts.items() if count >= 1.0}
            self._seen = sum(self._counts.values())
        self._relearn_at = min(self._seen * RELEARN_GROWTH, MEMORY_DEMANDS)
        self._workload = Workload(self._counts)
        on_devices = [(demand, count * demand.groups) for demand, count in self._counts.items() if demand.ranks]
        amount = sum(count * demand.ranks * demand.amount for demand, count in on_devices)
        if amount:
            self._cpu_rate = sum(count * demand.cpu_milli for demand, count in on_devices) / amount
            self._memory_rate = sum(count * demand.memory_bytes for demand, count in on_devices) / amount
        self.epoch += 1
