"""The engines that a waiting request may not be granted, and the requests for which these have changed.

Rules
- A request avoids the engines that its router cannot reach, or that may not go on with what another engine has begun.
- When its router reaches more engines it is queued again, a part in each event, models in turn, the oldest first.

Invariant: a request that waits and avoids some engine is known here; none that has ended is returned.
"""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter

from serve_app.core.memory import SESSIONS_OWNER
from serve_app.core.queue import Arrival
from serve_app.core.shared_queue.incarnations import ActorRequest
from serve_app.core.shared_queue.model_turns import ModelTurns


class AvoidedEngines:
    """The requests that avoid engines. O(1) per method, unless stated."""

    def __init__(self) -> None:
        self._by_router: dict[str, dict[str, ActorRequest]] = {}  # by router and ticket
        self._changed = ModelTurns[ActorRequest]()  # by ticket: their routers reach more engines

    def set(self, request: ActorRequest, arrival: Arrival) -> None:
        """Set a request's arrival, with the engines that it avoids from now on."""
        avoided = _to_avoid(request)
        request.arrival = replace(arrival, avoid_replicas=avoided)
        if avoided:
            self._by_router.setdefault(request.router, {})[arrival.request_id] = request
        else:
            self.forget(request)

    def forget(self, request: ActorRequest) -> None:
        """A request has ended, or avoids no engine. An unknown one changes nothing."""
        requests = self._by_router.get(request.router, {})
        ticket = request.arrival.request_id
        if requests.get(ticket) is request:
            del requests[ticket]
            if not requests:
                del self._by_router[request.router]

    def forget_router(self, router: str) -> None:
        """A router's incarnation has ended."""
        self._by_router.pop(router, None)

    def is_outdated(self, request: ActorRequest | None) -> bool:
        """Whether a request waits, and may be granted other engines than it knows."""
        if request is None or request.engine or not request.is_known:
            return False
        return request.arrival.avoid_replicas != _to_avoid(request)

    def on_reachability(self, router: str) -> None:
        """A router reaches more engines. O(n log n) for its n requests that avoid some engine."""
        requests = sorted(self._by_router.get(router, {}).values(), key=attrgetter("arrived_s"))
        for one in requests:
            self._changed.add(one.queue.name, one.arrival.request_id, one)

    def next_outdated(self) -> ActorRequest | None:
        """The next request to queue again, which is then up to date here; None: there is none."""
        while (request := self._changed.take()) is not None:
            if self.is_outdated(request):
                return request
        return None


def _to_avoid(request: ActorRequest) -> frozenset[str]:
    """Engines that a request may not be granted; the session admission sets its own."""
    if request.router == SESSIONS_OWNER:
        return request.arrival.avoid_replicas
    return request.queue.to_avoid(request.router, request.arrival.fingerprint)
