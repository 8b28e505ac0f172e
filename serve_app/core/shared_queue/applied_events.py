"""The routers' events at the actor, applied one by one: one that fails ends its own request, and nothing of others.

An arrival that fails is refused, and an event that only reports is dropped. After any other one that fails, its router
begins a new session and reports its state again; after a request to be charged it does so once it has the refusal, or
it would hand the request in again, for ever. Only if the books no longer agree, the error goes on to all routers.

Invariant: after an event that has failed, the queues know exactly the requests that are known by ticket.
"""

from __future__ import annotations

from collections import defaultdict
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
        send: sends an action to a router.
        scope: runs each event.
    """

    def __init__(self, send: Callable[[str, ActorAction], None], scope: StepScope) -> None:
        self._send = send
        self._scope = scope
        self.unsure: set[str] = set()  # routers of which an event is lost: their sessions have to end

    def apply(self, router: str, event: RouterEvent, act: Apply, requests: ActorRequests, now: float) -> None:
        """Apply an event by `act`. Raises what it raised if the requests of all routers are concerned."""
        end = partial(self._end, router, event, requests, now)
        self._scope.run(f"an event of router {router}", event, partial(act, router, event, now), end)

    def _end(self, router: str, event: RouterEvent, requests: ActorRequests, now: float) -> None:
        match event:
            case messages.Arrive(arrival=arrival):
                requests.lose(router, arrival.request_id, now)
            case LimitRequest(ticket):
                self._send(router, limits.lost(ticket))
            case messages.Began(run=run):
                requests.discard(run.arrival.request_id, now)
                self.unsure.add(router)
            case messages.Done(ticket) | messages.Cancel(ticket):
                requests.discard(ticket, now)
                self.unsure.add(router)
            case _ if not isinstance(event, _REPORTS):
                self.unsure.add(router)


def agree(requests: ActorRequests) -> bool:
    """Whether the queues know exactly the requests that are known by ticket."""
    waiting = defaultdict[int, set[str]](set)
    running = defaultdict[int, set[str]](set)
    for ticket, request in requests.by_ticket.items():
        granted = requests.grants_to_retry.get(ticket)  # by the queue; its router does not know it
        if granted is not None and not request.engine and granted.replica_id not in request.queue.engines:
            continue  # the grant has left with its engine: it is queued again in its turn
        runs = bool(request.engine) or granted is not None
        (running if runs else waiting)[id(request.queue)].add(ticket)
    for queue in requests.models.values():
        admission = queue.admission
        if (
            admission.queue.by_id.keys() != waiting[id(queue)]
            or admission.scheduler.running.keys() != running[id(queue)]
        ):
            return False
    return True
