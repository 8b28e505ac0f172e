"""Records a request from arrival to end: for the metrics, its receipt, and the estimates of later requests.

Invariant: every error and every answer has exactly one outcome.
"""

from __future__ import annotations

from serve_app.core.estimate import EstimateSource, ObservedUse
from serve_app.core.queue import RefusalReason
from serve_app.core.receipts import Receipt, ServedRequest, ServiceLevel, judge
from serve_app.errors import EngineFailed, Overloaded, ServeAppError
from serve_app.http.request_cost import RequestCost
from serve_app.router import RequestTrace
from serve_app.transport import FINISH_STOP, ResponseStream, TokenUsage
from serve_app.types import Operation, Outcome, RequestClass

_REASONS = {reason.value: reason for reason in RefusalReason} | {
    "kv_budget": RefusalReason.TIMEOUT
}  # by the error's code


class RequestRecord:
    """One request. Times are seconds of the host's monotonic clock.

    Args:
        client_id: the request id that the client sent.
        request_class: the key's default class, until the body is read.
    """

    __slots__ = (
        "client_id",
        "cost",
        "deadline_s",
        "error",
        "first_token_s",
        "granted_at",
        "model",
        "operation",
        "outcome",
        "request_class",
        "request_id",
        "service_level",
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
        self.cost: RequestCost | None = None
        self.slots = 0  # of a replica's batch
        self.trace = RequestTrace()
        self.granted_at: float | None = None  # when it was last submitted to a replica
        self.stream: ResponseStream | None = None
        self.first_token_s: float | None = None
        self.usage: TokenUsage | None = None
        self.service_level: ServiceLevel | None = None  # the target of its class, if it generates
        self.streamed = True

    @property
    def is_granted(self) -> bool:
        return self.granted_at is not None

    def set_error(self, error: ServeAppError) -> None:
        """Set the error that ends the request, and its outcome."""
        self.outcome, self.error = outcome_of(error), error

    def token_use(self) -> ObservedUse | None:
        """The tokens it used, for estimates; None if it generated nothing, or its use is unknown."""
        if not self.operation.generates or self.stream is None or self.cost is None:
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

    def receipt(self, now: float) -> Receipt:
        """The receipt of the ended request."""
        wait_s = (now if self.granted_at is None else self.granted_at) - self.started
        cost, trace, error = self.cost, self.trace, self.error
        output = None if self.stream is None else self.stream.tokens
        if self.usage is not None:
            output = self.usage.completion_tokens
        served = self._served(now, output or 0)
        # a replayed answer is not judged
        level = self.service_level if self.is_granted or self.outcome is not Outcome.OK else None
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
            granted=self.is_granted,
            ahead=trace.ahead,
            first_token_s=served.ttft_s,
            replica_id=trace.replica_id,
            route=trace.route,
            losses=trace.losses,
            sequences=trace.sequences,
            slots=self.slots,
            estimated_prompt=0 if cost is None else cost.prompt_tokens,
            estimated_output=0 if cost is None else cost.output_tokens,
            source=EstimateSource.PRIOR if cost is None else cost.source,
            prompt_tokens=self.usage.prompt_tokens if self.usage is not None else None,
            output_tokens=output,
            kv_token_s=trace.kv_token_s,
            refused=_refusal_reason(error),
            retry_after_s=None if error is None else error.retry_after_s,
            deadline_s=self.deadline_s,
            itl_s=served.itl_s,
            longest_gap_s=None if served.itl_s is None or self.stream is None else self.stream.pace.longest_gap_s,
            slo=None if level is None else judge(level, served),
            ttft_slo_s=None if level is None else level.ttft_s,
            itl_slo_s=None if level is None else level.itl_s,
        )

    def _served(self, now: float, output: int) -> ServedRequest:
        """The values judged against its service level: tokens count when they arrive here, not when the client reads
        them."""
        pace = None if self.stream is None else self.stream.pace
        answers = 1 if self.cost is None else self.cost.answers
        if pace is None or pace.first_at is None:
            return ServedRequest(self.outcome, now - self.started, self.first_token_s, is_streamed=self.streamed)
        ended = pace.last_at if self.outcome is Outcome.OK else now
        return ServedRequest(
            self.outcome,
            ended - self.started,
            pace.first_at - self.started,
            pace.last_at - pace.first_at,
            output / answers,
            self.streamed,
        )


def outcome_of_status(status: int) -> Outcome:
    """The outcome of a request with an engine's answer."""
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


def _refusal_reason(error: ServeAppError | None) -> RefusalReason | None:
    """The queue's reason for the refusal; None: the queue did not refuse the request."""
    if error is None:
        return None
    found = _REASONS.get(error.code or "")
    return RefusalReason.NO_REPLICA if found is None and outcome_of(error) is Outcome.REFUSED else found
