"""A part of what is granted for every class that waits, whatever stands above it.

A class that waits earns `share` of the tokens of every grant, and pays the tokens of its own (down to zero). Once it
has earned what its next request costs it is due: that request goes before the higher classes. What it has earned is
lost when nobody of it waits any more; while a due request finds no replica with room, no more than its cost is kept. So
in any stretch in which a class waits for its turn alone it is granted at least `share` of all granted tokens, less
about one request's cost. Nothing runs by the clock: an idle system owes nobody.

Counting deficits so is Shreedhar and Varghese's (deficit round robin, 1996).
"""

from __future__ import annotations

from collections.abc import Sequence

from serve_app.core.waiting.level import Level, Waiting


def due(level: Level, head: Waiting) -> bool:
    """Whether a class may go before the ones above it."""
    return level.credit >= head.cost


def blocked(level: Level, head: Waiting) -> None:
    """A due request found no replica with room."""
    level.credit = min(level.credit, head.cost)


def granted(levels: Sequence[Level], waiting: Waiting, share: float) -> None:
    """A request, already out of the line, was granted."""
    own = levels[waiting.level]
    own.credit = max(0.0, own.credit - waiting.cost)
    for level in levels:
        level.credit += share * waiting.cost  # where nobody waits it is lost when somebody comes
