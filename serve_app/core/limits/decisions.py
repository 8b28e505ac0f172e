"""What becomes of a request at its limits, as a router tells it."""

from __future__ import annotations

from dataclasses import dataclass

from serve_app.core.limits.policy import LimitReason


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request is not charged. `limit`: in words, empty if the limits could not be charged at all."""

    request_id: str
    reason: LimitReason
    limit: str
    retry_after_s: float | None


@dataclass(frozen=True, slots=True)
class Charged:
    """A request is charged, and may run; `waited_s` after it came."""

    request_id: str
    waited_s: float


LimitDecision = Charged | Refusal
