"""Which traces are sent: the caller decides, else the trace's id; failed and slow requests are always sent."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace.sampling import Decision, TraceIdRatioBased

from serve_app.core.limits import LimitReason
from serve_app.core.queue import RefusalReason
from serve_app.core.spans.context import SpanContext
from serve_app.core.spans.sampling import has_sampled_id, is_sampled
from serve_app.types import Outcome

SLOW_S = 10.0
FAILED = (Outcome.REFUSED, Outcome.ENGINE_FAILED, Outcome.INTERNAL_ERROR)

trace_ids = st.integers(1, 2**128 - 1)
ratios = st.floats(0, 1)


def sampled(
    context: SpanContext,
    ratio: float = 0.0,
    outcome: Outcome = Outcome.OK,
    code: str | None = None,
    first_token_s: float = 0.1,
) -> bool:
    return is_sampled(context, ratio, outcome, code, first_token_s, SLOW_S)


@given(trace_id=trace_ids, ratio=ratios)
def test_the_id_decides_as_in_the_sdk(trace_id: int, ratio: float) -> None:
    expected = TraceIdRatioBased(ratio).should_sample(None, trace_id, "request").decision
    assert has_sampled_id(SpanContext(trace_id, 1), ratio) == (expected is Decision.RECORD_AND_SAMPLE)


@given(trace_id=trace_ids, ratio=ratios, higher=ratios)
def test_a_trace_that_a_ratio_takes_is_taken_by_every_higher_one(trace_id: int, ratio: float, higher: float) -> None:
    context = SpanContext(trace_id, 1)
    low, high = sorted((ratio, higher))
    assert has_sampled_id(context, high) or not has_sampled_id(context, low)


@given(
    trace_id=trace_ids,
    ratio=ratios,
    outcome=st.sampled_from(Outcome),
    first_token_s=st.floats(0, 100),
    by_caller=st.booleans(),
)
def test_the_caller_s_decision_holds_however_the_request_ends(
    trace_id: int, ratio: float, outcome: Outcome, first_token_s: float, by_caller: bool
) -> None:
    context = SpanContext(trace_id, 1, 2, by_caller)
    assert has_sampled_id(context, ratio) == by_caller
    assert sampled(context, ratio, outcome, None, first_token_s) == by_caller


@pytest.mark.parametrize("outcome", Outcome)
def test_what_failed_is_always_sent_and_what_the_client_did_is_not(outcome: Outcome) -> None:
    assert sampled(SpanContext(1, 1), 0.0, outcome) == (outcome in FAILED)


@pytest.mark.parametrize("reason", [*RefusalReason, *LimitReason])
def test_a_refusal_of_the_queue_is_always_sent_and_one_of_the_client_s_own_limit_is_not(
    reason: RefusalReason | LimitReason,
) -> None:
    found = sampled(SpanContext(1, 1), 0.0, Outcome.REFUSED, reason.value)
    assert found == isinstance(reason, RefusalReason)


@pytest.mark.parametrize(("first_token_s", "expected"), [(SLOW_S, False), (SLOW_S + 0.001, True)])
def test_a_slow_request_is_always_sent(first_token_s: float, expected: bool) -> None:
    assert sampled(SpanContext(1, 1), first_token_s=first_token_s) == expected
