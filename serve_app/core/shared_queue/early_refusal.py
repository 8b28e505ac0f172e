"""Early refusal: a router refuses a request that, by the actor's last figures, would wait too long.

The router computes the actor's forecast: the figures have its inputs at the time of the acknowledged event, and
requests submitted since are added. So the expected wait is per tenant, as at the actor.

Figures are valid for `FIGURES_VALID_S`; older ones refuse nothing, since the queue may have moved on. Where figures are
incomplete (waiting tenants beyond `MAX_TENANTS_REPORTED`, new requests of other routers), the wait is underestimated,
and the actor decides.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict, deque
from collections.abc import Mapping

from serve_app.core.queue import (
    DEFAULT_RETRY_AFTER_S,
    MAX_RETRY_AFTER_S,
    Admission,
    Arrival,
    Backlog,
    QueuedAmount,
    QueuePolicy,
    RefusalReason,
    Refuse,
)
from serve_app.core.shared_queue.delivery import RouterSession
from serve_app.core.shared_queue.messages import DEFAULT_POLICY, MAX_TENANTS_REPORTED, ClassQueueFigures
from serve_app.types import RequestClass

FIGURES_VALID_S = 0.5  # half of a queue with a second's work is served by then; the actor answers within milliseconds


class EarlyRefusal:
    """The last figures received, and requests submitted since. O(classes + tenants in the figures).

    Args:
        policies: by model, with the tenants' weights.
    """

    def __init__(self, router_session: RouterSession, policies: Mapping[str, QueuePolicy]) -> None:
        self._router_session = router_session
        self._policies = policies
        self.reset()

    def reset(self) -> None:
        """A new incarnation: no figures received, no requests submitted."""
        self._figures_sent_at = -math.inf
        # number of the event, queue (model and class), tenant, slots
        self._uncounted_events: deque[tuple[int, tuple[str, RequestClass], str, int]] = deque()
        # slots of these by queue, and by queue and tenant
        self._uncounted: Counter[tuple[str, RequestClass]] = Counter()
        self._uncounted_tenants: defaultdict[tuple[str, RequestClass], Counter[str]] = defaultdict(Counter)

    def on_handed_in(self, number: int, model: str, arrival: Arrival) -> None:
        """A request was submitted with the event of this number, which the figures do not include yet."""
        queue = (model, arrival.request_class)
        tenant = arrival.tenant
        slots = arrival.slots
        self._uncounted_events.append((number, queue, tenant, slots))
        self._uncounted[queue] += slots
        self._uncounted_tenants[queue][tenant] += slots

    def on_reply(self, sent_at: float, last_taken_event: int) -> None:
        """The actor has answered a message sent at `sent_at`; its figures include all up to this event."""
        self._figures_sent_at = max(self._figures_sent_at, sent_at)
        while self._uncounted_events and self._uncounted_events[0][0] <= last_taken_event:
            _, queue, tenant, slots = self._uncounted_events.popleft()
            tenants = self._uncounted_tenants[queue]
            self._uncounted[queue] -= slots
            tenants[tenant] -= slots
            if not tenants[tenant]:
                del tenants[tenant]
            if not tenants:
                del self._uncounted[queue], self._uncounted_tenants[queue]

    def expected_wait_s(self, model: str, arrival: Arrival) -> float | None:
        """The expected wait of an arrival; None: not measured."""
        request_class = arrival.request_class
        tenant = arrival.tenant
        figures = self._router_session.figures.get(model)
        if figures is None:
            return None
        found = figures.classes[request_class]
        policy = self._policies.get(model, DEFAULT_POLICY)
        backlog = self._backlog(model, request_class, found)
        weight = policy.weight(tenant)
        own = (found.tenant_slots or {}).get(tenant, 0)
        uncounted = self._uncounted_tenants.get((model, request_class))
        if uncounted is not None:
            own += uncounted[tenant]
            if found.tenant_slots is not None:
                some = itertools.islice(uncounted, MAX_TENANTS_REPORTED)
                new = sum(policy.weight(one) for one in some if one not in found.tenant_slots)
                backlog = backlog._replace(waiting_weight=backlog.waiting_weight + new)
        return backlog.arrival_wait_s(arrival.slots, own, weight)

    def refusal_reason(self, model: str, arrival: Arrival, now: float) -> RefusalReason | None:
        """The reason to refuse a request early; None: submit it."""
        figures = self._router_session.figures.get(model)
        if (
            arrival.accepted
            or figures is None
            or model not in self._router_session.state.contended
            or now > self._figures_sent_at + FIGURES_VALID_S
        ):
            return None
        found = figures.classes[arrival.request_class]
        if found.is_full:
            return RefusalReason.QUEUE_FULL
        backlog = self._backlog(model, arrival.request_class, found)
        if not (backlog.slots_above or backlog.slots):
            return None  # as in `Admission`: the next request is not refused for a forecast
        wait_s = self.expected_wait_s(model, arrival)
        if wait_s is None:
            return None
        if arrival.deadline is not None and now + wait_s > arrival.deadline:
            return RefusalReason.DEADLINE
        return RefusalReason.TIMEOUT if wait_s > self._policies.get(model, DEFAULT_POLICY).max_wait_s else None

    def full(self, model: str) -> str:
        """How many wait of how many, by the actor's last figures (`QueuePolicy.exceeded`); empty: tokens fill the
        queue, which the figures do not have."""
        figures = self._router_session.figures[model]
        waiting = QueuedAmount(sum(one.waiting for one in figures.classes), 0)
        return self._policies.get(model, DEFAULT_POLICY).exceeded(min(RequestClass), QueuedAmount(0, 0), waiting, 0)

    def refusal(self, model: str, arrival: Arrival, reason: RefusalReason, full: str = "") -> Refuse:
        """The refusal, with the expected wait as retry time."""
        wait_s = self.expected_wait_s(model, arrival)
        retry_s = DEFAULT_RETRY_AFTER_S if wait_s is None else min(wait_s, MAX_RETRY_AFTER_S)
        return Refuse(arrival.request_id, reason, retry_s, full)

    def _backlog(self, model: str, request_class: RequestClass, found: ClassQueueFigures) -> Backlog:
        """The backlog of the figures plus requests submitted since."""
        if not self._uncounted:
            return found.backlog
        above = sum(self._uncounted[model, level] for level in RequestClass if level > request_class)
        slots = found.backlog.slots + self._uncounted[model, request_class]
        return found.backlog._replace(slots_above=found.backlog.slots_above + above, slots=slots)


def class_figures(admission: Admission) -> tuple[ClassQueueFigures, ...]:
    """At the actor: the figures of a queue, by class, from the lowest."""
    claimed = dict(admission.ahead(min(RequestClass)))
    return tuple(
        ClassQueueFigures(
            claimed.get(level, 0),
            admission.is_full(level),
            admission.forecast.backlog(level),
            admission.slots_by_tenant(level, MAX_TENANTS_REPORTED),
        )
        for level in RequestClass
    )
