"""How much of what is free is of no use, as an expectation over demands: for a decision an amount, for the eye a ratio.

Within a device nothing is fragmented: any of its free bytes serve any rank. What is lost is what is free on devices
that have too little of it, so it depends on who asks: four empty GPUs are whole for a model of one, and each half of
four half-empty ones is of no use to a model that needs three quarters.

The expectation is that of FGD ("Beware of Fragmentation", Weng et al., USENIX ATC'23): for a demand m drawn from the
workload, all of a node's free GPU amount is fragment when m does not fit there, and of a node where it does, the
devices too small for a rank of m.

Invariant: the fragment of a node is between zero and what is free of it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from serve_app.core.placing.placement import Demand, Node


@dataclass(frozen=True, slots=True)
class _Row:
    """What of the workload fits in some CPU, memory and GPU model, by the amount a device would need."""

    single: tuple[float, ...]  # demands of one rank and a fraction: weight of those up to each amount
    whole: tuple[float, ...]  # demands of one whole device, likewise
    groups: tuple[tuple[int, bool, tuple[float, ...]], ...]  # more ranks: amount, whole, weight by devices there are


class Workload:
    """The demands to expect and how likely each is; immutable.

    Args:
        weights: of demands, any sum; a pipeline counts as its groups. None above zero: nothing is expected.
    """

    def __init__(self, weights: Mapping[Demand, float]) -> None:
        total = sum(weight * demand.groups for demand, weight in weights.items())
        self._demands = [(d, w * d.groups / total) for d, w in weights.items() if w > 0]
        self._cpus = sorted({d.cpu_milli for d, _ in self._demands})
        self._memories = sorted({d.memory_bytes for d, _ in self._demands})
        self._amounts = sorted({d.amount for d, _ in self._demands if d.ranks == 1 and not d.whole})
        self._wholes = sorted({d.amount for d, _ in self._demands if d.ranks == 1 and d.whole})
        self._rows: dict[tuple[int, int, str], _Row] = {}

    def __bool__(self) -> bool:
        return bool(self._demands)

    def usable(self, free: Sequence[int], total: Sequence[int], cpu_milli: int, memory_bytes: int, model: str) -> float:
        """The expected amount of a node's free devices that is no fragment."""
        row = self._row(cpu_milli, memory_bytes, model)
        single, whole, amounts = row.single, row.whole, self._amounts
        sum_ = 0.0
        for have, size in zip(free, total, strict=True):
            if have:
                weight = single[bisect_right(amounts, have)]
                if have == size:
                    weight += whole[bisect_right(self._wholes, have)]
                sum_ += have * weight
        for amount, is_whole, weights in row.groups:
            fits = [f for f, t in zip(free, total, strict=True) if f >= amount and (f == t or not is_whole)]
            sum_ += sum(fits) * weights[min(len(fits), len(weights) - 1)]
        return sum_

    def fragment(self, node: Node) -> float:
        """F_n(M) of the paper: the expected amount of a node's free devices that is fragment."""
        usable = self.usable(node.free, node.total, node.cpu_milli, node.memory_bytes, node.model)
        return sum(node.free) - usable

    def fragmentation(self, nodes: Sequence[Node]) -> float:
        """The part of what is free of some nodes that the expected demand cannot use; 0 when nothing is free, or
        nothing expected."""
        free = sum(sum(node.free) for node in nodes)
        return sum(map(self.fragment, nodes)) / free if free and self else 0.0

    def _row(self, cpu_milli: int, memory_bytes: int, model: str) -> _Row:
        """Memory and CPU matter only as which demands they are enough for: a table of few rows, built as they occur."""
        key = (bisect_right(self._cpus, cpu_milli), bisect_right(self._memories, memory_bytes), model)
        row = self._rows.get(key)
        if row is None:
            row = self._rows[key] = self._build(cpu_milli, memory_bytes, model)
        return row

    def _build(self, cpu_milli: int, memory_bytes: int, model: str) -> _Row:
        single, whole = [0.0] * len(self._amounts), [0.0] * len(self._wholes)
        groups: dict[tuple[int, bool], dict[int, float]] = {}
        for demand, weight in self._demands:
            if demand.cpu_milli > cpu_milli or demand.memory_bytes > memory_bytes or not demand.allows(model):
                continue
            if demand.ranks > 1:
                by_ranks = groups.setdefault((demand.amount, demand.whole), {})
                by_ranks[demand.ranks] = by_ranks.get(demand.ranks, 0.0) + weight
            elif demand.ranks and demand.whole:
                whole[self._wholes.index(demand.amount)] += weight
            elif demand.ranks:
                single[self._amounts.index(demand.amount)] += weight
        return _Row(
            single=_cumulative(single),
            whole=_cumulative(whole),
            groups=tuple(
                (a, w, _cumulative([by.get(n + 1, 0.0) for n in range(max(by))])) for (a, w), by in groups.items()
            ),
        )


def _cumulative(weights: Iterable[float]) -> tuple[float, ...]:
    """Sums of the first none, one, two, ... of them."""
    sums = [0.0]
    for weight in weights:
        sums.append(sums[-1] + weight)
    return tuple(sums)
