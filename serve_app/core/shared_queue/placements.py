"""Where a waiting request may be granted, and the requests for which this has changed.

Rules
- A request avoids the engines that its router cannot reach, that may not continue what another engine has begun, or
  that do not know its operation.
- A request of a session may take the session's place, and otherwise waits for its engine; for any, if that engine is
  too small for it beside its sessions.
- When its router reaches other engines, or its session has ended, it is queued again, a part in each event, models in
  turn, the oldest first.

Invariant: a request that waits and may not be granted just anywhere is known here, as is each of a session until it
ends; none that has ended is returned.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter

from serve_app.core.memory import SESSIONS_OWNER
from serve_app.core.queue import SessionPlace
from serve_app.core.shared_queue.incarnations import ActorRequest
from serve_app.core.shared_queue.model_turns import ModelTurns


class Placements:
    """The requests that may not be granted just anywhere. O(1) per method, unless stated.

    Args:
        place_of: returns the place of a request's open session; None: there is none, or its router cannot reach it.
    """

    def __init__(self, place_of: Callable[[ActorRequest], SessionPlace | None]) -> None:
        self._place_of = place_of
        self._by_router: dict[str, dict[str, ActorRequest]] = {}  # by router and ticket
        self.by_session: dict[str, dict[str, ActorRequest]] = {}  # also those that run, by lease and ticket
        self._changed = ModelTurns[ActorRequest]()  # by ticket

    def set(self, request: ActorRequest) -> SessionPlace | None:
        """Set where a request may be granted from now on; returns the place of its session."""
        place = request.place = self._place_of(request)
        only, avoided = constraint = _constraint(request, place)
        if constraint != (request.arrival.only_replica, request.arrival.avoid_replicas):
            request.arrival = replace(request.arrival, only_replica=only, avoid_replicas=avoided)
        self.forget(request)
        if avoided or request.arrival.session is not None:
            self._by_router.setdefault(request.router, {})[request.arrival.request_id] = request
        self.add_to_session(request)
        return place

    def add_to_session(self, request: ActorRequest) -> None:
        """A request runs, or waits: one of a session is known here until it ends."""
        if request.arrival.session is not None:
            self.by_session.setdefault(request.arrival.session, {})[request.arrival.request_id] = request

    def forget(self, request: ActorRequest) -> None:
        """A request has ended, or may be granted anywhere. An unknown one changes nothing."""
        _discard(self._by_router, request.router, request)
        _discard(self.by_session, request.arrival.session or "", request)

    def forget_router(self, router: str) -> None:
        """A router's incarnation has ended; its requests are forgotten one by one."""
        self._by_router.pop(router, None)

    def is_outdated(self, request: ActorRequest) -> bool:
        """Whether a request waits, and may be granted elsewhere than it knows."""
        if request.engine or not request.is_known:
            return False
        known = request.arrival.only_replica, request.arrival.avoid_replicas
        place = self._place_of(request)
        return request.place != place or known != _constraint(request, place)

    def on_reachability(self, router: str) -> None:
        """A router reaches other engines. O(n log n) for its n requests that may not be granted just anywhere."""
        for request in sorted(self._by_router.get(router, {}).values(), key=attrgetter("arrived_s")):
            self._on_change(request)

    def on_opened(self) -> None:
        """Engines are open again. O(n log n) for all requests that may not be granted just anywhere."""
        for router in list(self._by_router):
            self.on_reachability(router)

    def on_session(self, lease: str) -> None:
        """A session has ended, or its engine has other room. O(its requests)."""
        for request in self.by_session.get(lease, {}).values():
            self._on_change(request)

    def _on_change(self, request: ActorRequest) -> None:
        self._changed.add(request.queue.name, request.arrival.request_id, request)

    def next_outdated(self) -> ActorRequest | None:
        """The next request to queue again, which is then up to date here; None: there is none."""
        while (request := self._changed.take()) is not None:
            if self.is_outdated(request):
                return request
        return None


def _discard(index: dict[str, dict[str, ActorRequest]], name: str, request: ActorRequest) -> None:
    """Remove a request from an index."""
    requests = index.get(name, {})
    ticket = request.arrival.request_id
    if requests.get(ticket) is request:
        del requests[ticket]
        if not requests:
            del index[name]


def _constraint(request: ActorRequest, place: SessionPlace | None) -> tuple[str | None, frozenset[str]]:
    """The only engine that a request may be granted, and those that it may not; openings of sessions have their own."""
    if request.router == SESSIONS_OWNER:
        return None, request.arrival.avoid_replicas
    avoided = request.queue.to_avoid(request.router, request.arrival.fingerprint) | request.ignorant
    if place is None or place.replica_id in avoided or not request.queue.could_run(place.replica_id, request.arrival):
        return None, avoided
    return place.replica_id, avoided
