"""The trace of the request that a task runs, for log records."""

from __future__ import annotations

from contextvars import ContextVar

TRACE_ID: ContextVar[str] = ContextVar("trace_id", default="")  # 32 hex digits; empty: no trace
