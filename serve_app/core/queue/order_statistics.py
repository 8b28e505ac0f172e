"""How many stand before one: places in an order that come mostly at its end and leave from anywhere.

Invariant: no run is empty or longer than `RUN`, and all places rise from the first run's first to the last one's last.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort

RUN = 512  # places; a change inside a run moves at most that many machine words, and 100,000 places are some 200 runs

Place = tuple[float, int]


class Ranks:
    """Places with their rank. `add` at the end is O(1), all else O(log n), `rank` a pass over the runs more."""

    __slots__ = ("_firsts", "_runs")

    def __init__(self) -> None:
        self._runs: list[list[Place]] = []
        self._firsts: list[Place] = []

    @property
    def first(self) -> Place:
        """The smallest place. IndexError: there is none."""
        return self._firsts[0]

    def __bool__(self) -> bool:
        return bool(self._runs)

    def add(self, place: Place) -> None:
        """Put in a place that is not in."""
        runs, firsts = self._runs, self._firsts
        if not runs or place > runs[-1][-1]:
            if runs and len(runs[-1]) < RUN:
                runs[-1].append(place)
            else:
                runs.append([place])
                firsts.append(place)
            return
        at = max(0, bisect_right(firsts, place) - 1)
        run = runs[at]
        insort(run, place)
        if len(run) > RUN:
            runs.insert(at + 1, run[RUN // 2 :])
            firsts.insert(at + 1, runs[at + 1][0])
            del run[RUN // 2 :]
        firsts[at] = run[0]

    def remove(self, place: Place) -> None:
        """Take a place out that is in."""
        at = bisect_right(self._firsts, place) - 1
        run = self._runs[at]
        del run[bisect_left(run, place)]
        if run:
            self._firsts[at] = run[0]
        else:
            del self._runs[at], self._firsts[at]

    def rank(self, place: Place) -> int:
        """How many are smaller than this place, which is in."""
        at = bisect_right(self._firsts, place) - 1
        return sum(map(len, self._runs[:at])) + bisect_left(self._runs[at], place)
