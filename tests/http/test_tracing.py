"""What a router sends of its requests' traces: which, with which spans, and under the caller's ids."""

from __future__ import annotations

import ast
import asyncio
import json
import logging
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from serve_app.core.limits import LimitReason
from serve_app.core.spans import SpanRecord, TraceRecord
from serve_app.core.spans import attributes as names
from serve_app.errors import RateLimited
from serve_app.http import tracing
from serve_app.http.asgi_bridge import AsgiBridge
from serve_app.http.keys import RowOwner
from serve_app.http.python_calls import HttpRequest
from serve_app.router import ModelRouter, RouterMetrics
from serve_app.settings import TraceSettings
from serve_app.system import TRACE_ID
from tests.fakes.asgi_client import BATCH_KEY, COMPLETIONS, Client, Reply, ask, cancel, running, started
from tests.fakes.engines import MODEL, FakeCluster, model, run, turns, until
from tests.fakes.router import SOON_S
from tests.import_rules import imported, under

ROOT = Path(__file__).parents[2]
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
SPAN = "00f067aa0ba902b7"
ALL = {"endpoint": "http://collector.example:4318", "sample_ratio": 1.0}
FAILED_ALONE = ALL | {"sample_ratio": 0.0}
LIMITED = {"requests_per_minute": 60}
REQUESTS = 20  # while allocations are counted
CLOSE_TRIES = 500  # of 10 ms, for a thread to do nothing
START_S = 60.0  # of a Python that imports Ray Serve


@dataclass
class FakeExport:
    """In place of `SpanExport`: keeps what it would send."""

    endpoint: str
    router: str
    traces: list[TraceRecord] = field(default_factory=list)
    epochs: list[float] = field(default_factory=list)
    closed: int = 0

    def send(self, trace: TraceRecord, epoch_s: float) -> None:
        self.traces.append(trace)
        self.epochs.append(epoch_s)

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def exports(monkeypatch: pytest.MonkeyPatch) -> list[FakeExport]:
    """Those that were opened."""
    opened: list[FakeExport] = []

    def open_export(endpoint: str, router: str, count: tracing.CountDropped) -> FakeExport:
        opened.append(FakeExport(endpoint, router))
        return opened[-1]

    monkeypatch.setattr(tracing, "load_exporter", lambda: open_export)
    return opened


def check(
    scenario: Callable[[Client, FakeCluster], Awaitable[None]],
    traces: dict[str, Any] = ALL,
    slots: int = 4,
    **settings: Any,
) -> None:
    async def with_client(cluster: FakeCluster) -> None:
        await scenario(await started(cluster, "r1", traces=traces, **settings), cluster)

    run(with_client, model(slots=slots))


def parent(*, sampled: bool) -> dict[str, str]:
    return {"traceparent": f"00-{TRACE}-{SPAN}-0{int(sampled)}", "tracestate": "vendor=opaque"}


def named(trace: TraceRecord, name: str) -> list[SpanRecord]:
    return [span for span in trace.spans if span.name == name]


def events(trace: TraceRecord) -> list[str]:
    return [event.name for span in trace.spans for event in span.events]


@pytest.mark.parametrize("stream", [True, False])
def test_an_answered_request_is_a_span_in_the_caller_s_trace(exports: list[FakeExport], stream: bool) -> None:
    async def scenario(client: Client, cluster: FakeCluster) -> None:
        headers = parent(sampled=True) | {"Host": "llm.example:443", "X-Request-Id": "asked"}
        reply = await client.post(ask("one two three", 7, stream=stream, priority="high"), headers=headers)
        (trace,) = exports[0].traces
        assert (trace.context.trace_hex, trace.context.state) == (TRACE, "vendor=opaque")
        assert [span.name for span in trace.spans] == [f"text_completion {MODEL}", "queue", "run", "relay"]
        request = trace.spans[0]
        assert f"{request.parent_id:016x}" == SPAN
        expected = {
            names.MODEL: MODEL,
            names.STREAM: stream,
            names.INPUT_TOKENS: 3,
            names.OUTPUT_TOKENS: 7,
            names.HTTP_STATUS: 200,
            names.SERVER_ADDRESS: "llm.example",
            names.SERVER_PORT: 443,
            names.REQUEST_ID: reply.headers["x-serve-app-request-id"],
            names.CLIENT_REQUEST_ID: "asked",
            names.TENANT: "people",
            names.CLASS: "high",
        }
        assert {name: request.attributes[name] for name in expected} == expected
        (on_replica,) = named(trace, "run")
        assert on_replica.attributes[names.REPLICA] == "r1"
        assert (on_replica.attributes[names.OUTPUT_TOKENS], events(trace)) == (7, [names.FIRST_TOKEN])
        assert reply.headers["traceresponse"] == f"00-{TRACE}-{request.span_id:016x}-01"

    check(scenario)


