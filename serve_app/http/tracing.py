"""Traces of requests: begins a request's trace at its arrival, and sends its spans at its end.

The spans are made from what the router has noted of the request (`core.spans`). vLLM's own tracing stays off: with it,
no stream could be continued.

Invariant: without `traces.endpoint` nothing here is called for a request, and OpenTelemetry's exporter is not loaded.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Protocol

from serve_app.core.receipts import Receipt
from serve_app.core.spans import (
    RequestFacts,
    RequestTimeline,
    TraceRecord,
    begin_context,
    build,
    has_sampled_id,
    is_sampled,
    row_context,
)
from serve_app.http.body import HeaderMap
from serve_app.http.error_responses import TRACE_HEADER
from serve_app.http.request_record import RequestRecord
from serve_app.http.response import HttpExchange
from serve_app.settings import TraceSettings
from serve_app.system import TRACE_ID

MAX_HOST_BYTES = 256  # a name in DNS has 253
# Of a row: its batch's id, a hyphen, its number. A client's counts for nothing.
ROW_HEADER = b"x-serve-app-batch-row"

CountDropped = Callable[[str, int], None]  # of spans: by the reason


class SendsSpans(Protocol):
    """What takes the spans of ended requests; see `http.span_export`."""

    def send(self, trace: TraceRecord, epoch_s: float) -> None:
        """Take the spans of a request, or drop them; returns at once.

        Args:
            epoch_s: what a moment of them lacks to seconds since 1970.
        """

    def close(self) -> None:
        """Send what waits; blocks for a bounded time."""


def reopened(
    tracing: RequestTracing | None, settings: TraceSettings, router: str, count: CountDropped
) -> RequestTracing | None:
    """The tracing by changed settings; None: traces are off. `router`: its id.

    Blocks while OpenTelemetry is loaded for the first time; `load_exporter` does that before, where it matters.
    """
    if tracing is not None and tracing.settings == settings:
        return tracing
    if tracing is not None and tracing.settings.endpoint == settings.endpoint:
        return RequestTracing(settings, tracing.export, tracing.rng)
    if tracing is not None:
        threading.Thread(target=tracing.export.close, name="close-traces", daemon=True).start()
    if settings.endpoint is None:
        return None
    return RequestTracing(settings, load_exporter()(settings.endpoint, router, count), random.Random())


def load_exporter() -> Callable[[str, str, CountDropped], SendsSpans]:
    """The class `span_export.SpanExport`. Its module is loaded here alone: it takes some MB, and a moment."""
    from serve_app.http.span_export import SpanExport

    return SpanExport


class RequestTracing:
    """The traces of the requests of one router.

    Args:
        rng: makes their ids.
    """

    def __init__(self, settings: TraceSettings, export: SendsSpans, rng: random.Random) -> None:
        self.settings = settings
        self.export = export
        self.rng = rng

    def begin(self, record: RequestRecord, headers: HeaderMap, exchange: HttpExchange) -> None:
        """A request has arrived with these headers."""
        row = headers.get(ROW_HEADER, b"").decode("latin-1") if record.is_row else ""
        batch_id, _, number = row.rpartition("-")
        if batch_id and number.isdecimal():
            context = row_context(row, self.rng)
            record.runs.timeline = RequestTimeline(context, batch_row=(batch_id, int(number)))
        else:
            context = begin_context(headers.get(b"traceparent"), headers.get(b"tracestate"), self.rng)
            server = headers.get(b"host", b"")[:MAX_HOST_BYTES].decode("latin-1")
            record.runs.timeline = RequestTimeline(context, server)
        record.trace.trace_id = context.trace_hex
        TRACE_ID.set(context.trace_hex)
        header = context.header(is_sampled=has_sampled_id(context, self.settings.sample_ratio))
        record.traceparent = header
        exchange.trace_headers = ((TRACE_HEADER, header.encode()),)

    def decide(self, record: RequestRecord, timeline: RequestTimeline, now: float) -> None:
        """The request ends: decide whether its spans are sent, before its receipt is made."""
        first_s = record.first_token_s
        record.trace.trace_sampled = is_sampled(
            timeline.context,
            self.settings.sample_ratio,
            record.outcome,
            None if record.error is None else record.error.code,
            now - record.started if first_s is None else first_s,
            self.settings.slow_s,
        )

    def send(self, record: RequestRecord, timeline: RequestTimeline, receipt: Receipt) -> None:
        """Send the spans of an ended request, if it was decided so."""
        if not receipt.trace.trace_sampled:
            return
        error = record.error
        status = 0 if record.recorder is None else record.recorder.status
        facts = RequestFacts(
            record.operation,
            is_streamed=record.streamed,
            status=error.status if error is not None and not status else status,
            error_code=None if error is None else error.code,
            cached_tokens=0 if record.usage is None else record.usage.cached_tokens,
        )
        self.export.send(build(timeline, receipt, facts, self.rng), time.time() - time.monotonic())
