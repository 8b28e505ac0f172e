"""The routers' events at the actor, applied one by one: one that fails ends its own request, and nothing of others.

An arrival that fails is refused, and an event that only reports is dropped. After any other one that fails, its router
begins a new session and reports its state again. Only if the books no longer agree, the error goes on to all routers.

Invariant: after an event that has failed, the queues know exactly the requests that are known by ticket.
"""

from __future__ import annotations

import traceback
from collections import Counter, defaultdict
from collections.abc import Callable

from serve_app.core.limits import Kind, LimitReason, LimitRefuse, LimitRequest
from serve_app.core.shared_queue import messages
from serve_app.core.shared_queue.applied_actions import LOST_RETRY_S, lost
from serve_app.core.shared_queue.messages import ActorAction, RouterEvent
from serve_app.core.shared_queue.requests import ActorRequests

# These only report: without one of them no account is wrong.
_REPORTS = (messages.TokenProgress, messages.CreditUsage, messages.StatusRequest, messages.StoreAddress)
Apply = Callable[[str, RouterEvent, float], None]  # an event of a router


class AppliedEvents:
    """Applies events. O(1) per event besides what it does; O(requests + engines) after one that fails.

    Args:
        send: sends an action to a router.
        recount: sets the routers' accounts from the ledger.
    """

    def __init__(self, send: Callable[[str, ActorAction], None], recount: Callable[[], None]) -> None:
        self._send, self._recount = send, recount
        self.notes: list[str] = []  # for the operator, since they were taken
        self.unsure: set[str] = set()  # routers of which an event is lost: their sessions have to end

    def apply(self, router: str, event: RouterEvent, act: Apply, requests: ActorRequests, now: float) -> None:
        """Apply an event by `act`. Raises what it raised if the requests of all routers are concerned."""
        try:
            act(router, event, now)
        except Exception as error:
            told = "".join(traceback.format_exception(error))
            self.notes.append(f"an event of router {router} failed: {event!r}\n{told}")
            self._recount()
            self._end(router, event, requests, now)
            if not agree(requests):
                raise

    def _end(self, router: str, event: RouterEvent, requests: ActorRequests, now: float) -> None:
        match event:
            case messages.Arrive(arrival=arrival):
                request = requests.by_ticket.get(arrival.request_id)
                if request is None or not request.engine:  # else it was granted before the error, and runs
                    requests.cancel(arrival.request_id, now)
                    self._send(router, lost(arrival.request_id))
            case LimitRequest(ticket):
                refusal = LimitRefuse(ticket, LimitReason.RATE_LIMIT, Kind.REQUESTS, "", LOST_RETRY_S, False)
                self._send(router, refusal)
            case _ if not isinstance(event, _REPORTS):
                self.unsure.add(router)


def agree(requests: ActorRequests) -> bool:
    """Whether the queues know exactly the requests that are known by ticket, and engines have what these hold."""
    waiting, running = defaultdict[int, set[str]](set), defaultdict[int, set[str]](set)
    slots, tokens = Counter[str](), Counter[str]()
    granted = set(requests.grants_to_retry)  # by the queue; not charged yet
    for ticket, request in requests.by_ticket.items():
        if request.runs_in_session_slot:
            continue
        runs = bool(request.engine) or ticket in granted
        (running if runs else waiting)[id(request.queue)].add(ticket)
        if request.engine:
            slots[request.engine] += request.arrival.slots
            tokens[request.engine] += request.arrival.cost
    for queue in requests.models.values():
        admission = queue.admission
        if (
            admission.queue.by_id.keys() != waiting[id(queue)]
            or admission.scheduler.running.keys() != running[id(queue)]
        ):
            return False
        for engine, one in queue.engines.items():
            if (one.granted_slots, one.granted_tokens) != (slots[engine], tokens[engine]):
                return False
    return True