def test_times_are_those_of_the_receipt(exports: list[FakeExport]) -> None:
    async def scenario(client: Client, cluster: FakeCluster) -> None:
        await client.post(ask("one two three", 7))
        (receipt,) = client.edge.parts.receipts.kept.values()
        (trace,) = exports[0].traces
        request, queue, on_replica, relay = trace.spans
        assert (request.start, request.end) == (receipt.arrived, receipt.arrived + receipt.total_s)
        (first,) = on_replica.events
        assert first.at == pytest.approx(receipt.arrived + (receipt.first_token_s or 0.0))
        assert request.start <= queue.start <= queue.end <= on_replica.start <= first.at <= relay.end <= request.end
        (epoch_s,) = exports[0].epochs
        assert epoch_s + request.start > 1.7e9  # seconds since 1970

    check(scenario)


def test_the_receipt_and_its_story_tell_the_trace(exports: list[FakeExport]) -> None:
    async def scenario(client: Client, cluster: FakeCluster) -> None:
        for number, sampled in enumerate((True, False)):
            reply = await client.post(ask("p"), headers=parent(sampled=sampled))
            name = reply.headers["x-serve-app-request-id"]
            found = json.loads((await client.get(f"/admin/requests/{name}")).body)
            assert (found["trace_id"], found["trace_sampled"]) == (TRACE, sampled)
            assert found["story"][-1] == f"Trace {TRACE}, {'' if sampled else 'not '}sampled."
            assert len(exports[0].traces) == 1, number

    check(scenario)


def test_a_caller_that_does_not_sample_is_obeyed_even_when_the_request_fails(exports: list[FakeExport]) -> None:
    async def scenario(client: Client, cluster: FakeCluster) -> None:
        await fails(client, headers=parent(sampled=False))
        assert exports[0].traces == []
        await fails(client)
        (trace,) = exports[0].traces
        assert trace.spans[0].error == "internal_error"
        assert trace.spans[0].attributes[names.ERROR_TYPE] == "internal_error"

    check(scenario, FAILED_ALONE)


async def fails(client: Client, **more: Any) -> None:
    async def failing(*_: Any) -> None:
        raise RuntimeError("an error of ours")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelRouter, "serve", failing)
        assert (await client.post(ask("a b"), **more)).status == 500


def test_of_requests_that_are_in_order_the_ratio_decides(exports: list[FakeExport]) -> None:
    async def scenario(client: Client, cluster: FakeCluster) -> None:
        replies = [await client.post(ask("p", 1)) for _ in range(40)]
        flags = [reply.headers["traceresponse"].rpartition("-")[2] for reply in replies]
        kept = [trace.context.trace_hex for trace in exports[0].traces]
        assert 5 < len(kept) < 35  # of 40, by chance less than one time in a million
        assert kept == [
            reply.headers["traceresponse"].split("-")[1]
            for reply, flag in zip(replies, flags, strict=True)
            if flag == "01"
        ]

    check(scenario, ALL | {"sample_ratio": 0.5})


def test_a_slow_request_is_always_sent(exports: list[FakeExport]) -> None:
    async def scenario(client: Client, cluster: FakeCluster) -> None:
        task, _ = await running(client, n=4)
        waits = client.posting(ask("waits"))
        await asyncio.sleep(2.0)  # of virtual time: twice what is slow
        await cancel(task)
        assert (await waits).status == 200
        (trace,) = exports[0].traces
        assert events(trace) == [names.WAITED, names.FIRST_TOKEN]
        (queue,) = named(trace, "queue")
        (waited,) = queue.events
        assert waited.attributes[names.REASON] == "slots"
        assert waited.attributes[names.WAIT_S] == pytest.approx(queue.end - queue.start, abs=0.01)
        assert queue.end - queue.start >= 2.0

    check(scenario, FAILED_ALONE | {"slow_s": 1.0})


