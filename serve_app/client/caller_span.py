"""The caller's span in the requests of a client: where OpenTelemetry's API has a current one, it is their parent."""

from __future__ import annotations

from dataclasses import replace

from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from serve_app.http import HttpRequest

TRACEPARENT = b"traceparent"

_propagator = TraceContextTextMapPropagator()


def with_caller_span(asked: HttpRequest) -> HttpRequest:
    """The request with W3C's headers of the span that is current in this context; without a span, or with headers that
    the caller gave, as it is."""
    if any(name == TRACEPARENT for name, _ in asked.headers):
        return asked
    found: dict[str, str] = {}
    _propagator.inject(found)
    if not found:
        return asked
    headers = [(name.encode(), value.encode("latin-1", "ignore")) for name, value in found.items()]
    return replace(asked, headers=[*asked.headers, *headers])
