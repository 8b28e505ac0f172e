"""The share of a cluster's GPUs any scheduler leaves unallocated, at least: a linear program's dual, and why it holds.

Let n_t be the demands of type t that have come (or, with departures, how many of them were there on average), g_t the
thousandths of a GPU a rank of it takes, c_t the CPU a rank of it needs (a pod's CPU shared among its ranks). Merge
nodes of the same CPU per GPU into a class with G_c GPUs and C_c CPU. A pattern p is a multiset of ranks that fit on one
GPU (the sum of their g_t is at most 1000); x_cp is how many GPUs of class c hold pattern p.

    maximise  sum x_cp g(p)   subject to   sum_p x_cp <= G_c,   sum_p x_cp c(p) <= C_c,   sum_cp x_cp count_t(p) <= n_t

Claim: no scheduler has more allocated than this program's maximum.
Proof: look at what any scheduler has placed at a moment. Each GPU holds a multiset of ranks that fits it: a pattern, a
    whole-GPU rank being one of 1000. Counting GPUs by class and pattern gives an x that keeps the first rows (each GPU
    holds one pattern), the second (each node's CPU is kept, so is the sum over a class) and the third (no demand is
    placed twice), and its objective is what is allocated. What is left out - host memory, that a pod's ranks are on one
    node, that CPU is per node, CPU of pods without GPU - only takes placements away. With departures, the average over
    time of such x is one of their convex hull, which keeps the same rows for the average n_t.
Claim: for any lam_c, y_t >= 0, this is no less than that maximum:
    D = sum_c [G_c max_p (g(p) - lam_c c(p) - y(p)) + lam_c C_c] + sum_t n_t y_t
Proof: weak duality. The patterns' maximum is a knapsack over 1000, solved exactly (the empty pattern counts).

So the figure is 1 - D / GPUs with the best multipliers found: columns are generated, and the simplex method's own
multipliers give D at each step. Numeric error of the simplex method can make the bound weaker, never wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd

import numpy as np
from numpy.typing import NDArray

from benchmarks.openb.pods import Node, Pod

GAP = 1e-4  # relative, between the program's value so far and its bound: a hundredth of a percent of the cluster
MAX_ROUNDS = 3000  # the trace needs about 250; a bound that has not closed by then is still one
TOLERANCE = 1e-7  # of a reduced cost or a pivot that counts, in units of one GPU

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class _Program:
    """The program's data: `amount` and `size` (in steps of the knapsack) by type, CPU and GPUs by class."""

    amount: Array
    cpu: Array
    count: Array
    size: NDArray[np.int64]
    class_gpus: Array
    class_cpu: Array
    steps: int


def unallocated_bound(nodes: Sequence[Node], counts: Mapping[Pod, float], device: int = 1000) -> float:
    """The least share of all GPUs that stays unallocated, given how many of each demand there are.

    Args:
        nodes: all of them, with nothing taken; every device has `device` units.
        counts: by demand; those without a rank do not matter.
    """
    program = _program(nodes, counts, device)
    gpus = float(program.class_gpus.sum())
    if not len(program.count):
        return 1.0
    return max(0.0, 1 - _maximum(program) / gpus)


def _program(nodes: Sequence[Node], counts: Mapping[Pod, float], device: int) -> _Program:
    kinds = [demand for demand in counts if demand.ranks]
    amounts = [device if demand.whole else demand.amount for demand in kinds]
    step = gcd(device, *amounts)
    classes: dict[float, tuple[float, float]] = {}
    for node in nodes:
        if node.total:
            share = node.cpu_milli / len(node.total)
            cpu, gpus = classes.get(share, (0.0, 0.0))
            classes[share] = (cpu + node.cpu_milli / 1000, gpus + len(node.total))
    return _Program(
        amount=np.array(amounts, float) / device,
        cpu=np.array([demand.cpu_milli / demand.ranks / 1000 for demand in kinds]),
        count=np.array([counts[demand] * demand.ranks for demand in kinds], float),
        size=np.array(amounts, int) // step,
        class_gpus=np.array([gpus for _, gpus in classes.values()]),
        class_cpu=np.array([cpu for cpu, _ in classes.values()]),
        steps=device // step,
    )