def test_a_refusal_by_the_queue_is_sent_with_its_reason(exports: list[FakeExport]) -> None:
    async def scenario(client: Client, cluster: FakeCluster) -> None:
        task, _ = await running(client, n=4, prompt_logprobs=1)  # so that it cannot be stopped for the other one
        waits = client.posting(ask("waits", priority="high"))
        await turns(20)
        refused = await client.post(ask("no"), headers={"X-Deadline-Ms": "20"})
        await cancel(waits)
        await cancel(task)
        (trace,) = exports[0].traces
        request, queue = trace.spans
        assert (request.error, queue.error, queue.attributes[names.AHEAD]) == ("deadline", "deadline", 1)
        assert request.attributes[names.HTTP_STATUS] == refused.status == 429
        assert request.attributes[names.RETRY_AFTER_S] > 0

    check(scenario, FAILED_ALONE)


def test_a_charge_against_limits_is_a_span_and_a_refusal_by_them_no_failure(exports: list[FakeExport]) -> None:
    async def scenario(client: Client, cluster: FakeCluster) -> None:
        await client.post(ask("p"))
        client.limits.refusal = RateLimited("per minute", code=LimitReason.RATE_LIMIT, retry_after_s=1.5)
        assert (await client.post(ask("p"))).status == 429
        answered, limited = exports[0].traces
        assert [span.name for span in answered.spans[1:]] == ["limits", "queue", "run", "relay"]
        assert [span.name for span in limited.spans[1:]] == ["limits"]
        assert (limited.spans[0].error, limited.spans[0].attributes[names.HTTP_STATUS]) == (None, 429)
        assert limited.spans[1].end <= limited.spans[0].end

    check(scenario, limits=LIMITED)


def test_a_request_that_stops_for_a_higher_class_has_two_runs(exports: list[FakeExport]) -> None:
    async def scenario(client: Client, cluster: FakeCluster) -> None:
        await until(lambda: client.model.replica_set.info is not None, SOON_S, "the engine's limits")
        reply = Reply()
        task = client.posting(ask("low", 400), key=BATCH_KEY, reply=reply)
        await until(lambda: len(reply.chunks) > 3, SOON_S, "some tokens")
        assert (await client.post(ask("first", 5, priority="high"))).status == 200
        assert (await task).status == 200
        first, stopped = exports[0].traces
        assert events(first)[-1] == names.FIRST_TOKEN
        runs = named(stopped, "run")
        assert [one.attributes[names.RUN_END] for one in runs] == ["preempted", "answered"]
        assert [event.name for event in runs[0].events] == [names.FIRST_TOKEN, names.PREEMPTED]
        assert [event.name for event in runs[1].events] == [names.CONTINUED]
        assert sum(int(one.attributes[names.OUTPUT_TOKENS]) for one in runs) == 400
        assert [one.error for one in stopped.spans] == [None] * len(stopped.spans)
        assert len(named(stopped, "queue")) == len(named(stopped, "relay")) == 2

    check(scenario, slots=1)


def test_a_request_that_is_moved_off_its_replica_says_so(exports: list[FakeExport]) -> None:
    async def scenario(client: Client, cluster: FakeCluster) -> None:
        reply = Reply()
        task = client.posting(ask("a b", 400), reply=reply)
        await until(lambda: bool(reply.chunks), SOON_S, "first frames")
        assert client.model.stop_drained("r1") == 0
        assert (await task).status == 200
        (trace,) = exports[0].traces
        assert [one.attributes[names.RUN_END] for one in named(trace, "run")] == ["moved", "answered"]
        assert names.MOVED in events(trace)

    check(scenario)


def test_a_stream_that_loses_its_replica_has_the_loss_and_the_continuation(exports: list[FakeExport]) -> None:
    in_log: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "lost replica" in record.getMessage():
                in_log.append(TRACE_ID.get())

    async def scenario(client: Client, cluster: FakeCluster) -> None:
        await cluster.add("r2")
        reply = Reply()
        task = client.posting(ask("a b", 400), reply=reply)
        await until(lambda: bool(reply.chunks), SOON_S, "first frames")
        cluster.kill("r1" if cluster["r1"].work else "r2")
        assert (await task).status == 200
        (trace,) = exports[0].traces
        lost, goes_on = named(trace, "run")
        assert (lost.error, lost.attributes[names.RUN_END]) == ("engine_failed", "continues")
        assert [event.name for event in lost.events] == [names.FIRST_TOKEN, names.LOST]
        assert [event.name for event in goes_on.events] == [names.CONTINUED]
        assert lost.attributes[names.REPLICA] != goes_on.attributes[names.REPLICA]
        assert trace.spans[0].error is None
        assert in_log == [trace.context.trace_hex]

    handler = Handler()
    logger = logging.getLogger("ray.serve")
    logger.addHandler(handler)
    try:
        check(scenario)
    finally:
        logger.removeHandler(handler)


