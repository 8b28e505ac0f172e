"""What became of a request, from its arrival on: for the metrics, its receipt, and the estimates of later ones.

Invariant: every error and every answer has exactly one outcome.
"""

from __future__ import annotations

from serve_app.core.estimate import Source, Use
from serve_app.core.queue import Reason
from serve_app.core.receipts import Receipt, Served, ServiceLevel, judge
from serve_app.errors import EngineFailed, Overloaded, ServeAppError
from serve_app.http.request_cost import Cost
from serve_app.router import RequestTrace
from serve_app.transport import ENDED, Stream, Usage
from serve_app.types import Operation, Outcome, RequestClass

_REASONS = {reason.value: reason for reason in Reason} | {"kv_budget": Reason.TIMEOUT}  # by the error's code


class Record:
    """One request. Moments are seconds of the host's monotonic clock.

    Args:
        client_id: what the client calls it.
        request_class: the class of its key, until it has said what it wants.
    """

    __slots__ = (
        "client_id",
        "cost",
        "deadline_s",
        "error",
        "first_token_s",
        "granted_at",
        "level",
        "model",
        "operation",
        "outcome",
        "request_class",
        "request_id",
        "slots",
        "started",
        "stream",
        "streamed",
        "tenant",
        "trace",
        "usage",
    )

    def __init__(
        self,
        request_id: str,
        client_id: str | None,
        operation: Operation,
        tenant: str,
        request_class: RequestClass,
        started: float,
    ) -> None:
        self.request_id, self.client_id = request_id, client_id
        self.operation = operation
        self.tenant = tenant
        self.request_class = request_class
        self.started = started
        self.model = ""
        self.outcome = Outcome.INTERNAL_ERROR
        self.error: ServeAppError | None = None
        self.deadline_s: float | None = None
        self.cost: Cost | None = None
        self.slots = 0  # of a replica's batch
        self.trace = RequestTrace()
        self.granted_at: float | None = None  # when it was handed in last
        self.stream: Stream | None = None
        self.first_token_s: float | None = None
        self.usage: Usage | None = None
        self.level: ServiceLevel | None = None  # what its class promises, if it generates
        self.streamed = True

    @property
    def granted(self) -> bool:
        return self.granted_at is not None

    def failed(self, error: ServeAppError) -> None:
        """It ends by this error."""
        self.outcome, self.error = outcome_of(error), error

    def use(self) -> Use | None:
        """What it has needed, for estimates; None where it generated nothing, or nothing can be learned from it."""
        if not self.operation.generates or self.stream is None or self.cost is None:
            return None
        usage = self.usage or Usage(completion_tokens=self.stream.tokens)
        if not usage.completion_tokens:
            return None
        return Use(
            self.tenant,
            self.model,
            self.cost.prompt_bytes,
            usage.prompt_tokens,
            usage.completion_tokens,
            self.cost.answers,
            cut=usage.finish_reason != ENDED,
        )

    def receipt(self, now: float) -> Receipt:
        """What is kept of it, now that it ends."""
        wait_s = (now if self.granted_at is None else self.granted_at) - self.started
        cost, trace, error = self.cost, self.trace, self.error
        output = None if self.stream is None else self.stream.tokens
        if self.usage is not None:
            output = self.usage.completion_tokens
        served = self._served(now, output or 0)
        level = self.level if self.granted or self.outcome is not Outcome.OK else None  # a repeated answer is no other
        return Receipt(
            request_id=self.request_id,
            client_id=self.client_id,
            request_class=self.request_class,
            tenant=self.tenant,
            model=self.model,
            outcome=self.outcome,
            arrived=self.started,
            wait_s=wait_s,
            total_s=now - self.started,
            granted=self.granted,
            ahead=trace.ahead,
            first_token_s=served.ttft_s,
            replica_id=trace.replica_id,
            route=trace.route,
            losses=trace.losses,
            sequences=trace.sequences,
            slots=self.slots,
            estimated_prompt=0 if cost is None else cost.prompt_tokens,
            estimated_output=0 if cost is None else cost.output_tokens,
            source=Source.PRIOR if cost is None else cost.source,
            prompt_tokens=self.usage.prompt_tokens if self.usage is not None else None,
            output_tokens=output,
            kv_token_s=trace.kv_token_s,
            refused=_reason(error),
            retry_after_s=None if error is None else error.retry_after_s,
            deadline_s=self.deadline_s,
            itl_s=served.itl_s,
            longest_gap_s=None if served.itl_s is None or self.stream is None else self.stream.pace.longest_gap_s,
            slo=None if level is None else judge(level, served),
            ttft_slo_s=None if level is None else level.ttft_s,
            itl_slo_s=None if level is None else level.itl_s,
        )

    def _served(self, now: float, output: int) -> Served:
        """What is held against its class's level: tokens by when they came here, not by when the client read them."""
        pace = None if self.stream is None else self.stream.pace
        answers = 1 if self.cost is None else self.cost.answers
        if pace is None or pace.first_at is None:
            return Served(self.outcome, now - self.started, self.first_token_s, streamed=self.streamed)
        ended = pace.last_at if self.outcome is Outcome.OK else now
        return Served(
            self.outcome,
            ended - self.started,
            pace.first_at - self.started,
            pace.last_at - pace.first_at,
            output / answers,
            self.streamed,
        )


def answered(status: int) -> Outcome:
    """The outcome of a request that an engine answered."""
    if status < 400:
        return Outcome.OK
    return Outcome.BAD_REQUEST if status < 500 else Outcome.ENGINE_FAILED


def outcome_of(error: ServeAppError) -> Outcome:
    match error:
        case EngineFailed():
            return Outcome.ENGINE_FAILED
        case Overloaded():
            return Outcome.REFUSED
        case _ if error.status == 503:
            return Outcome.REFUSED
        case _ if error.status < 500:
            return Outcome.BAD_REQUEST
        case _:
            return Outcome.INTERNAL_ERROR


def _reason(error: ServeAppError | None) -> Reason | None:
    """Why the line refused it; None: that is not what happened."""
    if error is None:
        return None
    found = _REASONS.get(error.code or "")
    return Reason.NO_REPLICA if found is None and outcome_of(error) is Outcome.REFUSED else found
