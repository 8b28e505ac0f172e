"""The spans of an ended request, from its timeline and its receipt. Pure.

    chat tiny                                  server, from arrival to end
    |- limits                                  the charge against the limits of key and tenant
    |- queue                                   a wait for a replica; its reason is an event
    |- run                                     on a replica; the first token, a stop and a continuation are events
    |- relay                                   the answer goes to the client
    |- queue, run, relay                       once more, if the run was stopped or lost
    |- prompt                                  of a list, each with its queue, run and relay

Invariant: a span lies within its parent and its events within it; a request has at most `MAX_SPANS`, and those that are
not kept are counted.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from serve_app.core.receipts import Receipt
from serve_app.core.spans import attributes as names
from serve_app.core.spans.context import new_span_id
from serve_app.core.spans.records import Attributes, SpanEvent, SpanKind, SpanRecord, TraceRecord, Value
from serve_app.core.spans.sampling import has_failed
from serve_app.core.spans.timeline import Attempt, AttemptEnd, RequestTimeline
from serve_app.types import Operation

MAX_PORT_DIGITS = 5  # of a `Host` header, which is the client's: more digits are no port
MAX_SPANS = 256  # of one request: a list of 80 prompts; a collector takes 512 in one message

_OPERATIONS = {
    Operation.CHAT: "chat",
    Operation.RESPONSES: "chat",
    Operation.MESSAGES: "chat",
    Operation.COMPLETION: "text_completion",
    Operation.EMBEDDING: "embeddings",
    Operation.EMBED: "embeddings",
}
_STOPS = {
    AttemptEnd.PREEMPTED: names.PREEMPTED,
    AttemptEnd.MOVED: names.MOVED,
    AttemptEnd.RESTARTS: names.LOST,
    AttemptEnd.CONTINUES: names.LOST,
}
_RESUMES = {
    AttemptEnd.PREEMPTED: names.CONTINUED,
    AttemptEnd.MOVED: names.CONTINUED,
    AttemptEnd.CONTINUES: names.CONTINUED,
    AttemptEnd.RESTARTS: names.RESTARTED,
}


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """What a span tells of a request beside its receipt.

    Args:
        status: of its answer; 0: none was sent.
        error_code: of the error that ended it; None: there was none.
    """

    operation: Operation
    is_streamed: bool = False
    status: int = 0
    error_code: str | None = None
    cached_tokens: int = 0


class _Within(NamedTuple):
    """The span that others lie in."""

    span_id: int
    start: float
    end: float

    def clamp(self, moment: float | None) -> float:
        """The moment, moved into the span; None: the end."""
        return self.end if moment is None else min(max(moment, self.start), self.end)


def build(timeline: RequestTimeline, receipt: Receipt, facts: RequestFacts, rng: random.Random) -> TraceRecord:
    """The spans of a request. `rng` makes their ids."""
    context = timeline.context
    within = _Within(context.span_id, receipt.arrived, receipt.arrived + receipt.total_s)
    below = list(_below(timeline, receipt, within, rng))
    dropped = max(0, len(below) + 1 - MAX_SPANS)
    kept = below[: MAX_SPANS - 1]
    dropped += timeline.dropped + sum(part.dropped for part in timeline.parts)
    operation = _OPERATIONS.get(facts.operation, facts.operation.value)
    attributes = _request_attributes(receipt, facts, operation) | _server(timeline.server)
    if timeline.batch_row is not None:
        attributes[names.BATCH_ID], attributes[names.ROW_NUMBER] = timeline.batch_row
    if dropped:
        attributes[names.DROPPED_SPANS] = dropped
    error = None
    if has_failed(receipt.outcome, facts.error_code):
        error = facts.error_code or receipt.outcome.value
        attributes[names.ERROR_TYPE] = error
    request = SpanRecord(
        f"{operation} {receipt.model}" if receipt.model else operation,
        context.span_id,
        context.parent_id,
        SpanKind.SERVER,
        within.start,
        within.end,
        attributes,
        error=error,
    )
    return TraceRecord(context, (request, *kept))


def _below(timeline: RequestTimeline, receipt: Receipt, within: _Within, rng: random.Random) -> Iterator[SpanRecord]:
    """The spans within that of the request."""
    if timeline.limits_at is not None:
        start = within.clamp(timeline.limits_at)
        end = within.clamp(timeline.limits_until)
        yield SpanRecord(names.LIMITS_SPAN, new_span_id(rng), within.span_id, SpanKind.INTERNAL, start, end)
    yield from _attempts(timeline.attempts, receipt, within, rng)
    for number, part in enumerate(timeline.parts):
        if not part.attempts:
            continue
        start = within.clamp(part.attempts[0].queued_at)
        end = within.clamp(part.attempts[-1].ended_at)
        inner = _Within(new_span_id(rng), start, end)
        attributes = {names.NUMBER: number}
        yield SpanRecord(names.PROMPT_SPAN, inner.span_id, within.span_id, SpanKind.INTERNAL, start, end, attributes)
        yield from _attempts(part.attempts, receipt, inner, rng)


def _attempts(
    attempts: Sequence[Attempt], receipt: Receipt, within: _Within, rng: random.Random
) -> Iterator[SpanRecord]:
    """The spans of each attempt, in order."""
    before: Attempt | None = None
    for number, attempt in enumerate(attempts):
        is_last = number + 1 == len(attempts)
        until = _Within(within.span_id, within.start, within.end if is_last else attempts[number + 1].queued_at)
        yield _queue(attempt, receipt, until, rng, is_first=before is None)
        if attempt.began_at is not None:
            yield _run(attempt, before, until, rng)
            if attempt.relayed_at is not None:
                start = until.clamp(attempt.relayed_at)
                end = max(start, until.clamp(attempt.ended_at))
                yield SpanRecord(names.RELAY_SPAN, new_span_id(rng), until.span_id, SpanKind.INTERNAL, start, end)
        before = attempt


def _queue(attempt: Attempt, receipt: Receipt, within: _Within, rng: random.Random, *, is_first: bool) -> SpanRecord:
    """The wait of an attempt."""
    start = within.clamp(attempt.queued_at)
    end = within.clamp(attempt.began_at)
    events: tuple[SpanEvent, ...] = ()
    if attempt.waited_for is not None:
        waited: Attributes = {names.REASON: attempt.waited_for.value, names.WAIT_S: attempt.waited_s}
        events = (SpanEvent(names.WAITED, end, waited),)
    attributes: dict[str, Value] = {}
    if is_first:
        attributes[names.AHEAD] = sum(count for _, count in receipt.trace.ahead)
    error = attempt.error if attempt.began_at is None and attempt.error else None
    if error is not None:
        attributes[names.ERROR_TYPE] = error
    return SpanRecord(
        names.QUEUE_SPAN, new_span_id(rng), within.span_id, SpanKind.INTERNAL, start, end, attributes, events, error
    )


def _run(attempt: Attempt, before: Attempt | None, within: _Within, rng: random.Random) -> SpanRecord:
    """The run of an attempt. `before`: the earlier attempt."""
    start = within.clamp(attempt.began_at)
    done = attempt.ended_at if attempt.done_at is None else attempt.done_at
    inner = _Within(within.span_id, start, max(start, within.clamp(done)))
    attributes: dict[str, Value] = {
        names.REPLICA: attempt.replica_id,
        names.RUN_END: attempt.end.value,
        names.OUTPUT_TOKENS: attempt.tokens,
    }
    if attempt.route:
        attributes[names.ROUTE] = attempt.route
    error = None
    if attempt.error and attempt.end not in (AttemptEnd.PREEMPTED, AttemptEnd.MOVED):
        error = attempt.error
        attributes[names.ERROR_TYPE] = error
    events = tuple(sorted(_run_events(attempt, before, inner), key=lambda event: event.at))
    return SpanRecord(
        names.RUN_SPAN,
        new_span_id(rng),
        within.span_id,
        SpanKind.CLIENT,
        inner.start,
        inner.end,
        attributes,
        events,
        error,
    )


def _run_events(attempt: Attempt, before: Attempt | None, within: _Within) -> Iterator[SpanEvent]:
    if before is not None and before.end in _RESUMES and attempt.relayed_at is not None:
        since = before.queued_at if before.ended_at is None else before.ended_at
        gap_s = max(0.0, attempt.relayed_at - since)
        yield SpanEvent(_RESUMES[before.end], within.clamp(attempt.relayed_at), {names.GAP_S: gap_s})
    if attempt.first_token_at is not None:
        yield SpanEvent(names.FIRST_TOKEN, within.clamp(attempt.first_token_at))
    if attempt.end in _STOPS:
        yield SpanEvent(_STOPS[attempt.end], within.end)


def _request_attributes(receipt: Receipt, facts: RequestFacts, operation: str) -> dict[str, Value]:
    """The attributes of the request's own span, without those that are not known."""
    is_stream = facts.is_streamed and facts.operation.generates
    found: dict[str, Value | None] = {
        names.OPERATION: operation,
        names.PROVIDER: names.SCOPE,
        names.MODEL: receipt.model or None,
        names.STREAM: is_stream if facts.operation.generates else None,
        names.TIME_TO_FIRST_CHUNK: receipt.first_token_s if is_stream else None,
        names.INPUT_TOKENS: receipt.prompt_tokens,
        names.CACHED_TOKENS: facts.cached_tokens or None,
        names.OUTPUT_TOKENS: receipt.output_tokens,
        names.HTTP_STATUS: facts.status or None,
        names.REQUEST_ID: receipt.request_id,
        names.CLIENT_REQUEST_ID: receipt.client_id,
        names.TENANT: receipt.tenant,
        names.CLASS: receipt.request_class.label,
        names.OUTCOME: receipt.outcome.value,
        names.IS_ROW: receipt.trace.is_row or None,
        names.FIRST_TOKEN_S: receipt.first_token_s,
        names.KV_TOKEN_S: receipt.trace.kv_token_s or None,
        names.SLO: None if receipt.slo is None else receipt.slo.value,
        names.RETRY_AFTER_S: receipt.retry_after_s,
    }
    return {name: value for name, value in found.items() if value is not None}


def _server(called: str) -> dict[str, Value]:
    """Address and port of a `Host` header."""
    if not called:
        return {}
    address, colon, port = called.rpartition(":")
    if colon and port.isascii() and port.isdecimal() and len(port) <= MAX_PORT_DIGITS:
        return {names.SERVER_ADDRESS: address.strip("[]"), names.SERVER_PORT: int(port)}
    return {names.SERVER_ADDRESS: called.strip("[]")}
