"""A model's queue at the actor: its engines, its routers, and a request of it.

Invariant: an engine is open while some router of the model reaches it and none has to report what runs there.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from serve_app.core.queue import Admission, Arrival
from serve_app.core.shared_queue.kv_debt import OwedRequest
from serve_app.core.shared_queue.messages import SessionDraw
from serve_app.types import RequestClass

# slots and tokens; those of them in use outside the queue; tokens of sessions
Capacity = tuple[int, int, tuple[int, int], int]


@dataclass(slots=True)
class EngineState:
    """An engine in a model's queue."""

    reachable_from: dict[str, bool] = field(default_factory=dict)  # by router
    unreconciled: set[str] = field(default_factory=set)  # routers that must report again what runs there
    granted_slots: int = 0  # held by this queue's grants
    granted_tokens: int = 0
    debt_class: RequestClass | None = None  # highest class with KV debt, as reported to the queue
    reclaimed_for: RequestClass | None = None  # class for which tokens of lower ones were reclaimed
    reported_capacity: Capacity | None = None
    fingerprint: str | None = None  # as it has reported (`core.memory.EngineReport`)

    def may_take(self, router: str, fingerprint: str | None) -> bool:
        """Whether a router may send a request there; `fingerprint`: of the engine that has begun it; None: none has."""
        return self.reachable_from.get(router, False) and fingerprint in (None, self.fingerprint)


@dataclass(slots=True)
class ModelState:
    """The queue of one model, and the engines it grants from."""

    name: str  # of the model
    admission: Admission
    routers: set[str] = field(default_factory=set)
    engines: dict[str, EngineState] = field(default_factory=dict)
    avoid_cache: dict[tuple[str, str | None], frozenset[str]] = field(default_factory=dict)  # until a change

    def to_avoid(self, router: str, fingerprint: str | None) -> frozenset[str]:
        """Open engines to which a router may not send a request; `fingerprint`: of the engine that has begun it; None:
        none has. O(engines) after a change, else O(1)."""
        found = self.avoid_cache.get((router, fingerprint))
        if found is None:
            away = [name for name, one in self.engines.items() if not one.may_take(router, fingerprint)]
            found = self.avoid_cache[router, fingerprint] = frozenset(filter(self.is_open, away))
        return found

    @property
    def highest_waiting_class(self) -> RequestClass | None:
        """The highest class with waiting requests; None: no request waits."""
        ahead = self.admission.ahead(min(RequestClass))
        return ahead[0][0] if ahead else None

    def is_open(self, engine: str) -> bool:
        """Whether a granted request can be sent to this engine."""
        one = self.engines[engine]
        return not one.unreconciled and any(one.reachable_from.get(router) for router in self.routers)


@dataclass(slots=True)
class ActorRequest:
    """A waiting or running request.

    `slots` and `tokens`: held of its engine, in its router's account; `drawn`: held of its session.
    """

    router: str
    queue: ModelState
    arrival: Arrival  # its deadline in this clock; avoids engines its router could not reach when queued
    arrived_s: float
    engine: str = ""  # empty: it waits
    slots: int = 0
    tokens: int = 0
    drawn: SessionDraw | None = None
    original_arrival: Arrival | None = None  # as submitted, if it waits for less
    awaited_session: str = ""  # the session whose slot was in use at its arrival; empty: none, or it runs
    owed: OwedRequest | None = None  # as it had KV debt on its engine
    reported_tokens: int = 0  # output tokens reported so far

    @property
    def runs_in_session_slot(self) -> bool:
        """Whether it runs in its session's own slot, outside the queue."""
        return self.drawn is not None and self.drawn.slots > 0