def test_each_prompt_of_a_list_is_a_span_in_that_of_the_request(exports: list[FakeExport]) -> None:
    async def scenario(client: Client, cluster: FakeCluster) -> None:
        assert (await client.post(ask(["one two", "three", "four"], 4))).status == 200
        (trace,) = exports[0].traces
        prompts = named(trace, "prompt")
        assert [span.attributes[names.NUMBER] for span in prompts] == [0, 1, 2]
        assert [span.parent_id for span in named(trace, "run")] == [span.span_id for span in prompts]
        (receipt,) = client.edge.parts.receipts.kept.values()
        assert receipt.trace.trace_id == trace.context.trace_hex

    check(scenario)


def test_a_repeat_under_a_key_has_a_trace_of_its_own_in_which_nothing_runs(exports: list[FakeExport]) -> None:
    async def scenario(client: Client, cluster: FakeCluster) -> None:
        replies = [await client.post(ask("p"), headers={"Idempotency-Key": "k"}) for _ in range(2)]
        assert replies[1].headers["x-idempotent-replay"] == "true"
        first, again = exports[0].traces
        assert [span.name for span in first.spans[1:]] == ["queue", "run", "relay"]
        assert [span.name for span in again.spans[1:]] == []
        sent = [reply.headers["traceresponse"].split("-")[1] for reply in replies]
        assert sent == [first.context.trace_hex, again.context.trace_hex]

    check(scenario)


def test_work_without_a_slot_has_its_wait_and_its_run(exports: list[FakeExport]) -> None:
    async def scenario(client: Client, cluster: FakeCluster) -> None:
        assert (await client.post({"model": MODEL, "prompt": "a b c"}, path="/tokenize")).status == 200
        (trace,) = exports[0].traces
        assert [span.name for span in trace.spans] == [f"tokenize {MODEL}", "queue", "run", "relay"]

    check(scenario)


def test_a_client_that_leaves_while_it_is_answered_ends_its_spans(exports: list[FakeExport]) -> None:
    async def scenario(client: Client, cluster: FakeCluster) -> None:
        task, _ = await running(client)
        await cancel(task)
        (trace,) = exports[0].traces
        (on_replica,) = named(trace, "run")
        assert on_replica.attributes[names.RUN_END] == "cancelled"
        assert trace.spans[0].attributes[names.OUTCOME] == "cancelled_running"
        assert (trace.spans[0].error, named(trace, "relay")[0].end) == (None, trace.spans[0].end)

    check(scenario)


def test_changed_settings_hold_from_the_next_request_on(exports: list[FakeExport]) -> None:
    async def scenario(client: Client, cluster: FakeCluster) -> None:
        def configure(**traces: Any) -> None:
            settings = client.edge.settings
            client.edge.configure(settings.model_copy(update={"traces": TraceSettings(**traces)}))

        assert "traceresponse" not in (await client.post(ask("p"))).headers
        configure(**FAILED_ALONE)
        assert (await client.post(ask("p"))).headers["traceresponse"].endswith("-00")
        configure(**ALL)
        assert (await client.post(ask("p"))).headers["traceresponse"].endswith("-01")
        assert [(one.endpoint, len(one.traces), one.closed) for one in exports] == [(ALL["endpoint"], 1, 0)]
        task, _ = await running(client)
        configure()
        await cancel(task)  # it began while traces were sent, and ends while they are not
        assert "traceresponse" not in (await client.post(ask("p"))).headers
        for _ in range(CLOSE_TRIES):  # a thread closes it
            if not exports[0].closed:
                await asyncio.to_thread(time.sleep, 0.01)
        assert exports[0].closed == 1
        configure(endpoint="http://elsewhere.example:4318", sample_ratio=1.0)
        await client.post(ask("p"))
        assert [len(one.traces) for one in exports] == [1, 1]

    check(scenario, {})


def test_the_router_s_end_sends_what_waits(exports: list[FakeExport]) -> None:
    async def scenario(client: Client, cluster: FakeCluster) -> None:
        messages = iter([{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}])
        sent: list[Any] = []

        async def receive() -> dict[str, Any]:
            return next(messages)

        async def send(message: Any) -> None:
            sent.append(message["type"])

        await client.edge({"type": "lifespan"}, receive, send)
        assert (sent[-1], exports[0].closed) == ("lifespan.shutdown.complete", 1)

    check(scenario)


