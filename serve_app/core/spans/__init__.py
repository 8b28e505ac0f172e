"""Traces of requests: which are sent to a collector, and the spans that they have.

Decides: whether a trace is sent, its spans, their names, times and attributes.
In: the headers of W3C Trace Context, the moments of a request, its receipt. Out: frozen spans.
Never: sends anything, or keeps text of prompts or answers.
"""

from serve_app.core.spans import attributes
from serve_app.core.spans.context import begin_context, passed_on, row_context, trace_of
from serve_app.core.spans.records import SpanRecord, TraceRecord
from serve_app.core.spans.sampling import has_sampled_id, is_sampled
from serve_app.core.spans.spans import RequestFacts, build
from serve_app.core.spans.timeline import AttemptEnd, RequestTimeline

__all__ = [
    "AttemptEnd",
    "RequestFacts",
    "RequestTimeline",
    "SpanRecord",
    "TraceRecord",
    "attributes",
    "begin_context",
    "build",
    "has_sampled_id",
    "is_sampled",
    "passed_on",
    "row_context",
    "trace_of",
]
