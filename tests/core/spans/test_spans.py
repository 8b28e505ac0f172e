"""The spans of a request lie within each other, in order, and have each wait, run, stop and continuation."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.semconv import schemas
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.semconv.attributes import error_attributes, http_attributes, server_attributes, service_attributes

from serve_app.core.limits import LimitReason
from serve_app.core.queue import WaitReason
from serve_app.core.receipts import Receipt, RequestTrace
from serve_app.core.spans import AttemptEnd, RequestFacts, RequestTimeline, SpanRecord, TraceRecord, build
from serve_app.core.spans import attributes as names
from serve_app.core.spans.context import SpanContext
from serve_app.core.spans.records import SpanKind
from serve_app.core.spans.spans import MAX_SPANS
from serve_app.core.spans.timeline import MAX_ATTEMPTS
from serve_app.router.runs import RunEnd
from serve_app.types import Operation, Outcome, RequestClass

CONTEXT = SpanContext(trace_id=0xABC, span_id=0xDEF, parent_id=0x123, is_parent_sampled=True)
ARRIVED = 1000.0
STREAM = RequestFacts(Operation.CHAT, is_streamed=True, status=200, cached_tokens=3)
RECEIPT = Receipt(
    request_id="r",
    request_class=RequestClass.HIGH,
    tenant="acme",
    model="llama",
    outcome=Outcome.OK,
    arrived=ARRIVED,
    wait_s=1.0,
    total_s=10.0,
    granted=True,
    first_token_s=2.0,
    prompt_tokens=5,
    output_tokens=7,
    trace=RequestTrace(ahead=((RequestClass.NORMAL, 2), (RequestClass.HIGH, 1))),
)


def answered(at: float = ARRIVED, reason: WaitReason | None = None) -> RequestTimeline:
    """A request that waits 1 s from `at` on, and then runs for 4 s."""
    timeline = RequestTimeline(CONTEXT)
    run(timeline, at, reason)
    return timeline


def run(
    timeline: RequestTimeline, at: float, reason: WaitReason | None = None, end: AttemptEnd = AttemptEnd.ANSWERED
) -> None:
    """An attempt of 5 s: a second each in the queue, to the first token, of tokens, and until the client has read."""
    timeline.on_queued(at)
    timeline.on_waited(reason, 1.0)
    timeline.on_begun(at + 1, "llama#1", "home")
    timeline.on_first_frame(at + 2)
    timeline.on_done(at + 4)
    lost = end in (AttemptEnd.CONTINUES, AttemptEnd.RESTARTS)
    timeline.on_ended(at + 5, end, "engine_failed" if lost else "")
    timeline.on_tokens(7, at + 2)


def built(timeline: RequestTimeline, receipt: Receipt = RECEIPT, facts: RequestFacts = STREAM) -> TraceRecord:
    return build(timeline, receipt, facts, random.Random(3))


def named(trace: TraceRecord, name: str) -> list[SpanRecord]:
    return [span for span in trace.spans if span.name == name]


def only(trace: TraceRecord, name: str) -> SpanRecord:
    (span,) = named(trace, name)
    return span


def test_an_answered_request_has_its_wait_its_run_and_its_relay() -> None:
    trace = built(answered())
    assert [span.name for span in trace.spans] == ["chat llama", "queue", "run", "relay"]
    request, queue, on_replica, relay = trace.spans
    assert (request.span_id, request.parent_id, request.kind) == (0xDEF, 0x123, SpanKind.SERVER)
    assert [(span.start, span.end) for span in trace.spans] == [
        (ARRIVED, ARRIVED + 10),
        (ARRIVED, ARRIVED + 1),
        (ARRIVED + 1, ARRIVED + 4),
        (ARRIVED + 2, ARRIVED + 5),
    ]
    assert {span.parent_id for span in (queue, on_replica, relay)} == {request.span_id}
    assert on_replica.kind is SpanKind.CLIENT
    assert [(event.name, event.at) for event in on_replica.events] == [(names.FIRST_TOKEN, ARRIVED + 2)]
    assert dict(on_replica.attributes) == {
        names.REPLICA: "llama#1",
        names.ROUTE: "home",
        names.RUN_END: "answered",
        names.OUTPUT_TOKENS: 7,
    }
    assert queue.attributes == {names.AHEAD: 3}


def test_the_request_s_own_span_has_the_attributes_of_the_conventions() -> None:
    timeline = answered()
    timeline.server = "llm.example:8443"
    (request, *_) = built(timeline).spans
    assert request.attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "serve_app",
        "gen_ai.request.model": "llama",
        "gen_ai.request.stream": True,
        "gen_ai.response.time_to_first_chunk": 2.0,
        "gen_ai.usage.input_tokens": 5,
        "gen_ai.usage.cache_read.input_tokens": 3,
        "gen_ai.usage.output_tokens": 7,
        "http.response.status_code": 200,
        "server.address": "llm.example",
        "server.port": 8443,
        "serve_app.request.id": "r",
        "serve_app.tenant": "acme",
        "serve_app.class": "high",
        "serve_app.outcome": "ok",
        "serve_app.first_token_s": 2.0,
    }
    assert request.error is None


@pytest.mark.parametrize(
    ("called", "expected"),
    [
        ("", {}),
        ("llm.example", {names.SERVER_ADDRESS: "llm.example"}),
        ("[::1]:80", {names.SERVER_ADDRESS: "::1", names.SERVER_PORT: 80}),
        ("[::1]", {names.SERVER_ADDRESS: "::1"}),
        ("a:123456", {names.SERVER_ADDRESS: "a:123456"}),
        ("a:", {names.SERVER_ADDRESS: "a:"}),
    ],
)
def test_the_address_is_the_one_that_the_client_has_called(called: str, expected: dict[str, object]) -> None:
    timeline = replace(answered(), server=called)
    found = built(timeline).spans[0].attributes
    assert {name: found[name] for name in (names.SERVER_ADDRESS, names.SERVER_PORT) if name in found} == expected


@pytest.mark.parametrize("operation", Operation)
def test_every_operation_has_a_name(operation: Operation) -> None:
    (request, *_) = built(answered(), facts=RequestFacts(operation)).spans
    values = {one.value for one in gen_ai_attributes.GenAiOperationNameValues}
    found = request.attributes[names.OPERATION]
    assert request.name == f"{found} llama"
    assert found in values or found == operation.value
    assert (found in values) == (operation.generates or operation in (Operation.EMBEDDING, Operation.EMBED))


def test_a_request_without_a_model_is_named_by_its_operation_alone() -> None:
    assert built(RequestTimeline(CONTEXT), replace(RECEIPT, model="")).spans[0].name == "chat"


@pytest.mark.parametrize("reason", WaitReason)
def test_every_reason_of_a_wait_is_an_event(reason: WaitReason) -> None:
    queue = only(built(answered(reason=reason)), "queue")
    (event,) = queue.events
    assert (event.name, event.at) == (names.WAITED, queue.end)
    assert event.attributes == {names.REASON: reason.value, names.WAIT_S: 1.0}


def test_a_charge_against_limits_is_a_span() -> None:
    timeline = answered()
    timeline.limits_at = ARRIVED + 0.25
    timeline.limits_until = ARRIVED + 0.5
    limits = only(built(timeline), "limits")
    assert (limits.start, limits.end, limits.parent_id) == (ARRIVED + 0.25, ARRIVED + 0.5, CONTEXT.span_id)


@pytest.mark.parametrize(
    ("end", "stop", "resume", "is_lost"),
    [
        (AttemptEnd.PREEMPTED, names.PREEMPTED, names.CONTINUED, False),
        (AttemptEnd.MOVED, names.MOVED, names.CONTINUED, False),
        (AttemptEnd.CONTINUES, names.LOST, names.CONTINUED, True),
        (AttemptEnd.RESTARTS, names.LOST, names.RESTARTED, True),
    ],
)
def test_a_stop_and_what_follows_it_are_events_of_the_two_runs(
    end: AttemptEnd, stop: str, resume: str, is_lost: bool
) -> None:
    timeline = RequestTimeline(CONTEXT)
    run(timeline, ARRIVED, end=end)
    run(timeline, ARRIVED + 5)
    trace = built(timeline)
    first, second = named(trace, "run")
    assert [span.name for span in trace.spans[1:]] == ["queue", "run", "relay"] * 2
    assert [event.name for event in first.events] == [names.FIRST_TOKEN, stop]
    assert first.events[-1].at == first.end
    assert first.error == ("engine_failed" if is_lost else None)
    assert [event.name for event in second.events if event.name == resume] == [resume]
    (gap_s,) = [event.attributes[names.GAP_S] for event in second.events if event.name == resume]
    assert gap_s == 2.0  # from the end of the first run to the first frame of the second
    assert second.error is None
    assert len([span for span in named(trace, "queue") if names.AHEAD in span.attributes]) == 1


def test_the_first_token_is_in_the_run_that_made_it() -> None:
    timeline = RequestTimeline(CONTEXT)
    run(timeline, ARRIVED, end=AttemptEnd.CONTINUES)
    run(timeline, ARRIVED + 5)
    timeline.attempts[-1].first_token_at = None
    timeline.on_tokens(3, ARRIVED + 2)  # a run that continues keeps the first one's moment
    runs = named(built(timeline), "run")
    assert [sum(event.name == names.FIRST_TOKEN for event in span.events) for span in runs] == [1, 0]


def test_the_tokens_of_a_run_are_those_that_it_made_itself() -> None:
    timeline = RequestTimeline(CONTEXT)
    run(timeline, ARRIVED, end=AttemptEnd.PREEMPTED)
    timeline.on_queued(ARRIVED + 5)
    timeline.on_begun(ARRIVED + 6, "llama#2", "", earlier_tokens=7)
    timeline.on_ended(ARRIVED + 8, AttemptEnd.ANSWERED, "")
    timeline.on_tokens(12, ARRIVED + 2)
    assert [span.attributes[names.OUTPUT_TOKENS] for span in named(built(timeline), "run")] == [7, 5]


def test_a_refusal_ends_the_wait_with_its_code() -> None:
    timeline = RequestTimeline(CONTEXT)
    timeline.on_queued(ARRIVED + 1)
    timeline.on_refused("queue_full")
    receipt = replace(RECEIPT, outcome=Outcome.REFUSED, granted=False, retry_after_s=3.0)
    trace = built(timeline, receipt, RequestFacts(Operation.CHAT, status=429, error_code="queue_full"))
    request, queue = trace.spans
    assert (request.error, queue.error) == ("queue_full", "queue_full")
    assert request.attributes[names.ERROR_TYPE] == queue.attributes[names.ERROR_TYPE] == "queue_full"
    assert request.attributes[names.RETRY_AFTER_S] == 3.0
    assert (queue.start, queue.end) == (ARRIVED + 1, ARRIVED + 10)


def test_a_client_over_its_own_limit_is_no_error_of_the_server() -> None:
    receipt = replace(RECEIPT, outcome=Outcome.REFUSED)
    facts = RequestFacts(Operation.CHAT, status=429, error_code=LimitReason.RATE_LIMIT.value)
    (request,) = built(RequestTimeline(CONTEXT), receipt, facts).spans
    assert (request.error, request.attributes[names.HTTP_STATUS]) == (None, 429)


def test_what_ran_when_the_client_left_ends_with_the_request() -> None:
    timeline = RequestTimeline(CONTEXT)
    timeline.on_queued(ARRIVED)
    timeline.on_begun(ARRIVED + 1, "llama#1", "")
    timeline.on_first_frame(ARRIVED + 2)
    trace = built(timeline, replace(RECEIPT, outcome=Outcome.CANCELLED_RUNNING))
    assert [(span.name, span.end) for span in trace.spans[2:]] == [("run", ARRIVED + 10), ("relay", ARRIVED + 10)]
    assert only(trace, "run").attributes[names.RUN_END] == "cancelled"


def test_the_prompts_of_a_list_have_spans_of_their_own() -> None:
    timeline = RequestTimeline(CONTEXT)
    for number in range(2):
        run(timeline.part(), ARRIVED + number)
    trace = built(timeline)
    prompts = named(trace, "prompt")
    assert [span.attributes[names.NUMBER] for span in prompts] == [0, 1]
    assert {span.parent_id for span in prompts} == {CONTEXT.span_id}
    assert [span.parent_id for span in named(trace, "run")] == [span.span_id for span in prompts]


def test_a_request_has_a_bounded_number_of_spans_and_tells_how_many_are_missing() -> None:
    timeline = RequestTimeline(CONTEXT)
    for _ in range(100):
        run(timeline.part(), ARRIVED)
    trace = built(timeline)
    assert len(trace.spans) == MAX_SPANS
    assert trace.spans[0].attributes[names.DROPPED_SPANS] == 1 + 4 * 100 - MAX_SPANS
    known = {span.span_id for span in trace.spans} | {CONTEXT.parent_id}
    assert {span.parent_id for span in trace.spans} <= known


def test_a_request_that_is_stopped_all_the_time_keeps_its_first_attempts_and_its_last() -> None:
    timeline = RequestTimeline(CONTEXT)
    for number in range(2 * MAX_ATTEMPTS):
        run(timeline, ARRIVED + number / 100, end=AttemptEnd.PREEMPTED)
    assert len(timeline.attempts) == MAX_ATTEMPTS
    assert timeline.attempts[-1].queued_at == ARRIVED + (2 * MAX_ATTEMPTS - 1) / 100
    assert built(timeline).spans[0].attributes[names.DROPPED_SPANS] == MAX_ATTEMPTS


def test_the_ends_of_runs_are_those_of_the_router() -> None:
    words = {end.value for end in RunEnd if end is not RunEnd.STOPPED}
    assert words < {end.value for end in AttemptEnd}


def test_the_names_are_those_of_the_conventions() -> None:
    modules = (gen_ai_attributes, error_attributes, http_attributes, server_attributes, service_attributes)
    known = {value for module in modules for value in vars(module).values() if isinstance(value, str)}
    texts = {value for name, value in vars(names).items() if name.isupper() and isinstance(value, str)}
    theirs = {text for text in texts if text.startswith(("gen_ai.", "error.", "http.", "server.", "service."))}
    assert len(theirs) > 12
    assert theirs <= known
    assert names.SCHEMA_URL in {schema.value for schema in schemas.Schemas}


@st.composite
def timelines(draw: st.DrawFn) -> tuple[RequestTimeline, float]:
    """The timeline of any request, made as a router makes it, and the moment of its end."""
    now = ARRIVED

    def later() -> float:
        nonlocal now
        now += draw(st.sampled_from([0.0, 0.0, 0.125, 1.0, 30.0]))
        return now

    timeline = RequestTimeline(CONTEXT)
    if draw(st.booleans()):
        timeline.limits_at = later()
        timeline.limits_until = later() if draw(st.booleans()) else None
    parts = draw(st.integers(0, 3))
    for prompt in [timeline.part() for _ in range(parts)] or [timeline]:
        for _ in range(draw(st.integers(0, 4))):
            _attempt(draw, prompt, later)
    return timeline, later()


def _attempt(draw: st.DrawFn, timeline: RequestTimeline, later: Callable[[], float]) -> None:
    timeline.on_queued(later())
    if draw(st.booleans()):
        timeline.on_refused("timeout")
        return
    if draw(st.booleans()):
        return  # the client leaves, or the next attempt comes
    reason = draw(st.none() | st.sampled_from(WaitReason))
    timeline.on_waited(reason, 0.5)
    timeline.on_begun(later(), "llama#1", draw(st.sampled_from(["", "home"])))
    first_at = later()
    steps = draw(st.lists(st.sampled_from(["frame", "done", "ended"]), max_size=3, unique=True))
    for step in steps:
        if step == "frame":
            timeline.on_first_frame(later())
        elif step == "done":
            timeline.on_done(later())
        else:
            timeline.on_ended(later(), draw(st.sampled_from(AttemptEnd)), draw(st.sampled_from(["", "engine_failed"])))
            timeline.on_tokens(draw(st.integers(0, 9)), draw(st.none() | st.just(first_at)))


@given(drawn=timelines(), outcome=st.sampled_from(Outcome))
def test_spans_lie_within_their_parents_and_events_within_their_spans(
    drawn: tuple[RequestTimeline, float], outcome: Outcome
) -> None:
    timeline, end = drawn
    receipt = replace(RECEIPT, outcome=outcome, total_s=end - ARRIVED)
    trace = built(timeline, receipt)
    seen = dict[int, SpanRecord]()
    for span in trace.spans:
        assert span.span_id not in seen
        assert span.start <= span.end
        if seen:
            parent = seen[span.parent_id or 0]  # it comes before its children
            assert parent.start <= span.start
            assert span.end <= parent.end
        assert all(span.start <= event.at <= span.end for event in span.events)
        assert [event.at for event in span.events] == sorted(event.at for event in span.events)
        seen[span.span_id] = span


@given(drawn=timelines())
def test_every_wait_every_run_and_every_reason_is_in_the_trace(drawn: tuple[RequestTimeline, float]) -> None:
    timeline, end = drawn
    trace = built(timeline, replace(RECEIPT, total_s=end - ARRIVED))
    attempts = [attempt for one in [timeline, *timeline.parts] for attempt in one.attempts]
    assert len(named(trace, "queue")) == len(attempts)
    assert len(named(trace, "run")) == sum(attempt.began_at is not None for attempt in attempts)
    reasons = [event.attributes[names.REASON] for span in named(trace, "queue") for event in span.events]
    assert reasons == [attempt.waited_for.value for attempt in attempts if attempt.waited_for is not None]


@given(drawn=timelines())
def test_the_waits_and_runs_of_one_request_follow_each_other(drawn: tuple[RequestTimeline, float]) -> None:
    timeline, end = drawn
    trace = built(timeline, replace(RECEIPT, total_s=end - ARRIVED))
    by_parent: dict[int | None, list[SpanRecord]] = {}
    for span in trace.spans:
        if span.name in ("queue", "run"):
            by_parent.setdefault(span.parent_id, []).append(span)
    for spans in by_parent.values():
        assert all(earlier.end <= later.start for earlier, later in itertools.pairwise(spans))