def test_without_an_endpoint_a_request_costs_nothing_here() -> None:
    """Nothing in the code of traces allocates memory, and no answer has a header. A caller's trace is read for logs."""

    async def scenario(client: Client, cluster: FakeCluster) -> None:
        await client.post(ask("p"))
        tracemalloc.start()
        try:
            replies = [await client.post(ask("p")) for _ in range(REQUESTS)]
            taken = tracemalloc.take_snapshot()
        finally:
            tracemalloc.stop()
        ours = ("*/serve_app/core/spans/*", "*/serve_app/http/tracing.py", "*/serve_app/http/span_export.py")
        found = taken.filter_traces([tracemalloc.Filter(True, pattern) for pattern in ours])
        assert found.statistics("filename") == []
        replies.append(await client.post(ask("p"), headers=parent(sampled=True)))
        assert not [reply for reply in replies if "traceresponse" in reply.headers]
        (receipt, *_) = client.edge.parts.receipts.kept.values()
        assert (receipt.trace.trace_id, receipt.trace.trace_sampled) == (None, False)

    check(scenario, {})


ONE_REQUEST = """
import sys
from tests.fakes.asgi_client import ask, started
from tests.fakes.engines import run

async def scenario(cluster):
    client = await started(cluster, "r1")
    assert (await client.post(ask("p"))).status == 200

run(scenario)
import serve_app.http.deployment
print([name for name in sys.modules if name.startswith(("serve_app.http.span_export", "opentelemetry.exporter"))])
"""


def test_without_an_endpoint_a_router_does_not_load_the_exporter() -> None:
    """Ray Serve itself loads OpenTelemetry's interface and SDK where they are installed."""
    done = subprocess.run(
        [sys.executable, "-c", ONE_REQUEST], cwd=ROOT, capture_output=True, text=True, timeout=START_S, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_the_exporter_alone_imports_open_telemetry_s_sdk() -> None:
    """The client of a Python program asks the API for the program's own span."""
    importing = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "serve_app").rglob("*.py")
        for _, name in imported(ast.parse(path.read_text()), path.as_posix())
        if under(name, "opentelemetry")
    }
    assert importing == {"serve_app/http/span_export.py", "serve_app/client/caller_span.py"}


def test_a_row_s_runs_are_in_one_trace_with_the_id_of_its_batch(exports: list[FakeExport]) -> None:
    async def scenario(client: Client, cluster: FakeCluster) -> None:
        for row in (b"batch_1-7", b"batch_1-7", b"batch_1-8"):
            await run_row(client, row)
        first, again, other = exports[0].traces
        assert first.context.trace_id == again.context.trace_id != other.context.trace_id
        request = first.spans[0]
        found = {name: request.attributes[name] for name in (names.BATCH_ID, names.ROW_NUMBER, names.IS_ROW)}
        assert found == {names.BATCH_ID: "batch_1", names.ROW_NUMBER: 7, names.IS_ROW: True}
        assert request.parent_id is None

    check(scenario)


def test_a_row_is_sampled_as_others_and_a_client_cannot_name_one(exports: list[FakeExport]) -> None:
    async def scenario(client: Client, cluster: FakeCluster) -> None:
        await run_row(client, b"batch_1-7")
        await client.post(ask("one"), headers={"x-serve-app-batch-row": "batch_1-7"} | parent(sampled=True))
        (trace,) = exports[0].traces
        assert trace.context.trace_hex == TRACE
        assert names.BATCH_ID not in trace.spans[0].attributes

    check(scenario, traces=FAILED_ALONE)


async def run_row(client: Client, row: bytes) -> None:
    """A run of a row, as a batch worker asks for it."""
    headers = [(b"content-type", b"application/json"), (b"x-serve-app-batch-row", row)]
    body = json.dumps(ask("one two", 3, stream=False)).encode()
    request = HttpRequest("POST", COMPLETIONS, headers, body)
    pieces = [piece async for piece in AsgiBridge(client.edge).exchange(request, RowOwner("desk", "people"))]
    assert isinstance(pieces[0], tuple)
    assert pieces[0][0] == 200, pieces


def test_spans_that_reach_no_collector_are_counted_by_their_reason() -> None:
    metrics = RouterMetrics()
    metrics.count_dropped_spans("queue_full", 3)
    metrics.count_dropped_spans("queue_full", 2)
    metrics.count_dropped_spans("export_failed", 1)
    text = metrics.render().decode()
    assert 'serve_app_trace_spans_dropped_total{reason="queue_full"} 5.0' in text
    assert 'serve_app_trace_spans_dropped_total{reason="export_failed"} 1.0' in text
