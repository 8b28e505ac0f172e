"""A part of what is granted for every class that waits, whatever stands above it.

A class that waits earns `share` of the tokens of each grant, and pays the tokens of its own (down to zero). Once it has
earned what its next request costs it is due: that request goes before the higher classes, and it earns no more until
then. What it has earned is lost when nobody of it waits any more. So in any stretch in which it waits it is granted at
least `share` of all granted tokens, less what one request costs. Nothing runs by the clock: an idle system owes nobody.

Counting deficits so is Shreedhar and Varghese's (deficit round robin, 1996).
"""

from __future__ import annotations

from collections.abc import Sequence

from serve_app.core.level import Level, Waiting


def due(level: Level, head: Waiting) -> bool:
    """Whether a class may go before the ones above it."""
    return level.credit >= head.arrival.cost


def granted(levels: Sequence[Level], waiting: Waiting, share: float) -> None:
    """A request, already out of the line, was granted."""
    cost = waiting.arrival.cost
    own = levels[waiting.level]
    own.credit = max(0.0, own.credit - cost)
    for level in levels:
        head = level.first()
        if head is not None and level.credit < head.arrival.cost:
            level.credit += share * cost
