"""A model's queue at the actor: its engines and its routers.

Invariant: an engine is open while some router of the model reaches it and none has to report what runs there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from serve_app.core.queue import Admission, Arrival
from serve_app.types import RequestClass


@dataclass(slots=True)
class EngineState:
    """An engine in a model's queue."""

    reachable_from: dict[str, bool] = field(default_factory=dict)  # by router
    unreconciled: set[str] = field(default_factory=set)  # routers that must report again what runs there
    debt_class: RequestClass | None = None  # highest class with KV debt, as reported to the queue
    reclaimed_for: RequestClass | None = None  # class for which tokens of lower ones were reclaimed
    fingerprint: str | None = None  # as it has reported (`core.memory.EngineReport`)
    room: tuple[bool, int] = (False, 0)  # whether the queue grants from it, and KV tokens that sessions hold there

    def may_take(self, router: str, fingerprint: str | None) -> bool:
        """Whether a router may send a request there; `fingerprint`: of the engine that has begun it; None: none has."""
        return self.reachable_from.get(router, False) and fingerprint in (None, self.fingerprint)

    def forget_router(self, router: str) -> None:
        """A router does not use it any more."""
        self.unreconciled.discard(router)
        self.reachable_from.pop(router, None)


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

    def wait_for_reports(self, engine: str, routers: Iterable[str]) -> None:
        """These routers must report again what runs on an engine, before it is open."""
        self.engines[engine].unreconciled.update(routers)
        self.avoid_cache.clear()

    def could_run(self, engine: str, arrival: Arrival) -> bool:
        """Whether an engine is large enough for a request beside its sessions."""
        return self.admission.capacity.could_fit(arrival.slots, arrival.cost, (engine, frozenset()))

    @property
    def highest_waiting_class(self) -> RequestClass | None:
        """The highest class with waiting requests; None: no request waits."""
        ahead = self.admission.ahead(min(RequestClass))
        return ahead[0][0] if ahead else None

    def granted_slots(self, engine: str) -> int:
        """The slots of an engine that this queue has granted. O(requests there)."""
        replica = self.admission.capacity.replicas.get(engine)
        return 0 if replica is None else sum(slots for slots, _ in replica.running.values())

    def has_runs(self, engine: str) -> bool:
        """Whether requests that this queue knows run on an engine, or in places of sessions there. O(requests there +
        sessions with a running request)."""
        in_places = self.admission.scheduler.in_places.values()
        return self.granted_slots(engine) > 0 or any(run.replica_id == engine for run in in_places)

    def is_open(self, engine: str) -> bool:
        """Whether a granted request can be sent to this engine."""
        state = self.engines[engine]
        return not state.unreconciled and any(state.reachable_from.get(router) for router in self.routers)
