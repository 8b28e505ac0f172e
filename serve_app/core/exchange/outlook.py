"""What the actor's last figures say of a request that is about to wait: the early refusals of a router.

Figures are good for `FIGURES_GOOD_S`; older ones refuse nobody, since the line may have moved on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from serve_app.core.admission import DEFAULT_RETRY_AFTER_S, MAX_RETRY_AFTER_S
from serve_app.core.exchange.link import Link
from serve_app.core.waiting.events import Arrival, Reason, Refuse
from serve_app.types import RequestClass

FIGURES_GOOD_S = 0.5  # a line of a second's work moves by half; the actor answers within milliseconds anyway


class Outlook:
    """The last figures that a link has brought. O(1)."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._at = -math.inf

    def heard(self, sent_at: float) -> None:
        """The actor has answered what was sent at that moment."""
        self._at = max(self._at, sent_at)

    def waiting(self, model: str) -> dict[RequestClass, int]:
        """Who waits for a model, of all routers, by class; nothing where nobody does."""
        figures = self._link.figures.get(model)
        if figures is None or model not in self._link.contended:
            return {}
        return dict(zip(RequestClass, figures.waiting, strict=True))

    def wait_s(self, model: str, request_class: RequestClass) -> float | None:
        """What an arrival of this class has ahead of it; None: not measured."""
        figures = self._link.figures.get(model)
        return None if figures is None else figures.wait_s[request_class]

    def hopeless(self, model: str, arrival: Arrival, now: float, own: Mapping[RequestClass, int]) -> Reason | None:
        """Why a request is refused without a question; None: it is not. `own`: who waits of this router by now."""
        figures = self._link.figures.get(model)
        if arrival.accepted or figures is None or model not in self._link.contended or now > self._at + FIGURES_GOOD_S:
            return None
        if figures.full[arrival.request_class]:
            return Reason.QUEUE_FULL
        if arrival.deadline is None or not any(
            figures.waiting[level] or own[level] for level in RequestClass if level >= arrival.request_class
        ):
            return None  # as in `Admission`: who is next is not refused for a forecast
        wait_s = self.wait_s(model, arrival.request_class)
        return Reason.DEADLINE if wait_s is not None and now + wait_s > arrival.deadline else None

    def refusal(self, model: str, arrival: Arrival, reason: Reason) -> Refuse:
        """The refusal, with the wait that the figures predict."""
        wait_s = self.wait_s(model, arrival.request_class)
        retry_s = DEFAULT_RETRY_AFTER_S if wait_s is None else min(wait_s, MAX_RETRY_AFTER_S)
        return Refuse(arrival.request_id, reason, retry_s)
