"""The policies that ours is compared with: first fit, best fit, and FGD with the trace's own distribution.

FGD ("Beware of Fragmentation", Weng et al., USENIX ATC'23): for a demand m drawn from the workload, all of a node's
free GPU amount is fragment when m does not fit there, and of a node where it does, the devices too small for a rank of
m. The pod goes where that grows least. CPU, host memory and GPU models are constraints, as in the paper.

A policy gives a room (a node's free amounts) and its devices a score: the lowest wins, ties go to the node that came
first. A score depends on the room, the pod and the policy's `epoch` alone.

Invariant: the fragment of a node is between zero and what is free of it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from benchmarks.openb.pods import Node, Pod, Room

Choice = tuple[float, tuple[int, ...]]  # a score and the devices it is for


class PodPolicy(Protocol):
    """What ranks the places that fit."""

    @property
    def epoch(self) -> int: ...

    def seen(self, demand: Pod) -> None:
        """A demand has been asked for, whether it fits or not."""

    def choose(self, room: Room, demand: Pod, eligible: Sequence[int]) -> Choice:
        """The best devices of a room that one group fits on, `eligible` being those a rank fits on."""


class BestFit:
    """The node left with least: the mean of CPU and device amounts left, each a share of the largest node's."""

    epoch = 0

    def __init__(self, largest_cpu_milli: int, largest_amount: int) -> None:
        self._cpu = max(1, largest_cpu_milli)
        self._amount = max(1, largest_amount)

    def seen(self, demand: Pod) -> None:
        """Nothing is learned."""

    def choose(self, room: Room, demand: Pod, eligible: Sequence[int]) -> Choice:
        devices = tightest(room, demand, eligible)
        taken = sum(room.total[i] for i in devices) if demand.whole else demand.amount * demand.ranks
        left = (sum(room.free) - taken) / self._amount + (room.cpu - demand.cpu_milli) / self._cpu
        return left / 2, devices


def tightest(room: Room, demand: Pod, eligible: Sequence[int]) -> tuple[int, ...]:
    """The devices with least that is enough."""
    free = room.free
    return tuple(sorted(eligible, key=lambda i: free[i])[: demand.ranks])


def least_fragment(workload: TraceWorkload, room: Room, demand: Pod, eligible: Sequence[int]) -> Choice:
    """The increase of expected fragment, and the devices where it is least.

    A group of several ranks, or of whole devices, takes the tightest ones; one rank tries each amount there is.
    """
    usable = workload.usable
    free = room.free
    model = room.model
    cpu = room.cpu - demand.cpu_milli
    memory = room.memory - demand.memory_bytes
    before = usable(free, room.total, room.cpu, room.memory, model)
    if demand.ranks == 1 and not demand.whole:
        tries: list[tuple[int, ...]] = [(i,) for i in {free[i]: i for i in reversed(eligible)}.values()]
    else:
        tries = [tightest(room, demand, eligible)]
    best: Choice | None = None
    for devices in tries:
        after = free.copy()
        for i in devices:
            after[i] -= room.total[i] if demand.whole else demand.amount
        taken = sum(free) - sum(after)
        score = before - usable(after, room.total, cpu, memory, model) - taken
        if best is None or score < best[0]:
            best = (score, devices)
    assert best is not None  # one group fits here
    return best


@dataclass(frozen=True, slots=True)
class _Row:
    """What of the workload fits in some CPU, memory and GPU model, by the amount a device would need."""

    single: tuple[float, ...]  # demands of one rank and a fraction: weight of those up to each amount
    whole: tuple[float, ...]  # demands of one whole device, likewise
    groups: tuple[tuple[int, bool, tuple[float, ...]], ...]  # more ranks: amount, whole, weight by devices there are


class TraceWorkload:
    """The demands to expect and how likely each is; immutable.

    Args:
        weights: of demands, any sum; a pipeline counts as its groups. None above zero: nothing is expected.
    """

    def __init__(self, weights: Mapping[Pod, float]) -> None:
        total = sum(weight * demand.groups for demand, weight in weights.items())
        self._demands = [(d, w * d.groups / total) for d, w in weights.items() if w > 0]
        self._cpus = sorted({d.cpu_milli for d, _ in self._demands})
        self._memories = sorted({d.memory_bytes for d, _ in self._demands})
        self._amounts = sorted({d.amount for d, _ in self._demands if d.ranks == 1 and not d.whole})
        self._wholes = sorted({d.amount for d, _ in self._demands if d.ranks == 1 and d.whole})
        self._rows: dict[tuple[int, int, str], _Row] = {}

    def usable(self, free: Sequence[int], total: Sequence[int], cpu_milli: int, memory_bytes: int, model: str) -> float:
        """The expected amount of a node's free devices that is no fragment."""
        row = self._row(cpu_milli, memory_bytes, model)
        single = row.single
        whole = row.whole
        amounts = self._amounts
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

    def _row(self, cpu_milli: int, memory_bytes: int, model: str) -> _Row:
        """Memory and CPU matter only as which demands they are enough for: a table of few rows, built as they occur."""
        key = (bisect_right(self._cpus, cpu_milli), bisect_right(self._memories, memory_bytes), model)
        row = self._rows.get(key)
        if row is None:
            row = self._rows[key] = self._build(cpu_milli, memory_bytes, model)
        return row

    def _build(self, cpu_milli: int, memory_bytes: int, model: str) -> _Row:
        single = [0.0] * len(self._amounts)
        whole = [0.0] * len(self._wholes)
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


class FirstFit:
    """The first node in the cluster's order."""

    epoch = 0

    def seen(self, demand: Pod) -> None:
        """Nothing is learned."""

    def choose(self, room: Room, demand: Pod, eligible: Sequence[int]) -> Choice:
        return 0.0, tuple(eligible[: demand.ranks])


class Fgd:
    """Fragmentation Gradient Descent: the place that adds least to the fragment expected of the workload."""

    epoch = 0

    def __init__(self, workload: TraceWorkload) -> None:
        self._workload = workload

    def seen(self, demand: Pod) -> None:
        """The workload was given."""

    def choose(self, room: Room, demand: Pod, eligible: Sequence[int]) -> Choice:
        return least_fragment(self._workload, room, demand, eligible)
