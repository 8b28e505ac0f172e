"""Spans reach a collector by its own protocol; one that is away, slow or full costs a request nothing but its spans."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from serve_app.core.spans import SpanRecord, TraceRecord
from serve_app.core.spans import attributes as names
from serve_app.core.spans.context import SpanContext
from serve_app.core.spans.records import SpanEvent, SpanKind
from serve_app.http import span_export
from serve_app.http.span_export import SpanExport
from serve_app.names import RELEASE
from tests.fakes.asgi_client import Client, ask, started
from tests.fakes.engines import MODEL, FakeCluster, model, run
from tests.fakes.otlp_receiver import OtlpReceiver, attributes_of, otlp_receiver
from tests.waiting import quiet_time, wait_until

STATE = "vendor=opaque,other=x"
CONTEXT = SpanContext(0xABCDEF << 100, 0x1234, 0x5678, True, STATE)
EPOCH_S = 1_700_000_000.0
SOON_S = 30.0  # real time in which the SDK's thread has sent what waits, on a busy machine
AT_ONCE_S = 5.0  # real time of what waits for nothing there; the SDK gives up a collector after 10 s
BATCH_MS = "20"


@pytest.fixture(autouse=True)
def sends_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", BATCH_MS)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20secret,x-team=ml")


@pytest.fixture
def receiver() -> Iterator[OtlpReceiver]:
    with otlp_receiver() as opened:
        yield opened


@pytest.fixture
def lines() -> Iterator[list[str]]:
    """Warnings of the router's log."""
    found: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    handler = Handler(logging.WARNING)
    logger = logging.getLogger("ray.serve")
    logger.addHandler(handler)
    yield found
    logger.removeHandler(handler)


def uncounted(reason: str, spans: int) -> None:
    """Takes the place of the metric."""


class Dropped(Counter[str]):
    """The metric: spans by the reason of their drop."""

    def count(self, reason: str, spans: int) -> None:
        self[reason] += spans


def trace(spans: int = 2) -> TraceRecord:
    """A request of so many spans."""
    request = SpanRecord(
        "chat m",
        CONTEXT.span_id,
        CONTEXT.parent_id,
        SpanKind.SERVER,
        1.0,
        5.0,
        {names.MODEL: "m", names.INPUT_TOKENS: 3, names.FIRST_TOKEN_S: 0.5, names.STREAM: True},
        error="engine_failed",
    )
    rng = random.Random(5)
    below = [
        SpanRecord(
            "queue",
            rng.getrandbits(64) or 1,
            CONTEXT.span_id,
            SpanKind.INTERNAL,
            1.0,
            2.5,
            events=(SpanEvent(names.WAITED, 2.5, {names.REASON: "slots", names.WAIT_S: 1.5}),),
        )
        for _ in range(spans - 1)
    ]
    return TraceRecord(CONTEXT, (request, *below))


def eventually(condition: Callable[[], bool]) -> None:
    wait_until(condition, SOON_S, "the SDK's thread has sent it")


def test_a_collector_gets_ids_times_attributes_events_and_errors(receiver: OtlpReceiver) -> None:
    export = SpanExport(receiver.url + "/", "router-1", uncounted)
    export.send(trace(), EPOCH_S)
    eventually(lambda: len(receiver.spans) == 2)
    export.close()
    request, queue = receiver.spans
    assert (request.trace_id.hex(), request.span_id.hex()) == (CONTEXT.trace_hex, f"{CONTEXT.span_id:016x}")
    assert (request.parent_span_id.hex(), request.trace_state) == (f"{CONTEXT.parent_id:016x}", STATE)
    assert (queue.parent_span_id, queue.trace_id) == (request.span_id, request.trace_id)
    assert (request.name, request.kind, queue.kind) == ("chat m", Span.SPAN_KIND_SERVER, Span.SPAN_KIND_INTERNAL)
    assert request.start_time_unix_nano == 1_700_000_001 * 10**9
    assert (queue.end_time_unix_nano, queue.events[0].time_unix_nano) == (1_700_000_002_500_000_000,) * 2
    assert attributes_of(request.attributes) == {
        "gen_ai.request.model": "m",
        "gen_ai.usage.input_tokens": 3,
        "serve_app.first_token_s": 0.5,
        "gen_ai.request.stream": True,
    }
    assert (queue.events[0].name, attributes_of(queue.events[0].attributes)) == (
        "serve_app.waited",
        {"serve_app.wait.reason": "slots", "serve_app.wait.seconds": 1.5},
    )
    assert (request.status.code, request.status.message) == (Status.STATUS_CODE_ERROR, "engine_failed")
    assert queue.status.code == Status.STATUS_CODE_UNSET


def test_it_is_sent_to_the_path_of_traces_with_the_headers_of_the_environment(receiver: OtlpReceiver) -> None:
    export = SpanExport(receiver.url, "router-1", uncounted)
    export.send(trace(), EPOCH_S)
    export.close()
    assert receiver.paths == ["/v1/traces"]
    (headers,) = receiver.headers
    assert (headers["authorization"], headers["x-team"]) == ("Bearer secret", "ml")
    assert headers["content-type"] == "application/x-protobuf"


def test_the_resource_is_this_router_and_the_environment_may_name_it_otherwise(
    receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "llm-production")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=prod")
    export = SpanExport(receiver.url, "router-1", uncounted)
    export.send(trace(), EPOCH_S)
    export.close()
    found = receiver.resource
    assert (found["service.name"], found["service.version"]) == ("llm-production", RELEASE)
    assert (found["service.instance.id"], found["deployment.environment.name"]) == ("router-1", "prod")
    (scope,) = {
        (one.scope.name, one.scope.version, one.schema_url)
        for message in receiver.messages
        for resource in message.resource_spans
        for one in resource.scope_spans
    }
    assert scope == ("serve_app", RELEASE, names.SCHEMA_URL)


