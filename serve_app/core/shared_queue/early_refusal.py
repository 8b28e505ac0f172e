"""What the actor's last figures say of a request that is about to wait: the early refusals of a router.

They are the actor's own forecast, made here: the figures have what it is made of, as it was when the actor had taken
what it acknowledges, and who was handed in since then is added. So a tenant's wait is its own, here as there.

Figures are good for `FIGURES_GOOD_S`; older ones refuse nobody, since the line may have moved on. Where they do not
have all (who of many tenants waits, what other routers hand in meanwhile) the wait is taken for shorter than it is, and
the actor decides.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from serve_app.core.queue import DEFAULT_RETRY_AFTER_S, MAX_RETRY_AFTER_S, Arrival, Backlog, Policy, Reason, Refuse
from serve_app.core.shared_queue.delivery import LANES, Queued
from serve_app.core.shared_queue.messages import UNTOLD
from serve_app.core.shared_queue.router_session import Link
from serve_app.types import RequestClass

FIGURES_GOOD_S = 0.5  # a line of a second's work moves by half; the actor answers within milliseconds anyway


@dataclass(slots=True)
class Unheard:
    """Requests of a class of which the figures do not know yet: their slots, in all and by tenant."""

    slots: int = 0
    tenants: Counter[str] = field(default_factory=Counter)

    def add(self, tenant: str, slots: int) -> None:
        """So many more; below zero: less."""
        self.slots += slots
        self.tenants[tenant] += slots
        if not self.tenants[tenant]:
            del self.tenants[tenant]


class Outlook:
    """The last figures that a link has brought, and who was handed in since. O(classes + tenants in the figures).

    Args:
        policies: by model, with the tenants' weights.
    """

    def __init__(self, link: Link, policies: Mapping[str, Policy]) -> None:
        self._link, self._policies = link, policies
        self.begin()

    def begin(self) -> None:
        """Nothing was heard, and nobody handed in: another incarnation."""
        self._at = -math.inf
        self._events: deque[tuple[int, str, RequestClass, str, int]] = deque()  # numbers, whose, and the slots wanted
        self._unheard: dict[tuple[str, RequestClass], Unheard] = {}  # these, by model and class

    def handed_in(self, number: int, model: str, arrival: Arrival) -> None:
        """A request was handed in with the event of this number."""
        level, tenant, slots = arrival.request_class, arrival.tenant, arrival.slots
        self._events.append((number, model, level, tenant, slots))
        self._unheard.setdefault((model, level), Unheard()).add(tenant, slots)

    def heard(self, sent_at: float, ack: int) -> None:
        """The actor has answered what was sent at that moment, and all up to this event is in its figures."""
        self._at = max(self._at, sent_at)
        while self._events and self._events[0][0] <= ack:
            _, model, level, tenant, slots = self._events.popleft()
            unheard = self._unheard[model, level]
            unheard.add(tenant, -slots)
            if not unheard.slots:
                del self._unheard[model, level]

    def ahead(
        self, model: str, request_class: RequestClass, own: Mapping[RequestClass, int]
    ) -> tuple[tuple[RequestClass, int], ...]:
        """See `RemoteLine.ahead`; `own`: this router's requests that wait."""
        waiting, figures = dict(own), self._link.figures.get(model)
        if figures is not None and model in self._link.contended:
            waiting = {level: max(figures.classes[level].waiting, own[level]) for level in RequestClass}
        return tuple((who, waiting[who]) for who in reversed(RequestClass) if who >= request_class and waiting[who])

    def wait_s(self, model: str, request_class: RequestClass, tenant: str, slots: int) -> float | None:
        """The wait that a newcomer has before it; None: not measured."""
        figures = self._link.figures.get(model)
        if figures is None:
            return None
        found = figures.classes[request_class]
        policy = self._policies.get(model, UNTOLD)
        backlog, weight = self._backlog(model, request_class, found), policy.weight(tenant)
        own = (found.lanes or {}).get(tenant, 0)
        unheard = self._unheard.get((model, request_class))
        if unheard is not None:
            own += unheard.tenants[tenant]
            if found.lanes is not None:
                some = itertools.islice(unheard.tenants, LANES)
                new = sum(policy.weight(one) for one in some if one not in found.lanes)
                backlog = backlog._replace(weight=backlog.weight + new)
        return backlog.newcomer_s(slots, own, weight)

    def hopeless(self, model: str, arrival: Arrival, now: float) -> Reason | None:
        """Why a request is refused without a question; None: it is not."""
        figures = self._link.figures.get(model)
        if arrival.accepted or figures is None or model not in self._link.contended or now > self._at + FIGURES_GOOD_S:
            return None
        found = figures.classes[arrival.request_class]
        if found.full:
            return Reason.QUEUE_FULL
        backlog = self._backlog(model, arrival.request_class, found)
        if not (backlog.above or backlog.slots):
            return None  # as in `Admission`: who is next is not refused for a forecast
        wait_s = self.wait_s(model, arrival.request_class, arrival.tenant, arrival.slots)
        if wait_s is None:
            return None
        if arrival.deadline is not None and now + wait_s > arrival.deadline:
            return Reason.DEADLINE
        return Reason.TIMEOUT if wait_s > self._policies.get(model, UNTOLD).max_wait_s else None

    def refusal(self, model: str, arrival: Arrival, reason: Reason) -> Refuse:
        """The refusal, with the wait that the figures predict."""
        wait_s = self.wait_s(model, arrival.request_class, arrival.tenant, arrival.slots)
        retry_s = DEFAULT_RETRY_AFTER_S if wait_s is None else min(wait_s, MAX_RETRY_AFTER_S)
        return Refuse(arrival.request_id, reason, retry_s)

    def _backlog(self, model: str, request_class: RequestClass, found: Queued) -> Backlog:
        """That of the figures with who was handed in since."""
        if not self._unheard:
            return found.backlog
        wanted = {level: self._unheard[model, level].slots for level in RequestClass if (model, level) in self._unheard}
        above = sum(slots for level, slots in wanted.items() if level > request_class)
        slots = found.backlog.slots + wanted.get(request_class, 0)
        return found.backlog._replace(above=found.backlog.above + above, slots=slots)
