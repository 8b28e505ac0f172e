"""The queues of all models at the actor, and which engines each may grant from now.

Here are the answers; what changes them, and what follows from a change, is in `.engines`.

Invariant: an engine is in the queue of one model at most.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from serve_app.core.memory import Ledger, SessionLeases
from serve_app.core.pools import RequestPool
from serve_app.core.queue import Admission, EventGrants, SessionPlace
from serve_app.core.shared_queue.incarnations import ActorRequest
from serve_app.core.shared_queue.messages import DEFAULT_POLICY
from serve_app.core.shared_queue.model_state import ModelState


@dataclass(slots=True)
class ModelQueues:
    """The queues. O(1) per method, unless stated.

    Args:
        ledger: has the pools of engines and sessions.
        sessions: the open sessions.
        event_grants: how many requests all queues may grant in an event.
        closed_engines: on these the routers' holdings are unknown: neither credit nor a grant.
        draining_engines: on these neither, but for places of sessions.
        by_name: the queues, by model. by_engine: and by engine, as routers report.
        touched: models with a decision since the state for the routers was updated.
    """

    ledger: Ledger
    sessions: SessionLeases
    event_grants: EventGrants
    closed_engines: frozenset[str]
    draining_engines: frozenset[str]
    by_name: dict[str, ModelState] = field(default_factory=dict)
    by_engine: dict[str, ModelState] = field(default_factory=dict)
    touched: set[str] = field(default_factory=set)

    def of_model(self, model: str) -> ModelState:
        """The queue of a model; created if there is none."""
        found = self.by_name.get(model)
        if found is None:
            held_tokens = partial(self.sessions.held_tokens, model)
            found = ModelState(model, Admission(DEFAULT_POLICY, held_tokens, self.event_grants))
            self.by_name[model] = found
        return found

    def admission(self, model: str) -> Admission | None:
        """The requests that wait and run in the queue of a model; None: it has no queue."""
        found = self.by_name.get(model)
        return None if found is None else found.admission

    def waits(self) -> dict[str, str]:
        """What each waiting request waits for now, by its ticket. O(waiting requests)."""
        return {
            waiting.arrival.request_id: reason.value
            for state in self.by_name.values()
            for waiting, reason in state.admission.wait_reasons()
        }

    def pool_to_grant(self, engine: str) -> RequestPool | None:
        """The pool of an engine from which its queue may grant now; None: nothing is granted there."""
        queue = self.by_engine.get(engine)
        closed = engine in self.closed_engines or engine in self.draining_engines
        return None if closed or queue is None or not queue.is_open(engine) else self.ledger.pool(engine)

    def place_of(self, request: ActorRequest) -> SessionPlace | None:
        """The place of a request's open session, if its router can send it there."""
        session = self.sessions.open_by_lease(request.arrival.session or "")
        if session is None or session.engine in self.closed_engines:
            return None
        pool = self.ledger.pool(session.lease)
        if pool is None or not request.may_run_on(session.engine) or not request.queue.is_open(session.engine):
            return None
        return SessionPlace(session.engine, pool)

    def unreconciled_routers(self, engine: str) -> set[str]:
        """Routers that must report again what runs on an engine that was declared gone and has returned."""
        queue = self.by_engine.get(engine)
        if queue is None or self.ledger.pool(engine) is None:
            return set()
        return set(queue.engines[engine].unreconciled)

    def recovering(self) -> frozenset[str]:
        """Models whose reachable engines are all closed, so that their queues can grant nothing. O(engines)."""
        found = set()
        closed = self.closed_engines
        for model, queue in self.by_name.items():
            others = (one for one in queue.engines if one not in closed)  # mostly none, or the first one is open
            if closed & queue.engines.keys() and not any(
                queue.is_open(one) and self.ledger.pool(one) is not None for one in others
            ):
                found.add(model)
        return frozenset(found)
