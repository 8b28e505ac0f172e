"""The routers' events at the actor, applied one by one: one that fails ends its own request, and nothing of others.

An arrival that fails is refused, and an event that only reports is dropped. After any other one that fails, its router
begins a new session and reports its state again; after a request to be charged it does so once it has the refusal, or
it would hand the request in again, for ever. Only if the books no longer agree, the error goes on to all routers.

Invariant: after an event that has failed, the queues know exactly the requests that are known by ticket.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from serve_app.core import limits
from serve_app.core.limits import LimitRequest
from serve_app.core.shared_queue import messages
from serve_app.core.shared_queue.messages import ActorAction, RouterEvent
from serve_app.core.shared_queue.requests import ActorRequests
from serve_app.core.shared_queue.scope import StepScope

# These only report: without one of them no account is wrong.
_REPORTS = (messages.TokenProgress, messages.CreditUsage, messages.StatusRequest, messages.StoreAddress)
Apply = Callable[[str, RouterEvent, float], None]  # an event of a router


class AppliedEvents:
    """Applies events. O(1) per event besides what it does; O(requests + engines) after one that fails.

    Args:
        requests: what fails with an event ends there.
        send: sends an action to a router.
        scope: runs each event.
    """

    def __init__(self, requests: ActorRequests, send: Callable[[str, ActorAction], None], scope: StepScope) -> None:
        self._requests = requests
        self._send = send
        self._scope = scope
        self.unsure: set[str] = set()  # routers of which an event is lost: their sessions have to end

    def apply(self, router: str, event: RouterEvent, act: Apply, now: float) -> None:
        """Apply an event by `act`. Raises what it raised if the requests of all routers are concerned."""
        end = partial(self._end, router, event, now)
        self._scope.run(f"an event of router {router}", event, partial(act, router, event, now), end)

    def _end(self, router: str, event: RouterEvent, now: float) -> None:
        match event:
            case messages.Arrive(arrival=arrival):
                self._requests.lose(router, arrival.request_id, now)
            case LimitRequest(ticket):
                self._send(router, limits.lost(ticket))
            case messages.Began(run=run):
                self._requests.discard(run.arrival.request_id, now)
                self.unsure.add(router)
            case messages.Done(ticket) | messages.Cancel(ticket):
                self._requests.discard(ticket, now)
                self.unsure.add(router)
            case _ if not isinstance(event, _REPORTS):
                self.unsure.add(router)
