"""Records a request from arrival to end: for the metrics, its receipt, and the estimates of later requests.

Invariant: every error and every answer has exactly one outcome.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from serve_app.core.estimate import ObservedUse
from serve_app.core.limits import LimitReason
from serve_app.core.names import HopReason
from serve_app.core.queue import RefusalReason
from serve_app.core.receipts import LIMIT_WAIT, Receipt, RequestTrace, ServiceLevel, judge
from serve_app.core.usage import BATCH_SUFFIX, RequestUse, UsedModel
from serve_app.errors import EngineFailed, Overloaded, RequestFailed, ServeAppError
from serve_app.http.error_responses import Headers
from serve_app.http.response import HttpExchange
from serve_app.router import MAX_NOTES, RequestRuns
from serve_app.transport import FINISH_STOP, ResponseStream, TokenUsage
from serve_app.types import Operation, Outcome, RequestClass

_WITH_ANSWER = (Outcome.OK, Outcome.CANCELLED_RUNNING)
# By the error's code.
_REASONS: dict[str, str] = {
    **{reason.value: reason for reason in RefusalReason if reason is not RefusalReason.NOT_CONTINUABLE},
    **{reason.value: reason for reason in LimitReason},
    "kv_budget": RefusalReason.TIMEOUT,
}


@dataclass(slots=True)
class RequestRecord:
    """One request. Times are seconds of the host's monotonic clock.

    Args:
        client_id: the request id that the client sent.
        request_class: the key's default class, until the body is read.
        runs: on replicas, with the trace of what happened on its way.
        parts: the requests of its prompts, if they are a list.
        submitted_at: when it was last submitted to a replica from its start; None: never.
        created: the time that its answer states, in seconds since the epoch.
        error: the one that ended it; `outcome` is `outcome_of` it.
        service_level: the target of its class, if it generates.
        prefix_blocks: hashes of its prompt, for its record.
        traceparent: its span in its trace, for the engine; empty: there is none.
        recorder: the exchange whose end is its end: with an Idempotency-Key, that of its run.
    """

    request_id: str
    client_id: str | None
    operation: Operation
    tenant: str
    request_class: RequestClass
    started: float
    model: str = ""
    outcome: Outcome = Outcome.INTERNAL_ERROR
    error: ServeAppError | None = None
    deadline_s: float | None = None
    runs: RequestRuns = field(default_factory=RequestRuns)
    submitted_at: float | None = None
    created: int = 0
    stream: ResponseStream | None = None
    usage: TokenUsage | None = None
    service_level: ServiceLevel | None = None
    streamed: bool = True
    recorder: HttpExchange | None = None
    parts: list[RequestRecord] = field(default_factory=list)
    key_id: str = ""
    prefix_blocks: tuple[str, ...] = ()
    traceparent: str = ""
    session_id: str | None = None

    def __post_init__(self) -> None:
        self.runs.operation = self.operation

    @property
    def trace(self) -> RequestTrace:
        """What happened on its way."""
        return self.runs.trace

    @property
    def is_row(self) -> bool:
        """Whether it is a row of a batch."""
        return self.trace.is_row

    @property
    def key_owner(self) -> str:
        """Whose its Idempotency-Key is: the answers kept of a tenant's rows cost its own requests no kept answer."""
        return f"{self.tenant}\0batch" if self.is_row else self.tenant

    @property
    def used_model(self) -> UsedModel:
        """Its names in reports of use, where rows of batches are apart."""
        suffix = BATCH_SUFFIX if self.is_row else ""
        asked = self.trace.asked_model
        return UsedModel(self.model + suffix, "" if asked is None else asked + suffix)

    def on_submit(self, now: float, wall: float) -> None:
        """It is handed to a replica. A stream that is continued there has begun already."""
        if self.runs.to_continue is None:
            self.submitted_at = now
            self.created = int(wall)

    def on_hop(self, reason: HopReason) -> None:
        """It leaves its model for the next one of its name, where it begins anew."""
        left = self.trace
        trace = RequestTrace(
            is_row=left.is_row,
            limit_wait_s=left.limit_wait_s,
            router_losses=left.router_losses,
            trace_id=left.trace_id,
            trace_sampled=left.trace_sampled,
            asked_model=left.asked_model,
            hops=(*left.hops, (self.model, reason.value)),
        )
        self.runs = RequestRuns(trace, timeline=self.runs.timeline, notes=self.runs.notes, operation=self.operation)
        self.submitted_at = None
        self.stream = None
        self.usage = None
        self.parts = []

    def on_first_frames(self, stream: ResponseStream) -> float | None:
        """A run begins to answer; returns the seconds to the first token of a stream, if the client has none yet."""
        self.stream = stream
        return self.first_token_s if self.streamed and not self.runs.client_has_part else None

    @property
    def first_token_s(self) -> float | None:
        """Seconds to the first token, of a list to that of all its prompts; None: there is none."""
        firsts = [at for part in self.parts or [self] if (at := part.runs.pace.first_at) is not None]
        return min(firsts) - self.started if firsts else None

    @property
    def itl_s(self) -> float | None:
        """Mean seconds between tokens, of all prompts of a list; None: none had two. Tokens count when they arrive
        here, not when the client reads them."""
        span_s = gaps = 0.0
        for part in self.parts or [self]:
            pace = part.runs.pace
            if pace.first_at is not None:
                span_s += pace.last_at - pace.first_at
                gaps += max(0.0, part.tokens_received().completion_tokens / part.trace.measure.answers - 1)
        return span_s / gaps if gaps else None

    def add_up_parts(self) -> None:
        """Take over what the prompts of a list cost, used and waited for: sums, the first token, the longest wait."""
        parts = self.parts
        usages = [part.usage for part in parts if part.usage is not None]
        self.submitted_at = max((part.submitted_at for part in parts if part.submitted_at is not None), default=None)
        if usages:
            self.usage = _sum(usages)
        total = RequestTrace.total([part.trace for part in parts])
        notes = [note for part in parts for note in part.runs.notes][:MAX_NOTES]
        self.runs = RequestRuns(total, timeline=self.runs.timeline, notes=notes)

    def token_use(self) -> ObservedUse | None:
        """The tokens it used, for estimates; None if it generated nothing, or its use is unknown."""
        if not self.operation.generates or self.stream is None:
            return None
        usage = self.usage or TokenUsage(completion_tokens=self.stream.tokens)
        if not usage.completion_tokens:
            return None
        return ObservedUse(
            self.tenant,
            self.model,
            self.trace.measure.prompt_bytes,
            usage.prompt_tokens,
            usage.completion_tokens,
            self.trace.measure.answers,
            is_cut_off=usage.finish_reason != FINISH_STOP,
        )

    def use(self) -> RequestUse | None:
        """What it is counted with, once it has ended; None: it is not counted, since it got no tokens, or its client
        got an error instead of an answer."""
        parts = self.parts or [self]
        got_answer = self.outcome in _WITH_ANSWER or any(part.stream and part.stream.client_has_seen for part in parts)
        if self.submitted_at is None or not got_answer:
            return None
        tokens = self.tokens_used()
        is_settled = bool(tokens.prompt_tokens or tokens.completion_tokens)
        # an engine reports nothing of an answer that is not streamed before its end
        was_cut = self.outcome is Outcome.CANCELLED_RUNNING and self.operation.takes_slot and not self.streamed
        if not is_settled and not was_cut:
            return None
        return RequestUse(
            tokens.prompt_tokens,
            tokens.cached_tokens,
            tokens.completion_tokens,
            kv_token_ms=round(1000 * self.trace.kv_token_s),
            wait_ms=round(1000 * (self.submitted_at - self.started)),
            is_settled=is_settled,
        )

    def tokens_used(self) -> TokenUsage:
        """The tokens received, of all prompts of a list."""
        return _sum([part.tokens_received() for part in self.parts or [self]])

    def tokens_received(self) -> TokenUsage:
        """The tokens that its answer's own `usage` has; of an answer that was cut off, those that had arrived here."""
        usage = self.usage
        if usage is None and self.stream is not None:
            prompt = self.stream.prompt or TokenUsage()
            usage = self.stream.usage or TokenUsage(prompt.prompt_tokens, self.stream.tokens, prompt.cached_tokens)
        return usage or TokenUsage()

    def time_headers(self) -> Headers:
        """Milliseconds from its arrival until it was handed to a replica, and until its first token there."""
        times = (b"x-serve-app-wait-ms", self.submitted_at), (b"x-serve-app-first-token-ms", self.runs.pace.first_at)
        return [(name, b"%d" % round(1000 * (at - self.started))) for name, at in times if at is not None]

    def receipt(self, now: float) -> Receipt:
        """The receipt of the ended request."""
        granted = self.submitted_at is not None
        tokens = self.tokens_used()
        has_tokens = self.usage is not None or tokens != TokenUsage()
        total_s = now - self.started
        first_s = self.first_token_s
        itl_s = self.itl_s
        # a replayed answer is not judged
        level = self.service_level if granted or self.outcome is not Outcome.OK else None
        return Receipt(
            request_id=self.request_id,
            client_id=self.client_id,
            request_class=self.request_class,
            tenant=self.tenant,
            model=self.model,
            outcome=self.outcome,
            arrived=self.started,
            wait_s=(now if self.submitted_at is None else self.submitted_at) - self.started,
            total_s=total_s,
            granted=granted,
            first_token_s=first_s,
            prompt_tokens=tokens.prompt_tokens if has_tokens else None,
            output_tokens=tokens.completion_tokens if has_tokens or self.stream is not None else None,
            refused=self._refused(),
            retry_after_s=None if self.error is None else self.error.retry_after_s,
            deadline_s=self.deadline_s,
            itl_s=itl_s,
            longest_gap_s=self.runs.pace.longest_gap_s if self.streamed and not self.parts and itl_s else None,
            slo=None if level is None else judge(level, self.outcome, total_s, first_s, itl_s),
            ttft_slo_s=None if level is None else level.ttft_s,
            itl_slo_s=None if level is None else level.itl_s,
            waits=self.waits(),
            key_id=self.key_id,
            session_id=self.session_id,
            trace=self.trace,
        )

    def own_fields(self) -> dict[str, Any]:
        """What its record has beside its receipt. Times of runs count from its arrival."""
        runs = [
            {
                "replica_id": note.replica_id,
                "began_s": round(note.began - self.started, 6),
                "ended_s": None if note.ended is None else round(note.ended - self.started, 6),
                "end": note.end,
            }
            for note in self.runs.notes
        ]
        return {
            "operation": self.operation.value,
            "is_row": self.is_row,
            "prefix_blocks": list(self.prefix_blocks),
            "cached_tokens": self.tokens_used().cached_tokens,
            "runs": runs,
        }

    def waits(self) -> dict[str, float]:
        """The seconds of its waits by their reason."""
        limit_s = round(self.trace.limit_wait_s, 6)
        found: dict[str, float] = {LIMIT_WAIT: limit_s} if limit_s else {}
        for note in self.runs.notes:
            if note.waited_for is not None:
                found[note.waited_for] = round(found.get(note.waited_for, 0.0) + note.waited_s, 6)
        return found

    def waits_since(self) -> float:
        """When it began to wait, for the first time or again after its last run."""
        last = self.runs.notes[-1].ended if self.runs.notes else None
        return self.started if last is None else last

    def _refused(self) -> str | None:
        """Why it was refused, in the words of receipts."""
        if self.error is None:
            return None
        return _REASONS.get(self.error.code) or (self.error.code if self.outcome is Outcome.REFUSED else None)


