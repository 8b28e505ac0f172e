"""How many tokens a second have come to one model at one router, and how many its engines have served.

Rates are those of the last `WINDOW_S` seconds, or since the first look.

Invariant: at most `WINDOW_S / LOOK_S` looks are kept, and two more; a rate is finite and not negative.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

WINDOW_S = 30.0  # a long answer takes as long; a shorter window would show single requests
LOOK_S = 1.0  # between kept looks: enough for the window, however often somebody asks


class TokenRates(NamedTuple):
    """Tokens a second, prompt and output: `arrived` with the estimated output, `served` as engines have counted."""

    arrived: float
    served: float


class TotalRate:
    """The rate at which a total grows, from looks at it. O(1) amortised."""

    def __init__(self) -> None:
        self._looks: deque[tuple[float, int]] = deque()  # (at, total)

    @property
    def looks(self) -> int:
        """How many looks are kept."""
        return len(self._looks)

    def per_s(self, total: int, now: float) -> float:
        """The rate up to `now`; 0 at the first look. A total that has fallen counts as one that has not grown."""
        looks = self._looks
        while len(looks) > 1 and looks[1][0] <= now - WINDOW_S:
            looks.popleft()
        if not looks or now - looks[-1][0] >= LOOK_S:
            looks.append((now, total))
        since, before = looks[0]
        return max(0, total - before) / (now - since) if now > since else 0.0


class TokenFlow:
    """The tokens of one model at one router.

    `arrived` grows with each request that comes to the queue, by its estimate until its first run has ended, `served`
    with each run that has ended.

    Invariant: what was estimated wrongly is in `arrived` no longer than its request runs.
    """

    def __init__(self) -> None:
        self.arrived = 0
        self.served = 0
        self._arrived = TotalRate()
        self._served = TotalRate()

    def on_run_end(self, served: int, estimated: int) -> None:
        """A run has ended that was served so many tokens. `estimated`: of its request, if no run was served before."""
        self.served += served
        if served:
            self.arrived += served - estimated

    def rates(self, now: float, running: int = 0) -> TokenRates:
        """The rates now. `running`: tokens that the present runs have been served so far."""
        return TokenRates(self._arrived.per_s(self.arrived, now), self._served.per_s(self.served + running, now))
