"""The runs of one request, one after the other: how each has ended, and what it leaves to the next one. Pure.

A request whose client has received nothing begins anew after a loss. One of which the client has a part is continued
by another engine, if the engines can do that with what it asks for (`core.continuation`). A bound of losses counts from
the loss, however old the request is.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import msgspec

from serve_app.core.continuation import NotContinued, why_not_continued
from serve_app.core.queue import Arrival, WaitReason
from serve_app.core.receipts import RequestTrace, TokenPace
from serve_app.core.spans import AttemptEnd, RequestTimeline
from serve_app.errors import EngineFailed, EngineUnreachable, OperationUnknown, ServeAppError
from serve_app.transport import NOT_CONTINUABLE, STOPPED, ResponseStream, Submit, TokenUsage
from serve_app.types import Operation

MAX_NOTES = 16  # of runs of one request: a preempted one has some, a list of prompts one for each
MAX_LOSSES = 3  # engines that may die under one request before the request counts as the cause
# Other codes of an `EngineFailed` name a fault of the client or of this router: another engine would not help.
_LOSSES = (EngineFailed.code, EngineUnreachable.code, OperationUnknown.code, NOT_CONTINUABLE)


class RunEnd(enum.Enum):
    """How a run has ended."""

    ANSWERED = "answered"  # the client has the whole answer
    STOPPED = "stopped"  # by its router, for others or since its replica drains: it is continued later
    RESTARTS = "restarts"  # its engine is lost, and the client has received nothing: it runs again
    CONTINUES = "continues"  # its engine is lost, and the client has a part: another engine continues it
    FAILED = "failed"  # the client gets the error


class RunResult(NamedTuple):
    """The end of a run.

    Args:
        error: with which it ended; None: it was answered.
        stream: of the run; None: it was not submitted.
        not_continued: why a request of which the client has a part fails.
    """

    end: RunEnd
    error: ServeAppError | None = None
    stream: ResponseStream | None = None
    not_continued: NotContinued | None = None


@dataclass(slots=True)
class LossLimit:
    """Counts the engines that one request has lost.

    Args:
        max_wait_s: the longest permitted wait. started: when the request was granted a replica.
    """

    max_wait_s: float
    started: float
    engines_lost: int = 0
    give_up_at: float = field(init=False)

    def __post_init__(self) -> None:
        self.begin(self.started)

    def begin(self, now: float) -> None:
        """The longest wait for an engine that can be reached counts from now."""
        self.give_up_at = now + self.max_wait_s

    def is_last(self, error: ServeAppError, now: float) -> bool:
        """Whether this loss ends the request. An engine that never received it ends it only if it has reached none for
        `max_wait_s` since its first grant, or its first one after a loss."""
        if isinstance(error, EngineUnreachable):
            return now >= self.give_up_at
        return self.engines_lost + 1 >= MAX_LOSSES

    def count(self, error: ServeAppError, now: float) -> None:
        """Count a loss after which the request runs again."""
        if not isinstance(error, EngineUnreachable):
            self.engines_lost += 1
            self.begin(now)


@dataclass(slots=True)
class RunNote:
    """A run, for the request's record. Times are seconds of the monotonic clock.

    Args:
        waited_s, waited_for: in the queue before it. ended: None: it has not.
        end: a `RunEnd`, by value.
    """

    replica_id: str
    began: float
    waited_s: float
    waited_for: WaitReason | None
    ended: float | None = None
    end: str = ""


class Aside(NamedTuple):
    """What a request waits for outside of the queue, and since when."""

    reason: str
    since: float


@dataclass(slots=True)
class RequestRuns:
    """The runs of one request: what they leave to the next one, and the trace that they write.

    Args:
        queued_at: when it first arrived in the queue; None: it has not.
        submit: of its latest run; None: it has had none.
        to_continue: the earlier run that the next one continues; None: that begins anew.
        interrupted_at: when its stream lost an engine and was not continued yet; None: it was.
        keeps_place: see `Preempt`, of the last time that it was stopped.
        pace: when the tokens of its latest run came, and of those that this continued.
        timeline: notes the moments of its runs for its trace; None: traces are off.
        notes: of its runs, for its record; `MAX_NOTES` at most, the first ones.
        aside: its wait outside of the queue; None: there is none now.
        may_leave: another model may run it, so it does not wait for a replica of this one.
        operation: which the replicas have to know; None: any does.
        sent_back: by replicas of an earlier release, which do not know it: they cost it nothing but the time.
    """

    trace: RequestTrace = field(default_factory=RequestTrace)
    queued_at: float | None = None
    submit: Submit | None = None
    to_continue: ResponseStream | None = None
    interrupted_at: float | None = None
    keeps_place: bool = True
    pace: TokenPace = field(default_factory=TokenPace)
    timeline: RequestTimeline | None = None
    notes: list[RunNote] = field(default_factory=list)
    aside: Aside | None = None
    may_leave: bool = False
    operation: Operation | None = None
    sent_back: set[str] = field(default_factory=set)

    @property
    def has_run(self) -> bool:
        """Whether an earlier run was lost or stopped."""
        return self.trace.losses + self.trace.preempted + self.trace.moved > 0

    @property
    def client_has_part(self) -> bool:
        """Whether the client has received a part of the answer in an earlier run."""
        return self.to_continue is not None and self.to_continue.client_has_seen

    def is_sent_back(self, error: ServeAppError | None, replica_id: str) -> bool:
        """Whether a run has ended since its replica does not know the operation, for the first time."""
        if not isinstance(error, OperationUnknown) or replica_id in self.sent_back:
            return False
        self.sent_back.add(replica_id)
        return True

    def with_counted_prompt(self, request: Arrival) -> Arrival:
        """The request, with the tokens of its prompt as the engine of an earlier run has counted them."""
        prompt = None if self.to_continue is None else self.to_continue.prompt
        if prompt is None:
            return request
        cost = max(0, request.cost_tokens + prompt.prompt_tokens - request.prompt_tokens)
        return replace(request, prompt_tokens=prompt.prompt_tokens, cost_tokens=cost)

    def on_queued(self, now: float) -> float:
        """It waits for a replica, for the first time or again; returns when it did first."""
        first = now if self.queued_at is None else self.queued_at
        self.queued_at = first
        if self.timeline is not None:
            self.timeline.on_queued(now)
        return first

    def on_replica(self, replica_id: str, now: float) -> None:
        """It has a replica for its next run."""
        self.aside = None
        trace = self.trace
        trace.replica_id = replica_id
        if len(self.notes) < MAX_NOTES:
            self.notes.append(RunNote(replica_id, now, trace.waited_s, trace.waited_for))
        if self.timeline is not None:
            earlier = 0 if self.to_continue is None else self.to_continue.tokens
            self.timeline.on_waited(trace.waited_for, trace.waited_s)
            self.timeline.on_begun(now, replica_id, trace.route or "", earlier)

    def begin(self, submit: Submit) -> Submit:
        """A run begins; returns its request, which continues what earlier runs have produced."""
        if self.has_run:
            submit = msgspec.structs.replace(submit, accepted=True)
        if self.to_continue is not None:
            produced = self.to_continue.produced
            prompt = self.to_continue.prompt or TokenUsage()
            submit = msgspec.structs.replace(
                submit,
                groups=produced.groups,
                events=produced.events,
                cached_tokens=prompt.cached_tokens,
                fingerprint=self.to_continue.fingerprint,
            )
        self.submit = submit
        return submit

    def result(
        self,
        error: ServeAppError | None,
        stream: ResponseStream | None,
        limit: LossLimit,
        now: float,
        *,
        engines_continue: bool,
    ) -> RunResult:
        """How a run has ended; changes nothing.

        Args:
            error: with which it ended; None: the client has the whole answer.
            stream: of the run; None: it was not submitted.
            engines_continue: whether the model's engines can continue what another one has begun.
        """
        if error is None:
            return RunResult(RunEnd.ANSWERED)
        if error.code == STOPPED:
            return RunResult(RunEnd.STOPPED, error, stream)
        if not _is_engine_lost(error, stream):
            return RunResult(RunEnd.FAILED, error)
        runs = (stream, self.to_continue)
        seen = next((one for one in runs if one is not None and one.client_has_seen), None)
        if seen is None:
            end = RunEnd.FAILED if limit.is_last(error, now) else RunEnd.RESTARTS
            return RunResult(end, error, stream)
        why = None
        if error.code == NOT_CONTINUABLE:
            why = NotContinued.REFUSED
        elif self.submit is not None:
            why = why_not_continued(
                self.submit.operation,
                self.submit.body,
                engine_continues=engines_continue,
                is_recorded=seen.produced.is_whole,
            )
        if why is None and limit.is_last(error, now):
            why = NotContinued.LOSSES
        return RunResult(RunEnd.FAILED if why else RunEnd.CONTINUES, error, seen, why)

    def on_refused(self, refused: ServeAppError, error: ServeAppError | None) -> ServeAppError | None:
        """The queue has refused it after a run with this error (None: it has not run); returns the error that its
        client gets. None: no engine may continue what it has produced, its client has nothing, and it begins anew."""
        if self.timeline is not None:
            self.timeline.on_refused(refused.code)
        is_other_model = refused.code == NOT_CONTINUABLE
        if is_other_model and not self.client_has_part:
            self.to_continue = None
            return None
        if error is None or not self.client_has_part:
            return refused
        self.trace.not_continued = NotContinued.ENGINE if is_other_model else NotContinued.QUEUE
        if is_other_model:
            return refused
        broken = f"The answer broke off, and no replica could continue it: {refused.message}"
        return EngineFailed(broken, code=error.code, reason=str(error))

    def on_stopped(self, stream: ResponseStream | None, *, keeps_place: bool, is_drained: bool) -> None:
        """A run was stopped, and is continued if it has produced something. `is_drained`: since its replica drains."""
        if stream is not None and stream.can_be_continued:
            self.to_continue = stream
        if is_drained and self.timeline is not None:
            self.timeline.attempts[-1].end = AttemptEnd.MOVED
        if is_drained:
            self.trace.moved += 1
        else:
            self.trace.preempted += 1
        self.keeps_place = keeps_place

    def on_failed(self, result: RunResult) -> ServeAppError:
        """A run was the last one; returns the error that the client gets."""
        assert result.error is not None
        self.trace.not_continued = result.not_continued
        return result.error

    def on_lost(self, result: RunResult, limit: LossLimit, now: float) -> None:
        """A run has lost its engine, and another one begins anew or continues it."""
        assert result.error is not None
        limit.count(result.error, now)
        self.trace.losses += 1
        if result.end is RunEnd.CONTINUES:
            self.to_continue = result.stream
            self.interrupted_at = now if self.interrupted_at is None else self.interrupted_at
        elif result.error.code == NOT_CONTINUABLE:
            self.to_continue = None

    def on_ended(
        self,
        error: ServeAppError | None,
        stream: ResponseStream | None,
        limit: LossLimit,
        now: float,
        *,
        engines_continue: bool,
    ) -> RunResult:
        """A run has ended; returns how, as `result` decides it."""
        result = self.result(error, stream, limit, now, engines_continue=engines_continue)
        if self.notes and self.notes[-1].ended is None:
            self.notes[-1].ended = now
            self.notes[-1].end = result.end.value
        if self.timeline is not None:
            end = AttemptEnd.PREEMPTED if result.end is RunEnd.STOPPED else AttemptEnd(result.end.value)
            self.timeline.on_ended(now, end, "" if error is None else error.code)
            if stream is not None:
                self.timeline.on_tokens(stream.tokens, stream.pace.first_at)
        return result

    def on_first_frame(self, now: float) -> None:
        """The first frame of a run has come: if its stream was interrupted, it is continued now."""
        trace = self.trace
        if self.timeline is not None:
            self.timeline.on_first_frame(now)
        if self.interrupted_at is not None and trace.replica_id is not None:
            trace.continued += ((trace.replica_id, now - self.interrupted_at),)
            self.interrupted_at = None


def _is_engine_lost(error: ServeAppError, stream: ResponseStream | None) -> bool:
    """Whether a run failed with its engine, and not in what was done with its answer here."""
    has_failed = stream is None or stream.error is error or error.code == NOT_CONTINUABLE
    return isinstance(error, EngineFailed) and has_failed and error.code in _LOSSES
