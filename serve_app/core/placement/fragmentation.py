"""How much free memory is unusable (fragment), as an expectation over demands: bytes to decide by, a ratio to display.

A single device has no fragmentation: any of its free bytes serve any rank. Free bytes are unusable on devices that have
too few of them for a rank, so the fragment depends on the demand: four empty GPUs are fully usable for a model of one
GPU, and the free halves of four half-empty GPUs are unusable for a model that needs three quarters of one.

The expectation is that of FGD ("Beware of Fragmentation", Weng et al., USENIX ATC'23): for a demand m drawn from the
workload, all free bytes of a node are fragment if m does not fit there; if it fits, those of the devices too small for
a rank of m are. CPU and host memory are left to Ray, which offers only nodes that have enough of them.

Invariant: the fragment of a node is between zero and its free bytes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

FreeBytes = Sequence[int]  # free bytes of each device of a node


@dataclass(frozen=True, slots=True)
class Demand:
    """What an engine needs: on one node, `ranks` devices with `amount` bytes free; `groups` times (pipeline stages).

    Raises:
        ValueError: a figure that is not above zero.
    """

    ranks: int
    amount: int
    groups: int = 1

    def __post_init__(self) -> None:
        if min(self.ranks, self.amount, self.groups) < 1:
            raise ValueError(f"out of range: {self}")


class Workload:
    """The expected demands and their probabilities; immutable.

    Args:
        weights: of demands, with any sum; a pipeline counts once per group. If none is above zero, no demand is
            expected.
    """

    def __init__(self, weights: Mapping[Demand, float]) -> None:
        total = sum(weight * demand.groups for demand, weight in weights.items())
        by_ranks: dict[int, dict[int, float]] = {}  # weights by amount
        for demand, weight in weights.items():
            if weight > 0:
                amounts = by_ranks.setdefault(demand.ranks, {})
                amounts[demand.amount] = amounts.get(demand.amount, 0.0) + weight * demand.groups / total
        single = sorted(by_ranks.pop(1, {}).items())
        self._amounts = [amount for amount, _ in single]
        # Sum of the weights of the first 0, 1, 2, ... amounts.
        self._cumulative_weights = [
            0.0,
            *accumulate(weight for _, weight in single),
        ]
        self._groups = [(ranks, *one) for ranks, amounts in by_ranks.items() for one in amounts.items()]

    def __bool__(self) -> bool:
        return bool(self._amounts or self._groups)

    def usable(self, free: FreeBytes) -> float:
        """The expected free bytes of a node that are no fragment."""
        sum_ = 0.0
        for have in free:
            sum_ += have * self._cumulative_weights[bisect_right(self._amounts, have)]
        for ranks, amount, weight in self._groups:
            wide = [have for have in free if have >= amount]
            if len(wide) >= ranks:
                sum_ += sum(wide) * weight
        return sum_

    def fragmentation(self, nodes: Sequence[FreeBytes]) -> float:
        """The part of the nodes' free bytes that the expected demand cannot use; 0 if nothing is free or no demand is
        expected."""
        free = sum(map(sum, nodes))
        return 1 - sum(map(self.usable, nodes)) / free if free and self else 0.0
