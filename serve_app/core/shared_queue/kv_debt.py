"""KV debt: KV tokens that running requests need beyond their estimates and are not granted yet; repaid in FIFO order.

The engine uses those tokens whether they are granted or not, so a request that begins meanwhile would take blocks in
use. Therefore no request of the same or a lower class begins on an engine with KV debt, and freed tokens pay the debt
first. A waiting request of a higher class comes before that; if it takes blocks in use, vLLM preempts by recompute.

Invariant: a request has no KV debt once it has ended, its router has begun a new incarnation, or its engine is gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from serve_app.types import RequestClass


class OwedRequest(NamedTuple):
    """A running request with KV debt; `request_id` is the router's id."""

    router: str
    request_id: str
    ticket: str
    request_class: RequestClass


class KvDebt:
    """KV tokens owed, by engine and request. O(1) per event, unless stated."""

    def __init__(self) -> None:
        self.debts: dict[str, dict[OwedRequest, int]] = {}

    def add(self, engine: str, request: OwedRequest, tokens: int) -> None:
        """Add KV debt of a request."""
        owed = self.debts.setdefault(engine, {})
        owed[request] = owed.get(request, 0) + tokens

    def classes(self, engine: str) -> set[RequestClass]:
        """The classes of the requests with KV debt on an engine. O(debts there)."""
        return {who.request_class for who in self.debts.get(engine, ())}

    def due(self, engine: str, min_class: RequestClass) -> list[tuple[OwedRequest, int]]:
        """The debts of this class and higher ones on an engine, in the order in which they are paid."""
        return [one for one in self.debts.get(engine, {}).items() if one[0].request_class >= min_class]

    def end(self, engine: str, request: OwedRequest) -> None:
        """A request has no debt any more; without debt nothing changes."""
        owed = self.debts.get(engine, {})
        if owed.pop(request, None) is not None and not owed:
            del self.debts[engine]

    def forget_routers(self, routers: Sequence[str]) -> list[str]:
        """Routers begin a new incarnation or are gone; returns the engines where they had debts. O(debts)."""
        found = [engine for engine, owed in self.debts.items() if any(who.router in routers for who in owed)]
        for engine in found:
            for router in routers:
                self.forget(engine, router)
        return found

    def forget(self, engine: str, router: str = "") -> None:
        """An engine is gone, or only this router has dropped it. O(debts there)."""
        for debtor in [debtor for debtor in self.debts.get(engine, ()) if router in ("", debtor.router)]:
            self.end(engine, debtor)
