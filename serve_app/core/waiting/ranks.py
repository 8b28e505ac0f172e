"""How many stand before one: numbers that come in rising order and leave from anywhere.

Invariant: no run is empty or longer than `RUN`, and all numbers rise from the first run's first to the last one's last.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right

RUN = 512  # numbers; deleting inside a run moves at most that many machine words, and 100,000 numbers are 200 runs


class Ranks:
    """Rising numbers with their rank. `add` is O(1), the others O(log n), `rank` a pass over n / `RUN` lengths more."""

    __slots__ = ("_firsts", "_runs")

    def __init__(self) -> None:
        self._runs: list[list[int]] = []
        self._firsts: list[int] = []

    @property
    def first(self) -> int:
        """The smallest number. IndexError: there is none."""
        return self._firsts[0]

    def add(self, number: int) -> None:
        """Put in a number above all others."""
        if self._runs and len(self._runs[-1]) < RUN:
            self._runs[-1].append(number)
        else:
            self._runs.append([number])
            self._firsts.append(number)

    def remove(self, number: int) -> None:
        """Take a number out that is in."""
        at = bisect_right(self._firsts, number) - 1
        run = self._runs[at]
        del run[bisect_left(run, number)]
        if run:
            self._firsts[at] = run[0]
        else:
            del self._runs[at], self._firsts[at]

    def rank(self, number: int) -> int:
        """How many are smaller than this number, which is in."""
        at = bisect_right(self._firsts, number) - 1
        return sum(map(len, self._runs[:at])) + bisect_left(self._runs[at], number)
