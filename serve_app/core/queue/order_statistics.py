"""The rank of a key in an ordered set; keys are mostly added at the end and removed anywhere.

Invariant: no run is empty or longer than `MAX_RUN`; keys rise within each run and from run to run.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort

MAX_RUN = 512  # keys; a change inside a run moves at most as many machine words, and 100,000 keys are about 200 runs

OrderKey = tuple[float, int]


class OrderStatistics:
    """Ordered keys with their rank. `add` at the end is O(1), all else O(log n); `rank` also passes over the runs."""

    __slots__ = ("_run_starts", "_runs")

    def __init__(self) -> None:
        self._runs: list[list[OrderKey]] = []
        self._run_starts: list[OrderKey] = []

    @property
    def first(self) -> OrderKey:
        """The smallest key. IndexError: there is none."""
        return self._run_starts[0]

    def __bool__(self) -> bool:
        return bool(self._runs)

    def add(self, key: OrderKey) -> None:
        """Add a key that is not present."""
        runs, firsts = self._runs, self._run_starts
        if not runs or key > runs[-1][-1]:
            if runs and len(runs[-1]) < MAX_RUN:
                runs[-1].append(key)
            else:
                runs.append([key])
                firsts.append(key)
            return
        at = max(0, bisect_right(firsts, key) - 1)
        run = runs[at]
        insort(run, key)
        if len(run) > MAX_RUN:
            runs.insert(at + 1, run[MAX_RUN // 2 :])
            firsts.insert(at + 1, runs[at + 1][0])
            del run[MAX_RUN // 2 :]
        firsts[at] = run[0]

    def remove(self, key: OrderKey) -> None:
        """Remove a key that is present."""
        at = bisect_right(self._run_starts, key) - 1
        run = self._runs[at]
        del run[bisect_left(run, key)]
        if run:
            self._run_starts[at] = run[0]
        else:
            del self._runs[at], self._run_starts[at]

    def rank(self, key: OrderKey) -> int:
        """How many keys are smaller than this key, which is present."""
        at = bisect_right(self._run_starts, key) - 1
        return sum(map(len, self._runs[:at])) + bisect_left(self._runs[at], key)
