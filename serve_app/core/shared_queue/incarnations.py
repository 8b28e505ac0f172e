"""The requests of each incarnation of a router at the actor, and what becomes of them when it has ended.

The end itself takes one step, however many requests there are. They are then forgotten one by one, a part in each
event (`ActorRequests.move`).

Rules
- A request of an ended incarnation is granted nothing more, and no event or action concerns it.
- Until it is forgotten it keeps its place in the queue; when its turn comes it is refused instead.
- What it held in its router's accounts stays there: these are set when the router reports again (`messages.Hello`) or
  is removed (`core.pools.Holder`). So nothing is given back twice, and until then nobody else is granted it.

Invariant: a request is in its incarnation exactly as long as it is known by ticket.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from serve_app.core.memory import SESSIONS_OWNER
from serve_app.core.pools import Holder
from serve_app.core.queue import Arrival, SessionPlace
from serve_app.core.shared_queue.kv_debt import OwedRequest
from serve_app.core.shared_queue.model_state import ModelState


@dataclass(slots=True)
class Incarnation:
    """A router from its first message until its session ends. `holder`: has the accounts of its requests."""

    holder: Holder
    requests: dict[str, ActorRequest] = field(default_factory=dict)  # by ticket, in order of arrival
    has_ended: bool = False


@dataclass(slots=True)
class ActorRequest:
    """A waiting or running request. `place`: of its session, which it may take while it waits; `lease`: of the session
    in whose place it runs, if it does. `ignorant`: engines that its router has excluded, since they do not know its
    operation."""

    router: str
    incarnation: Incarnation
    queue: ModelState
    arrival: Arrival  # its deadline in this clock; avoids engines its router could not reach when queued
    arrived_s: float
    engine: str = ""  # empty: it waits
    place: SessionPlace | None = None
    lease: str = ""
    grown_tokens: int = 0  # of its engine besides its grant: what a router of release 0.5.0 returns at its end
    owed: OwedRequest | None = None  # as it had KV debt on its engine
    ignorant: frozenset[str] = frozenset()

    @property
    def is_known(self) -> bool:
        """Whether it and its incarnation have not ended."""
        known = self.incarnation.requests.get(self.arrival.request_id)
        return known is self and not self.incarnation.has_ended

    def may_run_on(self, engine: str) -> bool:
        """Whether an engine is in its queue, and its router may send it there; the opening of a session has none."""
        found = None if engine in self.ignorant else self.queue.engines.get(engine)
        is_opening = self.router == SESSIONS_OWNER
        return found is not None and (is_opening or found.may_take(self.router, self.arrival.fingerprint))


class Incarnations:
    """The incarnations of all routers. O(1) per method."""

    def __init__(self) -> None:
        self.by_router: dict[str, Incarnation] = {}  # those that have not ended
        self.ended: deque[Incarnation] = deque()  # the first one first

    def current(self, router: str, holder: Holder) -> Incarnation:
        """A router's incarnation that has not ended; a new one, with these accounts, if there is none."""
        found = self.by_router.get(router)
        if found is None:
            found = self.by_router[router] = Incarnation(holder)
        return found

    def requests(self, router: str) -> dict[str, ActorRequest]:
        """The requests of a router, by ticket, without those of ended incarnations."""
        found = self.by_router.get(router)
        return {} if found is None else found.requests

    def end(self, router: str) -> None:
        """A router's incarnation has ended. Without one nothing changes."""
        found = self.by_router.pop(router, None)
        if found is not None:
            found.has_ended = True
            self.ended.append(found)

    def next_ended(self) -> ActorRequest | None:
        """The next request to forget: of the incarnation that ended first the newest, since that mostly waits."""
        while self.ended:
            if self.ended[0].requests:
                return next(reversed(self.ended[0].requests.values()))
            self.ended.popleft()
        return None
