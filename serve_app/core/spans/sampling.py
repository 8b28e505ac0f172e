"""Which traces are sent. Pure.

A caller's decision holds. Without a caller it is made at the end of the request: a part of all traces, and each one
that failed or was slow.

Invariant: whether a trace is in the part depends on its id and the ratio alone, by the rule of OpenTelemetry's SDKs for
Python and Go (`TraceIdRatioBased`), so that services with the same ratio send the same traces.
"""

from __future__ import annotations

from serve_app.core.limits import LimitReason
from serve_app.core.spans.context import SpanContext
from serve_app.types import Outcome

ID_RANGE = 2**64  # of the lower half of a trace id, which decides
_FAILURES = frozenset({Outcome.ENGINE_FAILED, Outcome.INTERNAL_ERROR, Outcome.REFUSED})
_BY_LIMITS = frozenset(reason.value for reason in LimitReason)


def has_sampled_id(context: SpanContext, ratio: float) -> bool:
    """Whether the trace is sent, however the request ends."""
    if context.is_parent_sampled is not None:
        return context.is_parent_sampled
    return context.trace_id % ID_RANGE < round(ratio * ID_RANGE)


def is_sampled(
    context: SpanContext, ratio: float, outcome: Outcome, error_code: str | None, first_token_s: float, slow_s: float
) -> bool:
    """Whether the trace of an ended request is sent.

    Args:
        error_code: of the error that ended it.
        first_token_s: from its arrival to its first token, or to its end without one.
        slow_s: above this the request was slow.
    """
    if context.is_parent_sampled is not None:
        return context.is_parent_sampled
    return has_failed(outcome, error_code) or first_token_s > slow_s or has_sampled_id(context, ratio)


def has_failed(outcome: Outcome, error_code: str | None) -> bool:
    """Whether it was this system that failed. A request over a limit of its own key or tenant has not: its client has
    sent too many.

    Args:
        error_code: of the error that ended the request.
    """
    return outcome in _FAILURES and error_code not in _BY_LIMITS
