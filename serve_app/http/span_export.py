"""Sends spans to a collector, by OpenTelemetry's SDK: OTLP in protobuf over HTTP, in batches, from threads of its own.

The variables `OTEL_EXPORTER_OTLP_*` (headers, certificates, compression, timeout), `OTEL_RESOURCE_ATTRIBUTES`,
`OTEL_SERVICE_NAME` and `OTEL_BSP_*` hold as for any program with the SDK; the endpoint is the settings'. No other
module of this package imports the SDK, and it is loaded only where traces are sent.

Invariant: no call here waits for the collector, but `close`, for `CLOSE_S` at most. At most `MAX_WAITING` spans wait;
what is dropped is counted, and a log line says it once in `REPORT_S`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from opentelemetry.exporter.otlp.proto.http import trace_exporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from serve_app.core.spans import SpanRecord, TraceRecord, attributes
from serve_app.names import DISTRIBUTION, RELEASE

logger = logging.getLogger("ray.serve")

MAX_WAITING = 8192  # spans, of some 1,000 requests: 16 MB
CLOSE_S = 3.0  # a router that ends waits no longer for its collector
REPORT_S = 60.0  # between two log lines: a collector may be away for days
# Reasons of drops, in the metric: the collector is too slow, it refused them or was away, the router ended.
QUEUE_FULL = "queue_full"
EXPORT_FAILED = "export_failed"
ENDING = "ending"
TRACES_PATH = "/v1/traces"  # of OTLP over HTTP, below the endpoint

_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_UNSET = Status(StatusCode.UNSET)
_KINDS = {kind.name: kind for kind in SpanKind}


class SpanExport:
    """The spans of one router on their way to the collector.

    Args:
        endpoint: its address, as `OTEL_EXPORTER_OTLP_ENDPOINT` has it.
        router: the id of this router.
        count: of dropped spans, by the reason; called from any thread.
    """

    def __init__(self, endpoint: str, router: str, count: Callable[[str, int], None]) -> None:
        self._drops = _Drops(router, count)
        self._exporter = _CountingExporter(OTLPSpanExporter(endpoint.rstrip("/") + TRACES_PATH), self._drops)
        self._processor = BatchSpanProcessor(self._exporter, max_queue_size=MAX_WAITING)
        ours = {
            attributes.SERVICE_NAME: DISTRIBUTION,
            attributes.SERVICE_VERSION: RELEASE,
            attributes.SERVICE_INSTANCE_ID: router,
        }
        self._resource = Resource.create(ours).merge(OTELResourceDetector().detect())
        self._scope = InstrumentationScope(attributes.SCOPE, RELEASE, attributes.SCHEMA_URL)
        # Its warnings are about `tracestate` as clients send it: any client could fill the log.
        logging.getLogger(TraceState.__module__).setLevel(logging.ERROR)
        self._accepted = 0  # spans that were handed to the SDK
        self._is_closed = False

    def send(self, trace: TraceRecord, epoch_s: float) -> None:
        """As `http.tracing.SendsSpans`. Too many waiting spans drop a trace as a whole: a part would mislead."""
        spans = trace.spans
        if self._is_closed:
            self._drops.add(len(spans), ENDING, "the router ends")
            return
        if self._accepted - self._exporter.taken + len(spans) > MAX_WAITING:
            self._drops.add(len(spans), QUEUE_FULL, f"more than {MAX_WAITING} spans wait for the collector")
            return
        self._accepted += len(spans)
        state = TraceState.from_header([trace.context.state]) if trace.context.state else None
        for span in spans:
            self._processor.on_end(self._readable(trace, span, epoch_s, state))

    def _readable(self, trace: TraceRecord, span: SpanRecord, epoch_s: float, state: TraceState | None) -> ReadableSpan:
        """The span as the SDK has it."""
        trace_id = trace.context.trace_id
        parent = None
        if span.parent_id is not None:
            is_remote = span.parent_id == trace.context.parent_id
            parent = SpanContext(trace_id, span.parent_id, is_remote, _SAMPLED, state)
        events = [Event(event.name, event.attributes, _nanoseconds(event.at, epoch_s)) for event in span.events]
        return ReadableSpan(
            span.name,
            SpanContext(trace_id, span.span_id, False, _SAMPLED, state),
            parent,
            self._resource,
            span.attributes,
            events,
            kind=_KINDS[span.kind.name],
            status=_UNSET if span.error is None else Status(StatusCode.ERROR, span.error),
            start_time=_nanoseconds(span.start, epoch_s),
            end_time=_nanoseconds(span.end, epoch_s),
            instrumentation_scope=self._scope,
        )

    def close(self) -> None:
        """Send what waits, and end; returns after `CLOSE_S` at most. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        closing = threading.Thread(target=self._processor.shutdown, name="close-traces", daemon=True)
        closing.start()
        closing.join(CLOSE_S)
        waiting = self._accepted - self._exporter.taken
        self._exporter.is_given_up = True
        if waiting:
            self._drops.add(waiting, ENDING, "the router ended before the collector had taken them")
        self._drops.report(at_once=True)


class _Drops:
    """Counts the spans that did not reach the collector, and logs them with the last cause."""

    def __init__(self, router: str, count: Callable[[str, int], None]) -> None:
        self._router = router
        self._count = count
        self._lock = threading.Lock()
        self._spans = 0  # since the last log line
        self._cause = ""
        self._next_report = 0.0

    def add(self, spans: int, reason: str, cause: str) -> None:
        """So many more were dropped."""
        self._count(reason, spans)
        with self._lock:
            self._spans += spans
            self._cause = cause
        self.report()

    def report(self, *, at_once: bool = False) -> None:
        """Log what was dropped since the last line, if that was `REPORT_S` ago."""
        with self._lock:
            now = time.perf_counter()
            if not self._spans or (now < self._next_report and not at_once):
                return
            spans = self._spans
            self._spans = 0
            self._next_report = now + REPORT_S
        logger.warning("Router %s dropped %d spans of its traces: %s", self._router, spans, self._cause)


class _LastMessage(logging.Handler):
    """Keeps the SDK's last message in place of the SDK's log: it would repeat it for each batch."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text = record.getMessage()


class _CountingExporter(SpanExporter):
    """Counts what goes through the SDK's exporter, on the SDK's thread.

    Args:
        exporter: the SDK's.
    """

    def __init__(self, exporter: OTLPSpanExporter, drops: _Drops) -> None:
        self._exporter = exporter
        self._drops = drops
        self._message = _LastMessage()
        logging.getLogger(trace_exporter.__name__).addHandler(self._message)
        logging.getLogger(trace_exporter.__name__).propagate = False
        self.is_given_up = False  # what waits counts as dropped already
        self.taken = 0  # spans that wait no more, whether they were sent or not

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = SpanExportResult.FAILURE
        try:
            result = self._exporter.export(spans)
        finally:
            self.taken += len(spans)
            if result is SpanExportResult.FAILURE and not self.is_given_up:
                self._drops.add(len(spans), EXPORT_FAILED, self._message.text or "the collector could not be reached")
            self._drops.report()
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()
        logging.getLogger(trace_exporter.__name__).removeHandler(self._message)


def _nanoseconds(at: float, epoch_s: float) -> int:
    """A moment of the monotonic clock since 1970."""
    return round((at + epoch_s) * 1e9)
