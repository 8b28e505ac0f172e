"""The spans of a trace as values; `http/span_export.py` turns them into those of OpenTelemetry's SDK. Pure."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from serve_app.core.spans.context import SpanContext

Value = str | bool | int | float
Attributes = Mapping[str, Value]


class SpanKind(enum.Enum):
    """The role of a span, as OpenTelemetry has it."""

    SERVER = "server"  # answers a call
    CLIENT = "client"  # makes one
    INTERNAL = "internal"


@dataclass(frozen=True, slots=True)
class SpanEvent:
    """Something at one moment of a span. `at`: seconds of the router's monotonic clock."""

    name: str
    at: float
    attributes: Attributes = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SpanRecord:
    """One span.

    Args:
        parent_id: None: the trace begins with it.
        start, end: seconds of the router's monotonic clock.
        error: the type of the error that it ended with; None: it has succeeded.
    """

    name: str
    span_id: int
    parent_id: int | None
    kind: SpanKind
    start: float
    end: float
    attributes: Attributes = field(default_factory=dict)
    events: tuple[SpanEvent, ...] = ()
    error: str | None = None


@dataclass(frozen=True, slots=True)
class TraceRecord:
    """What one request adds to its trace: its own span first, each other span behind its parent."""

    context: SpanContext
    spans: tuple[SpanRecord, ...]
