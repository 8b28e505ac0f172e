"""The place of a request in its trace, as W3C Trace Context has it (https://www.w3.org/TR/trace-context/). Pure.

Invariant: a header that is not valid counts as none; then the request begins a trace of its own.
"""

from __future__ import annotations

import hashlib
import random
import re
from dataclasses import dataclass

MAX_STATE_CHARS = 512  # of `tracestate`: what the specification wants passed on at least
SAMPLED = 0x01  # the flag of `traceparent`

# Version, trace id, parent id, flags; a version after 00 may have more behind them, ff is none. Zeros name nothing.
_TRACEPARENT = re.compile(
    rb"(?!ff)(?P<version>[0-9a-f]{2})-(?!0{32})(?P<trace>[0-9a-f]{32})-(?!0{16})(?P<span>[0-9a-f]{16})"
    rb"-(?P<flags>[0-9a-f]{2})(?P<more>-.*)?"
)


@dataclass(frozen=True, slots=True)
class SpanContext:
    """The span of a request, in its trace.

    Args:
        trace_id: 128 bits; span_id: of the request's own span, 64 bits.
        parent_id: the caller's span; None: the trace begins here.
        is_parent_sampled: the caller's decision; None: there is no caller.
        state: the caller's `tracestate`, passed on as it is.
    """

    trace_id: int
    span_id: int
    parent_id: int | None = None
    is_parent_sampled: bool | None = None
    state: str = ""

    @property
    def trace_hex(self) -> str:
        return f"{self.trace_id:032x}"

    def header(self, *, is_sampled: bool) -> str:
        """The form of `traceparent`, with this span in it."""
        return f"00-{self.trace_hex}-{self.span_id:016x}-{SAMPLED if is_sampled else 0:02x}"


def passed_on(traceparent: bytes | None) -> str:
    """A caller's header as it goes on to an engine; empty: none, or it is not valid."""
    found = _parsed(traceparent)
    if found is None:
        return ""
    return b"-".join((b"00", found["trace"], found["span"], found["flags"])).decode()


def trace_of(traceparent: str) -> str:
    """The trace that a valid header names, as 32 hex digits; empty: there is no header."""
    return traceparent[3:35]


def begin_context(traceparent: bytes | None, tracestate: bytes | None, rng: random.Random) -> SpanContext:
    """The context of a request that arrives with these headers. `rng` makes its ids."""
    found = _parsed(traceparent)
    if found is None:
        return SpanContext(rng.getrandbits(128) or 1, new_span_id(rng))
    state = b"" if tracestate is None else tracestate.strip(b" \t")
    return SpanContext(
        int(found["trace"], 16),
        new_span_id(rng),
        int(found["span"], 16),
        bool(int(found["flags"], 16) & SAMPLED),
        state.decode("latin-1") if len(state) <= MAX_STATE_CHARS else "",
    )


def row_context(row: str, rng: random.Random) -> SpanContext:
    """The context of a run of a batch's row: all runs of a row are in one trace, which nobody has decided about.

    Args:
        row: names the row among all.
    """
    trace_id = int.from_bytes(hashlib.sha256(row.encode()).digest()[:16])
    return SpanContext(trace_id or 1, new_span_id(rng))


def _parsed(traceparent: bytes | None) -> re.Match[bytes] | None:
    """The parts of a header that is valid."""
    found = None if traceparent is None else _TRACEPARENT.fullmatch(traceparent.strip(b" \t"))
    return None if found is None or (found["version"] == b"00" and found["more"] is not None) else found


def new_span_id(rng: random.Random) -> int:
    return rng.getrandbits(64) or 1
