"""How much of what is free is of no use, as an expectation over demands: for a decision an amount, for the eye a ratio.

Within a device nothing is fragmented: any of its free bytes serve any rank. What is lost is what is free on devices
that have too little of it, so it depends on who asks: four empty GPUs are whole for a model of one, and each half of
four half-empty ones is of no use to a model that needs three quarters.

The expectation is that of FGD ("Beware of Fragmentation", Weng et al., USENIX ATC'23): for a demand m drawn from the
workload, all of a node's free bytes are fragment when m does not fit there, and of a node where it does, those of the
devices too small for a rank of m. CPU and host memory are Ray's to look at: it offers only nodes that have them.

Invariant: the fragment of a node is between zero and what is free of it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

Free = Sequence[int]  # bytes free of each device of a node


@dataclass(frozen=True, slots=True)
class Demand:
    """What an engine needs: on a node, this many devices with this many bytes free; that for each stage of a pipeline.

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
    """The demands to expect and how likely each is; immutable.

    Args:
        weights: of demands, any sum; a pipeline counts as its groups. None above zero: nothing is expected.
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
        self._up_to = [0.0, *accumulate(weight for _, weight in single)]  # weight of the first none, one, two, ...
        self._groups = [(ranks, *one) for ranks, amounts in by_ranks.items() for one in amounts.items()]

    def __bool__(self) -> bool:
        return bool(self._amounts or self._groups)

    def usable(self, free: Free) -> float:
        """The expected amount of a node's free devices that is no fragment."""
        sum_ = 0.0
        for have in free:
            sum_ += have * self._up_to[bisect_right(self._amounts, have)]
        for ranks, amount, weight in self._groups:
            wide = [have for have in free if have >= amount]
            if len(wide) >= ranks:
                sum_ += sum(wide) * weight
        return sum_

    def fragmentation(self, nodes: Sequence[Free]) -> float:
        """The part of what is free of some nodes that the expected demand cannot use; 0 when nothing is free, or
        nothing expected."""
        free = sum(map(sum, nodes))
        return 1 - sum(map(self.usable, nodes)) / free if free and self else 0.0