def test_a_state_that_is_none_costs_the_state_and_not_the_span_and_no_log_line(
    receiver: OtlpReceiver, caplog: pytest.LogCaptureFixture
) -> None:
    export = SpanExport(receiver.url, "router-1", uncounted)
    broken = replace(CONTEXT, state="=,;\x00")
    export.send(replace(trace(), context=broken), EPOCH_S)
    export.close()
    assert [span.trace_state for span in receiver.spans] == ["", ""]
    assert caplog.records == []


def test_a_collector_that_does_not_answer_holds_up_nobody_and_what_is_too_much_is_dropped_and_counted(
    receiver: OtlpReceiver, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(span_export, "MAX_WAITING", 600)
    receiver.takes.clear()
    dropped = Dropped()
    export = SpanExport(receiver.url, "router-1", dropped.count)
    began = quiet_time()
    for _ in range(100):
        export.send(trace(10), EPOCH_S)
    assert quiet_time() - began < AT_ONCE_S
    assert lines == ["Router router-1 dropped 10 spans of its traces: more than 600 spans wait for the collector"]
    receiver.takes.set()
    eventually(lambda: len(receiver.spans) == 600)
    export.send(trace(10), EPOCH_S)
    eventually(lambda: len(receiver.spans) == 610)
    export.close()
    assert dropped == {"queue_full": 400}
    assert lines[1:] == ["Router router-1 dropped 390 spans of its traces: more than 600 spans wait for the collector"]


def test_what_a_collector_refuses_is_dropped_counted_and_logged_with_the_reason_once_a_minute(
    receiver: OtlpReceiver, lines: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    receiver.status = 401
    dropped = Dropped()
    export = SpanExport(receiver.url, "router-1", dropped.count)
    for number in range(3):
        export.send(trace(), EPOCH_S)
        eventually(lambda: len(receiver.paths) == number + 1)  # noqa: B023
    export.close()
    assert dropped == {"export_failed": 6}
    first, last = lines
    assert first.startswith("Router router-1 dropped 2 spans of its traces: ")
    assert "401" in first
    assert last.startswith("Router router-1 dropped 4 spans of its traces: ")
    assert capfd.readouterr().err == ""  # the SDK's own lines, one for each batch


def test_to_close_takes_a_bounded_time_while_the_collector_is_away(
    receiver: OtlpReceiver, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(span_export, "CLOSE_S", 0.2)
    receiver.takes.clear()
    dropped = Dropped()
    export = SpanExport(receiver.url, "router-1", dropped.count)
    export.send(trace(7), EPOCH_S)
    began = quiet_time()
    export.close()
    export.close()
    export.send(trace(3), EPOCH_S)  # of a request that ends later
    assert quiet_time() - began < 0.2 + AT_ONCE_S
    assert lines[0].startswith("Router router-1 dropped 7 spans of its traces: the router ended")
    receiver.status = 401
    receiver.takes.set()
    eventually(lambda: len(receiver.paths) == 1)
    assert dropped == {"ending": 10}, "each span counts once, whatever becomes of it later"


def test_spans_may_be_sent_from_the_event_loop_while_the_sdk_sends_others(receiver: OtlpReceiver) -> None:
    """Each span arrives once, whatever the two threads do at a time."""
    export = SpanExport(receiver.url, "router-1", uncounted)
    for _ in range(300):
        export.send(trace(5), EPOCH_S)
    export.close()
    assert len(receiver.spans) == 1500


def test_a_request_to_the_router_arrives_as_a_trace(receiver: OtlpReceiver) -> None:
    """From the headers of a request to the collector, with nothing replaced."""
    settings = {"endpoint": receiver.url, "sample_ratio": 0.0}
    parent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"

    async def scenario(cluster: FakeCluster) -> None:
        client: Client = await started(cluster, "r1", traces=settings)
        before_s = time.time()
        reply = await client.post(ask("one two", 5), headers={"traceparent": parent, "tracestate": STATE})
        assert (await client.post(ask("not sampled"))).status == 200
        await client.edge({"type": "lifespan"}, messages().__anext__, ignored)
        request, *below = receiver.spans
        assert reply.headers["traceresponse"] == f"00-{request.trace_id.hex()}-{request.span_id.hex()}-01"
        assert (request.trace_id.hex(), request.parent_span_id.hex()) == tuple(parent.split("-")[1:3])
        assert request.trace_state == STATE
        assert (request.name, [span.name for span in below]) == (f"text_completion {MODEL}", ["queue", "run", "relay"])
        found = attributes_of(request.attributes)
        assert (found[names.INPUT_TOKENS], found[names.OUTPUT_TOKENS], found[names.OUTCOME]) == (2, 5, "ok")
        assert abs(request.start_time_unix_nano / 1e9 - before_s) < SOON_S
        assert all(request.start_time_unix_nano <= span.start_time_unix_nano for span in below)
        assert all(span.end_time_unix_nano <= request.end_time_unix_nano for span in below)

    run(scenario, model(slots=4))


async def messages() -> Any:
    for kind in ("startup", "shutdown"):
        yield {"type": f"lifespan.{kind}"}
        await asyncio.sleep(0)


async def ignored(message: object) -> None:
    """Takes what the router says of its life."""
