"""Whether a router counts when it is asked which engines a line may grant. Pure.

An engine is in a line while every router that counts can hand requests to it: whoever is next can go there then. Alone
that would let one router that has lost its way to the engines take them from all others, and two that have ejected
different ones leave none. So after `ASIDE_AFTER_S` a router that reaches less than half of what another one does is
left aside, and where no engine is left that all others reach, so are those who do not reach the one that most do. It
counts again as soon as it reaches enough.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

ASIDE_AFTER_S = 5.0  # routers hear of a new replica within a second or two of each other; people wait a little longer

Reached = Mapping[str, Mapping[str, bool]]  # by engine and router


class Standing:
    """The routers of one model. O(engines x routers) per look."""

    def __init__(self) -> None:
        self.aside: frozenset[str] = frozenset()
        self._short: dict[str, float] = {}  # routers that should not count, and since when

    def look(self, reached: Reached, routers: Collection[str], now: float) -> bool:
        """After a change, or when `next_due` has come; whether others are left aside now."""
        self._short = {router: self._short.get(router, now) for router in _short(reached, routers)}
        aside = frozenset(router for router, since in self._short.items() if now >= since + ASIDE_AFTER_S)
        changed, self.aside = aside != self.aside, aside
        return changed

    def next_due(self) -> float:
        """When the next router is left aside if nothing changes; infinite: none is."""
        dues = (since + ASIDE_AFTER_S for router, since in self._short.items() if router not in self.aside)
        return min(dues, default=math.inf)


def _short(reached: Reached, routers: Collection[str]) -> list[str]:
    """Routers without which there are more engines, in order."""
    counts = {router: sum(bool(by.get(router)) for by in reached.values()) for router in routers}
    most = max(counts.values(), default=0)
    if not most:
        return []
    able = {router for router, count in counts.items() if 2 * count >= most}
    if not any(all(by.get(router) for router in able) for by in reached.values()):
        best = max(sorted(reached), key=lambda engine: sum(bool(reached[engine].get(router)) for router in able))
        able = {router for router in able if reached[best].get(router)}
    return sorted(set(routers) - able)