def _sum(usages: Sequence[TokenUsage]) -> TokenUsage:
    return TokenUsage(
        sum(usage.prompt_tokens for usage in usages),
        sum(usage.completion_tokens for usage in usages),
        sum(usage.cached_tokens for usage in usages),
    )


@contextlib.contextmanager
def recorded(record: RequestRecord, exchange: HttpExchange, end: Callable[[RequestRecord], None]) -> Iterator[None]:
    """Record how the block ends, and call `end`; has no effect if another exchange is the record's by then."""
    outcome = Outcome.INTERNAL_ERROR
    failed = None
    try:
        yield
        outcome = outcome_of_status(exchange.status)
    except asyncio.CancelledError:
        outcome = Outcome.CANCELLED_QUEUED if record.submitted_at is None else Outcome.CANCELLED_RUNNING
        raise
    except ServeAppError as error:
        outcome = outcome_of(error)
        failed = error
        raise
    finally:
        if record.recorder is exchange:
            record.outcome = outcome
            record.error = failed
            end(record)


def outcome_of_status(status: int) -> Outcome:
    """The outcome of a request with an engine's answer."""
    if status < 400:
        return Outcome.OK
    return Outcome.BAD_REQUEST if status < 500 else Outcome.ENGINE_FAILED


def outcome_of(error: ServeAppError) -> Outcome:
    if isinstance(error, EngineFailed | RequestFailed):
        return Outcome.ENGINE_FAILED
    if isinstance(error, Overloaded) or error.status == 503:
        return Outcome.REFUSED
    return Outcome.BAD_REQUEST if error.status < 500 else Outcome.INTERNAL_ERROR
