"""The actor's actions at a router, applied one by one: one that fails ends its own request, and no other.

A request that waits is refused, and the actor is told to return what it has granted it. What a failed action would have
changed in an account is missing there until the next heartbeat, at which the actor compares the accounts. Those of the
limits are not compared: the router begins another incarnation, and so tells what it has.

Invariant: every action of a reply is applied or is in `failed`; none hides another one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from serve_app.core.limits import LimitGrant, LimitRecall, LimitRefuse, RouterLimits
from serve_app.core.queue import Action, Refuse
from serve_app.core.shared_queue import messages
from serve_app.core.shared_queue.delivery import RouterSession
from serve_app.core.shared_queue.messages import ActorAction
from serve_app.core.shared_queue.router_pending import PendingRequests
from serve_app.core.shared_queue.router_running import InFlight
from serve_app.core.shared_queue.scope import lost

_OF_ACCOUNTS = (LimitGrant, LimitRecall)  # without one of them a router's account of a limit is wrong


class FailedAction(NamedTuple):
    """An action that could not be applied. `request_id`: of the request that it ended; empty: it ended none."""

    request_id: str
    action: ActorAction
    error: Exception


class AppliedActions:
    """Applies the actions of replies. O(1) per action besides what it does.

    Args:
        router_session: sends events to the actor.
    """

    def __init__(
        self, pending: PendingRequests, in_flight: InFlight, limits: RouterLimits, router_session: RouterSession
    ) -> None:
        self._pending = pending
        self._in_flight = in_flight
        self._limits = limits
        self._router_session = router_session
        self.failed: list[FailedAction] = []  # since the shell has taken them
        self._is_unsure = False

    def apply(
        self, actions: Iterable[ActorAction], act: Callable[[ActorAction, float], list[Action]], now: float
    ) -> list[Action]:
        """Apply each action by `act`; returns what follows from them."""
        found: list[Action] = []
        for action in actions:
            ticket: str = getattr(action, "ticket", "") or getattr(action, "request_id", "")
            waiting = self._pending.tickets.get(ticket)
            charged = self._limits.tickets.get(ticket)
            self._is_unsure |= isinstance(action, LimitRefuse) and action.is_unsure
            try:
                found += act(action, now)
            except Exception as error:  # noqa: BLE001 - whatever it is, it belongs to this action alone
                request_id = ""
                self._is_unsure |= isinstance(action, _OF_ACCOUNTS)
                if charged is not None:
                    request_id = charged.request.request_id
                    self._limits.lose(request_id, now)
                elif waiting is not None:
                    request_id = waiting.request_id
                    found.append(self._end(request_id, ticket))
                self.failed.append(FailedAction(request_id, action, error))
        return found

    def take_unsure(self) -> bool:
        """Whether the accounts of limits may differ from the actor's since the last call."""
        found, self._is_unsure = self._is_unsure, False
        return found

    def _end(self, request_id: str, ticket: str) -> Refuse:
        """End a request that waited, wherever the action has left it."""
        self._pending.remove(request_id)
        if self._in_flight.end(request_id, 0, 0) is None:  # else its end returns what it was granted
            self._router_session.put(messages.Cancel(ticket))
        return lost(request_id)
