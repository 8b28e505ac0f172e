"""`traceparent` and `tracestate` are read as OpenTelemetry's own library reads them."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry import trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from serve_app.core.spans import begin_context, has_sampled_id, passed_on, row_context, trace_of
from serve_app.core.spans.context import MAX_STATE_CHARS, SpanContext

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
SPAN = "00f067aa0ba902b7"
PARENT = f"00-{TRACE}-{SPAN}-01"

hex_digits = st.sampled_from("0123456789abcdefA0-")
# mostly valid headers, with a fault here and there
headers = st.one_of(
    st.builds(
        lambda version, trace_id, span_id, flags, more: f"{version}-{trace_id}-{span_id}-{flags}{more}",
        st.sampled_from(["00", "01", "cc", "ff", "0", "0g"]),
        st.sampled_from([TRACE, "0" * 32, TRACE.upper(), TRACE[:-1]]),
        st.sampled_from([SPAN, "0" * 16, SPAN[:-1]]),
        st.sampled_from(["00", "01", "02", "03", "ff", "1", "zz"]),
        st.sampled_from(["", "-", "-more", "more", " ", "\t"]),
    ),
    st.text(hex_digits, max_size=60),
)


def begun(traceparent: str | None, tracestate: str | None = None) -> SpanContext:
    state = None if tracestate is None else tracestate.encode("latin-1")
    return begin_context(None if traceparent is None else traceparent.encode("latin-1"), state, random.Random(7))


@given(header=st.none() | headers)
def test_the_trace_in_logs_is_the_one_that_a_request_joins(header: str | None) -> None:
    context = begun(header)
    joined = context.trace_hex if context.parent_id is not None else ""
    passed = passed_on(None if header is None else header.encode("latin-1"))
    assert trace_of(passed) == joined
    if passed:
        assert begun(passed) == replace(context, state=""), "what goes on to an engine has the same meaning"


@given(header=headers)
def test_a_header_counts_exactly_where_the_library_reads_it(header: str) -> None:
    read = TraceContextTextMapPropagator().extract({"traceparent": header})
    expected = trace.get_current_span(read).get_span_context()
    found = begun(header)
    if not expected.is_valid:
        assert (found.parent_id, found.is_parent_sampled) == (None, None)
        return
    assert (found.trace_id, found.parent_id) == (expected.trace_id, expected.span_id)
    assert found.is_parent_sampled == expected.trace_flags.sampled


def test_a_request_with_a_caller_is_a_span_of_its_own_in_the_caller_s_trace() -> None:
    found = begun(PARENT, "vendor=opaque")
    assert (found.trace_hex, f"{found.parent_id:016x}", found.state) == (TRACE, SPAN, "vendor=opaque")
    assert found.span_id not in (0, found.parent_id)


def test_a_request_without_a_caller_begins_a_trace() -> None:
    first = begin_context(None, b"vendor=opaque", random.Random(1))
    second = begin_context(None, None, random.Random(2))
    assert (first.parent_id, first.state) == (None, "")
    assert 0 not in (first.trace_id, first.span_id)
    assert first.trace_id != second.trace_id


@pytest.mark.parametrize(("length", "kept"), [(MAX_STATE_CHARS, True), (MAX_STATE_CHARS + 1, False)])
def test_a_state_that_is_too_long_is_dropped_as_a_whole(length: int, kept: bool) -> None:
    state = "a=" + "b" * (length - 2)
    assert begun(PARENT, state).state == (state if kept else "")


@pytest.mark.parametrize("is_sampled", [True, False])
def test_the_header_of_the_answer_can_be_read_as_a_traceparent(is_sampled: bool) -> None:
    context = begun(PARENT)
    found = begun(context.header(is_sampled=is_sampled))
    assert (found.trace_id, found.parent_id, found.is_parent_sampled) == (context.trace_id, context.span_id, is_sampled)


def test_the_runs_of_a_row_are_in_one_trace_that_nobody_has_decided_about() -> None:
    first, again = (row_context("batch_1-7", random.Random(seed)) for seed in (1, 2))
    assert first.trace_id == again.trace_id
    assert first.span_id != again.span_id
    assert (first.parent_id, first.is_parent_sampled) == (None, None)
    assert row_context("batch_1-8", random.Random(1)).trace_id != first.trace_id


def test_rows_are_sampled_as_their_ratio_says() -> None:
    count = sum(has_sampled_id(row_context(f"batch_1-{number}", random.Random(1)), 0.1) for number in range(5_000))
    assert 400 < count < 600, "the digest spreads them evenly"