def _maximum(program: _Program) -> float:
    """The least D met while columns are generated."""
    classes = len(program.class_gpus)
    simplex = _Simplex(np.concatenate([program.class_gpus, program.class_cpu, program.count]))
    best = float(program.class_gpus.sum())  # all multipliers zero: every GPU full
    for _ in range(MAX_ROUNDS):
        duals = simplex.duals()
        cpu_price = np.maximum(0, duals[classes : 2 * classes])
        price = np.maximum(0, duals[2 * classes :])
        worth = program.amount - cpu_price[:, None] * program.cpu - price
        values, patterns = _best_patterns(worth, program.size, program.steps)
        best = min(best, float(program.class_gpus @ values + program.class_cpu @ cpu_price + program.count @ price))
        if best - simplex.value() <= GAP * best:
            break
        gains = [(value - duals[c], c) for c, value in enumerate(values) if value - duals[c] > TOLERANCE]
        for _, c in sorted(gains, reverse=True):
            uses = patterns[c]
            column = np.concatenate([np.zeros(2 * classes), uses])
            column[c] = 1
            column[classes + c] = uses @ program.cpu
            simplex.enter(column, float(uses @ program.amount))
        for row in np.flatnonzero(duals < -TOLERANCE):  # a row's slack would pay
            simplex.enter(np.eye(len(duals))[row], 0.0)
    return best


def _best_patterns(worth: Array, size: NDArray[np.int64], steps: int) -> tuple[Array, Array]:
    """For each class (row of `worth`) the value of the most valuable pattern, and its ranks by type."""
    classes, kinds = worth.shape
    sizes = np.unique(size)
    of_size = [np.flatnonzero(size == each) for each in sizes]
    item = np.stack([group[worth[:, group].argmax(axis=1)] for group in of_size], axis=1)  # the best of each size
    value = np.take_along_axis(worth, item, axis=1)
    table = np.zeros((steps + 1, classes))
    chosen = np.full((steps + 1, classes), -1)
    for room in range(1, steps + 1):
        table[room] = table[room - 1]
        fitting = int((sizes <= room).sum())
        if fitting:
            tries = table[room - sizes[:fitting]] + value[:, :fitting].T
            better = tries.max(axis=0) > table[room]
            chosen[room] = np.where(better, tries.argmax(axis=0), -1)
            table[room] = np.where(better, tries.max(axis=0), table[room])
    patterns = np.zeros((classes, kinds))
    for c in range(classes):
        room = steps
        while room > 0:
            pick = chosen[room, c]
            if pick >= 0:
                patterns[c, item[c, pick]] += 1
            room -= int(sizes[pick]) if pick >= 0 else 1
    return table[steps], patterns


class _Simplex:
    """The revised simplex method for maximise w x, A x <= limits, x >= 0, its columns given one at a time."""

    def __init__(self, limits: Array) -> None:
        self._inverse = np.eye(len(limits))
        self._weights = np.zeros(len(limits))  # of the basis, which starts as the slacks
        self._levels = limits.astype(float)

    def duals(self) -> Array:
        return self._weights @ self._inverse

    def value(self) -> float:
        return float(self._weights @ self._levels)

    def enter(self, column: Array, weight: float) -> None:
        """Bring a column into the basis if it pays."""
        if weight - float(self.duals() @ column) <= TOLERANCE:
            return
        direction = self._inverse @ column
        rising = direction > TOLERANCE
        if not rising.any():
            return
        ratios = np.where(rising, self._levels / np.where(rising, direction, 1.0), np.inf)
        leaving = int(ratios.argmin())
        step = float(ratios[leaving])
        self._levels = np.maximum(0.0, self._levels - step * direction)
        self._levels[leaving] = step
        pivot = self._inverse[leaving] / direction[leaving]
        self._inverse -= np.outer(direction, pivot)
        self._inverse[leaving] = pivot
        self._weights[leaving] = weight
