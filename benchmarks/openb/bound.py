"""The share of a cluster's GPUs any scheduler leaves unallocated, at least: a linear program's dual, and why it holds.

Let n_t be the pods of type t that have come (or, with departures, how many of them were there on average) and g_t the
thousandths of a GPU a rank of it takes; there are G GPUs. A pattern p is a multiset of ranks that fit on one GPU (the
sum of their g_t is at most 1000); x_p is how many GPUs hold pattern p.

    maximise  sum x_p g(p)   subject to   sum_p x_p <= G,   sum_p x_p count_t(p) <= n_t times its ranks

Claim: no scheduler has more allocated than this program's maximum.
Proof: look at what any scheduler has placed at a moment. Each GPU holds a multiset of ranks that fits it: a pattern, a
    whole-GPU rank being one of 1000. Counting GPUs by pattern gives an x that keeps the first row (each GPU holds one
    pattern) and the others (no pod is placed twice), and its objective is what is allocated. What is left out - that a
    pod's ranks are on one node - only takes placements away. With departures, the average over time of such x is one
    of their convex hull, which keeps the same rows for the average n_t.
Claim: for any y_t >= 0, this is no less than that maximum:
    D = G max_p (g(p) - y(p)) + sum_t n_t y_t
Proof: weak duality. The patterns' maximum is a knapsack over 1000, solved exactly (the empty pattern counts).

So the figure is 1 - D / G with the best multipliers found: columns are generated, and the simplex method's own
multipliers give D at each step. Numeric error of the simplex method can make the bound weaker, never wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import gcd

import numpy as np
from numpy.typing import NDArray

from benchmarks.openb.pods import Node, Pod

GAP = 1e-4  # relative, between the program's value so far and its bound: a hundredth of a percent of the cluster
MAX_ROUNDS = 3000  # the trace needs about 250; a bound that has not closed by then is still one
TOLERANCE = 1e-7  # of a reduced cost or a pivot that counts, in units of one GPU

Array = NDArray[np.float64]


def unallocated_bound(nodes: Sequence[Node], counts: Mapping[Pod, float], device: int = 1000) -> float:
    """The least share of all GPUs that stays unallocated, given how many of each pod there are.

    Args:
        nodes: all of them, with nothing taken; every device has `device` units.
        counts: by pod.
    """
    if not counts:
        return 1.0
    gpus = float(sum(len(node.total) for node in nodes))
    amounts = [device if pod.whole else pod.amount for pod in counts]
    step = gcd(device, *amounts)
    ranks = np.array([count * pod.ranks for pod, count in counts.items()], float)
    most = _maximum(np.array(amounts, float) / device, ranks, np.array(amounts, int) // step, device // step, gpus)
    return max(0.0, 1 - most / gpus)


def _maximum(amount: Array, count: Array, size: NDArray[np.int64], steps: int, gpus: float) -> float:
    """The least D met while columns are generated; amounts and counts by type, `size` in steps of the knapsack."""
    simplex = _Simplex(np.concatenate([[gpus], count]))
    best = gpus  # all multipliers zero: every GPU full
    for _ in range(MAX_ROUNDS):
        duals = simplex.duals()
        price = np.maximum(0, duals[1:])
        value, uses = _best_pattern(amount - price, size, steps)
        best = min(best, float(gpus * value + count @ price))
        if best - simplex.value() <= GAP * best:
            break
        if value - duals[0] > TOLERANCE:
            simplex.enter(np.concatenate([[1.0], uses]), float(uses @ amount))
        for row in np.flatnonzero(duals < -TOLERANCE):  # a row's slack would pay
            simplex.enter(np.eye(len(duals))[row], 0.0)
    return best


def _best_pattern(worth: Array, size: NDArray[np.int64], steps: int) -> tuple[float, Array]:
    """The value of the most valuable pattern, and its ranks by type."""
    sizes = np.unique(size)
    of_size = [np.flatnonzero(size == each) for each in sizes]
    item = [int(group[worth[group].argmax()]) for group in of_size]  # the best of each size
    value = worth[item]
    table = np.zeros(steps + 1)
    chosen = np.full(steps + 1, -1)
    for room in range(1, steps + 1):
        table[room] = table[room - 1]
        fitting = int((sizes <= room).sum())
        if fitting:
            tries = table[room - sizes[:fitting]] + value[:fitting]
            if tries.max() > table[room]:
                chosen[room] = tries.argmax()
                table[room] = tries.max()
    pattern = np.zeros(len(worth))
    room = steps
    while room > 0:
        pick = chosen[room]
        if pick >= 0:
            pattern[item[pick]] += 1
        room -= int(sizes[pick]) if pick >= 0 else 1
    return float(table[steps]), pattern


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
