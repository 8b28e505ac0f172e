"""Records a request from arrival to end: for the metrics, its receipt, and the estimates of later requests.

Invariant: every error and every answer has exactly one outcome.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from serve_app.core.estimate import ObservedUse
from serve_app.core.limits import LimitReason
from serve_app.core.queue import RefusalReason
from serve_app.core.receipts import Receipt, ServedRequest, ServiceLevel, judge
from serve_app.core.usage import BATCH_SUFFIX, RequestUse
from serve_app.errors import EngineFailed, Overloaded, RequestFailed, ServeAppError
from serve_app.http.error_responses import Headers
from serve_app.http.request_size import NO_COST, RequestCost
from serve_app.http.response import HttpExchange
from serve_app.router import RequestTrace
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
        slots: of a replica's batch.
        parts: the requests of its prompts, if they are a list.
        granted_at: when it was last submitted to a replica from its start.
        created: the time that its answer states, in seconds since the epoch.
        limit_wait_s: seconds that it waited aside for a limit of its key or tenant.
        error: the one that ended it; `outcome` is `outcome_of` it.
        service_level: the target of its class, if it generates.
        router_losses: earlier runs under its Idempotency-Key that were lost with their router.
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
    cost: RequestCost = NO_COST
    slots: int = 0
    trace: RequestTrace = field(default_factory=RequestTrace)
    granted_at: float | None = None
    created: int = 0
    stream: ResponseStream | None = None
    usage: TokenUsage | None = None
    service_level: ServiceLevel | None = None
    streamed: bool = True
    router_losses: int = 0
    recorder: HttpExchange | None = None
    parts: list[RequestRecord] = field(default_factory=list)
    key_id: str = ""
    limit_wait_s: float = 0.0

    @property
    def is_row(self) -> bool:
        """Whether it is a row of a batch."""
        return self.trace.is_row

    @property
    def key_owner(self) -> str:
        """Whose its Idempotency-Key is: the answers kept of a tenant's rows cost its own requests no kept answer."""
        return f"{self.tenant}\0batch" if self.is_row else self.tenant

    @property
    def used_model(self) -> str:
        """The model's name in reports of use, where rows of batches are apart."""
        return self.model + BATCH_SUFFIX if self.is_row else self.model

    def on_submit(self, now: float, wall: float) -> None:
        """It is handed to a replica. A stream that goes on there has begun already."""
        if self.trace.lost is None:
            self.granted_at = now
            self.created = int(wall)

    def on_first_frames(self, stream: ResponseStream) -> float | None:
        """A run begins to answer; returns the seconds to the first token of a stream, if the client has none yet."""
        self.stream = stream
        return self.first_token_s if self.streamed and not self.trace.client_has_part else None

    @property
    def first_token_s(self) -> float | None:
        """Seconds to the first token, of a list to that of all its prompts; None: there is none."""
        firsts = [at for part in self.parts or [self] if (at := part.trace.pace.first_at) is not None]
        return min(firsts) - self.started if firsts else None

    def add_up_parts(self) -> None:
        """Take over what the prompts of a list cost, used and waited for: sums, the first token, the longest wait."""
        parts = self.parts
        costs = [part.cost for part in parts]
        usages = [part.usage for part in parts if part.usage is not None]
        self.cost = RequestCost(
            prompt_bytes=sum(cost.prompt_bytes for cost in costs),
            prompt_tokens=sum(cost.prompt_tokens for cost in costs),
            output_tokens=sum(cost.output_tokens for cost in costs),
            answers=sum(cost.answers for cost in costs),
            source=costs[0].source,
            max_output_tokens=None,
            prompts=len(parts),
        )
        self.slots = sum(part.slots for part in parts)
        self.granted_at = max((part.granted_at for part in parts if part.granted_at is not None), default=None)
        if usages:
            self.usage = _sum(usages)
        longest = max(parts, key=lambda part: part.trace.waited_s).trace
        self.trace = replace(
            longest,
            sequences=sum(part.trace.sequences for part in parts),
            losses=sum(part.trace.losses for part in parts),
            preempted=sum(part.trace.preempted for part in parts),
            moved=sum(part.trace.moved for part in parts),
            kv_token_s=sum(part.trace.kv_token_s for part in parts),
            continued=[one for part in parts for one in part.trace.continued],
            not_continued=next((part.trace.not_continued for part in parts if part.trace.not_continued), None),
        )

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
            self.cost.prompt_bytes,
            usage.prompt_tokens,
            usage.completion_tokens,
            self.cost.answers,
            is_cut_off=usage.finish_reason != FINISH_STOP,
        )

    def use(self) -> RequestUse | None:
        """What it is counted with, once it has ended; None: it is not counted, since it got no tokens, or its client
        got an error instead of an answer."""
        parts = self.parts or [self]
        got_answer = self.outcome in _WITH_ANSWER or any(part.stream and part.stream.client_has_seen for part in parts)
        if self.granted_at is None or not got_answer:
            return None
        tokens = self.tokens_used()
        is_settled = bool(tokens.prompt_tokens or tokens.completion_tokens)
        if not is_settled:  # an engine reports nothing of an answer that is not streamed before its end
            is_streamed = self.streamed and self.operation.generates
            if is_streamed or self.outcome is not Outcome.CANCELLED_RUNNING or not self.operation.takes_slot:
                return None
        return RequestUse(
            tokens.prompt_tokens,
            tokens.cached_tokens,
            tokens.completion_tokens,
            kv_token_ms=round(1000 * self.trace.kv_token_s),
            wait_ms=round(1000 * (self.granted_at - self.started)),
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
        times = (b"x-serve-app-wait-ms", self.granted_at), (b"x-serve-app-first-token-ms", self.trace.pace.first_at)
        return [(name, b"%d" % round(1000 * (at - self.started))) for name, at in times if at is not None]

    def receipt(self, now: float) -> Receipt:
        """The receipt of the ended request."""
        cost = self.cost
        trace = self.trace
        usage = self.usage
        granted = self.granted_at is not None
        output = None if self.stream is None else self.stream.tokens
        if usage is not None:
            output = usage.completion_tokens
        served = self._served(now)
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
            limit_wait_s=self.limit_wait_s,
            wait_s=(now if self.granted_at is None else self.granted_at) - self.started,
            total_s=now - self.started,
            granted=granted,
            ahead=trace.ahead,
            waited_for=trace.waited_for,
            first_token_s=served.ttft_s,
            replica_id=trace.replica_id,
            route=trace.route,
            losses=trace.losses,
            preempted=trace.preempted,
            moved=trace.moved,
            continued=tuple(trace.continued),
            not_continued=trace.not_continued,
            router_losses=self.router_losses,
            sequences=trace.sequences,
            slots=self.slots,
            estimated_prompt=cost.prompt_tokens,
            estimated_output=cost.output_tokens,
            source=cost.source,
            prompt_tokens=None if usage is None else usage.prompt_tokens,
            output_tokens=output,
            kv_token_s=trace.kv_token_s,
            refused=self._refused(),
            retry_after_s=None if self.error is None else self.error.retry_after_s,
            deadline_s=self.deadline_s,
            itl_s=served.itl_s,
            longest_gap_s=trace.pace.longest_gap_s if self.streamed and not self.parts and served.itl_s else None,
            slo=None if level is None else judge(level, served),
            ttft_slo_s=None if level is None else level.ttft_s,
            itl_slo_s=None if level is None else level.itl_s,
        )

    def _refused(self) -> str | None:
        """Why it was refused, in the words of receipts."""
        if self.error is None:
            return None
        return _REASONS.get(self.error.code) or (self.error.code if self.outcome is Outcome.REFUSED else None)

    def _served(self, now: float) -> ServedRequest:
        """The values judged against its service level: tokens count when they arrive here, not when the client reads
        them. Of a list, the ITL is the mean of all prompts."""
        runs = [(part.trace.pace, part) for part in self.parts or [self] if part.trace.pace.first_at is not None]
        is_whole = self.outcome is Outcome.OK and runs
        return ServedRequest(
            self.outcome,
            (max(pace.last_at for pace, _ in runs) if is_whole else now) - self.started,
            self.first_token_s,
            sum(pace.last_at - (pace.first_at or 0.0) for pace, _ in runs),
            1 + sum(max(0.0, part.tokens_received().completion_tokens / part.cost.answers - 1) for _, part in runs),
        )


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
        outcome = Outcome.CANCELLED_QUEUED if record.granted_at is None else Outcome.CANCELLED_RUNNING
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
