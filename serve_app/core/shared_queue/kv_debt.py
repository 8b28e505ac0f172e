"""What running requests have outgrown their estimates by and could not be given: they are owed it, the first first.

The engine uses those tokens whether they were given or not; whoever began meanwhile would take another's blocks. So
nobody of their class or a lower one begins on an engine while somebody is owed tokens there, and what comes free is
theirs; but not before a higher class that waits: what it takes of blocks in use ends in vLLM's recompute preemption.

Invariant: a request is owed nothing once it has ended, its router has begun anew, or its engine is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from serve_app.types import RequestClass


class Grower(NamedTuple):
    """A request that runs. `ticket`: empty if its router granted it by itself; else its `request_id` is that one's."""

    router: str
    request_id: str
    ticket: str
    level: RequestClass


class Growth:
    """KV tokens owed, by engine and request. O(1) per event, save where it is said."""

    def __init__(self) -> None:
        self._owed: dict[str, dict[Grower, int]] = {}
        self._engine_of: dict[str, str] = {}  # of tickets
        self._grower_of: dict[str, Grower] = {}

    @property
    def engines(self) -> frozenset[str]:
        """Engines on which somebody is owed tokens."""
        return frozenset(self._owed)

    def owes(self, engine: str) -> bool:
        """Whether somebody is owed tokens of this engine."""
        return engine in self._owed

    def owe(self, engine: str, who: Grower, tokens: int) -> None:
        """A request is owed so many more."""
        owed = self._owed.setdefault(engine, {})
        owed[who] = owed.get(who, 0) + tokens
        if who.ticket:
            self._engine_of[who.ticket], self._grower_of[who.ticket] = engine, who

    def levels(self, engine: str) -> set[RequestClass]:
        """The classes of those who are owed something there. O(owed there)."""
        return {who.level for who in self._owed.get(engine, ())}

    def settle(self, engine: str, give: Callable[[Grower, int], bool], least: RequestClass) -> None:
        """Give what is owed to this class and those above, in order, until `give` says that there is no more."""
        for who, tokens in list(self._owed.get(engine, {}).items()):
            if who.level < least:
                continue
            if not give(who, tokens):
                return
            self._forget(engine, who)

    def ended(self, ticket: str) -> None:
        """A request has ended; one that is owed nothing changes nothing."""
        if ticket in self._engine_of:
            self._forget(self._engine_of[ticket], self._grower_of[ticket])

    def ended_elsewhere(self, engine: str, router: str, request_id: str) -> None:
        """So has one that its router granted by itself."""
        for level in RequestClass:
            self._forget(engine, Grower(router, request_id, "", level))

    def forget(self, routers: Iterable[str]) -> list[str]:
        """Routers begin anew or are gone; returns the engines where something was owed to them. O(owed)."""
        names, found = set(routers), []
        for engine, owed in list(self._owed.items()):
            gone = [who for who in owed if who.router in names]
            for who in gone:
                self._forget(engine, who)
            found += [engine] if gone else []
        return found

    def left(self, engine: str, router: str) -> None:
        """A router is done with an engine. O(owed there)."""
        for who in [who for who in self._owed.get(engine, ()) if who.router == router]:
            self._forget(engine, who)

    def drop(self, engine: str) -> None:
        """An engine is gone. O(owed there)."""
        for who in list(self._owed.get(engine, ())):
            self._forget(engine, who)

    def _forget(self, engine: str, who: Grower) -> None:
        owed = self._owed.get(engine, {})
        if owed.pop(who, None) is None:
            return
        self._engine_of.pop(who.ticket, None)
        self._grower_of.pop(who.ticket, None)
        if not owed:
            del self._owed[engine]
