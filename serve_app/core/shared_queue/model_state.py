"""What the lines of `core.shared_queue.granting` consist of: engines, requests, and a model's line of both."""

from __future__ import annotations

from dataclasses import dataclass, field

from serve_app.core.queue import Admission, Arrival
from serve_app.core.shared_queue.messages import Drawn
from serve_app.types import RequestClass


@dataclass(slots=True)
class Engine:
    """An engine, as far as a line is concerned with it."""

    reached: dict[str, bool] = field(default_factory=dict)  # by router
    owed: set[str] = field(default_factory=set)  # routers that have to say anew what runs there
    slots: int = 0  # held by this line's grants
    tokens: int = 0
    debt: RequestClass | None = None  # the highest class of those who are owed tokens, as the line was told
    reclaimed: RequestClass | None = None  # the class for which growth of lower ones was asked back
    told: tuple[int, int, int, int, int] | None = None  # slots and tokens it has, those in other hands, and of sessions

    def open_to(self, routers: set[str]) -> bool:
        """Whether somebody who is granted a place here can go there."""
        return not self.owed and any(self.reached.get(router) for router in routers)


@dataclass(slots=True)
class Line:
    """The line of one model, and what it grants from."""

    admission: Admission
    routers: set[str] = field(default_factory=set)
    engines: dict[str, Engine] = field(default_factory=dict)
    avoids: dict[str, frozenset[str]] = field(default_factory=dict)  # by router, until the reach of one changes

    def avoid(self, router: str) -> frozenset[str]:
        """Engines that others reach and this router does not. O(engines) after a change, else O(1)."""
        found = self.avoids.get(router)
        if found is None:
            there = (name for name, one in self.engines.items() if not one.reached.get(router) and self.open(name))
            found = self.avoids[router] = frozenset(there)
        return found

    @property
    def waits(self) -> RequestClass | None:
        """The highest class of which somebody waits; None: nobody does."""
        ahead = self.admission.ahead(min(RequestClass))
        return ahead[0][0] if ahead else None

    def open(self, engine: str) -> bool:
        """Whether somebody who is granted a place on this engine can go there."""
        return self.engines[engine].open_to(self.routers)


@dataclass(slots=True)
class Request:
    """A request in a line or in a place.

    `slots` and `tokens`: what it holds of its engine, in its router's account; `drawn`: and of its session.
    """

    router: str
    model: str
    arrival: Arrival  # its deadline in this clock; avoids what its router did not reach when it last came in
    arrived_s: float
    engine: str = ""  # empty: it waits
    slots: int = 0
    tokens: int = 0
    drawn: Drawn | None = None
    whole: Arrival | None = None  # as it came, where it waits for less
    short_of: str = ""  # the session whose slot was another request's when it came; empty: none, or it runs
    produced: int = 0  # tokens of output, as far as they were told

    @property
    def beside(self) -> bool:
        """Whether it runs in its session's own slot, of which the line does not know."""
        return self.drawn is not None and self.drawn.slots > 0
