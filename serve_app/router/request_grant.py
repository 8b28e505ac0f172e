"""A request's grant on a replica, from the queue's decision until its release, and its runs, one after the other.

Invariant: a grant is released exactly once, however the request ends; KV token-seconds count from grant to release.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

from serve_app.core.continuation import NotContinued
from serve_app.core.queue import Arrival
from serve_app.core.receipts import RequestTrace, TokenPace
from serve_app.errors import EngineFailed, ServeAppError
from serve_app.router.kv_budget import KvBudget
from serve_app.router.model_queue import ModelQueue
from serve_app.router.replicas import ReplicaSet
from serve_app.transport import NOT_CONTINUABLE, ResponseStream, TokenUsage


@dataclass(slots=True)
class RequestRuns:
    """The runs of one request: what they leave to the next one, and the trace that they write.

    Args:
        queued_at: when it first arrived in the queue; None: it has not.
        lost: the latest run that was lost or stopped, with which the next one goes on; None: that begins anew.
        lost_at: when the stream was lost and has not gone on yet; None: it has.
        keeps_place: see `Preempt`, of the last time that it was stopped.
        pace: when the tokens of its latest run came, and of those with which that went on.
    """

    trace: RequestTrace = field(default_factory=RequestTrace)
    queued_at: float | None = None
    lost: ResponseStream | None = None
    lost_at: float | None = None
    keeps_place: bool = True
    pace: TokenPace = field(default_factory=TokenPace)

    @property
    def stopped(self) -> int:
        """How often its router stopped it."""
        return self.trace.preempted + self.trace.moved

    def on_stopped(self, grant: RequestGrant) -> None:
        """A run was stopped; the request goes on."""
        if grant.moves:
            self.trace.moved += 1
        else:
            self.trace.preempted += 1
        self.keeps_place = grant.keeps_place

    @property
    def client_has_part(self) -> bool:
        """Whether the client has received a part of the answer in an earlier run."""
        return self.lost is not None and self.lost.client_has_seen

    def with_counted_prompt(self, request: Arrival) -> Arrival:
        """The request, with the tokens of its prompt as the engine of an earlier run has counted them."""
        prompt = None if self.lost is None else self.lost.prompt
        if prompt is None:
            return request
        cost = max(0, request.cost_tokens + prompt.prompt_tokens - request.prompt_tokens)
        return replace(request, prompt_tokens=prompt.prompt_tokens, cost_tokens=cost)

    def on_refused(self, refused: ServeAppError, lost: EngineFailed | None) -> ServeAppError | None:
        """The queue has refused a request, after this loss or stop (None: after none); returns the error that ends it.
        None: no engine may go on with what it has produced, its client has received nothing, and it begins anew."""
        is_other_model = refused.code == NOT_CONTINUABLE
        if is_other_model and not self.client_has_part:
            self.lost = None
            return None
        if lost is None or not self.client_has_part:
            return refused
        self.trace.not_continued = NotContinued.ENGINE if is_other_model else NotContinued.QUEUE
        return refused if is_other_model else lost

    def on_lost(self, run: ResponseStream, now: float) -> None:
        """A stream has lost its replica, and is to go on."""
        self.lost = run
        if self.lost_at is None:
            self.lost_at = now

    def on_continued(self, now: float) -> None:
        """The first frame of a run has come; with it a stream that was lost goes on."""
        trace = self.trace
        if self.lost_at is not None and trace.replica_id is not None:
            trace.continued += ((trace.replica_id, now - self.lost_at),)
            self.lost_at = None


@dataclass(slots=True)
class RequestGrant:
    """One request on one replica.

    Args:
        queue: the queue that granted it.
        replicas: of the model.
        arrival: the request.
        replica_id: the replica on which the queue granted it.
        budget: the request's KV tokens.
    """

    queue: ModelQueue
    replicas: ReplicaSet
    arrival: Arrival
    replica_id: str
    budget: KvBudget
    kv_token_s: float = 0.0  # KV tokens held, times seconds; known after the release
    stream: ResponseStream | None = None  # of its run, once it is submitted
    is_stopping: bool = False
    keeps_place: bool = True  # see `Preempt`
    moves: bool = False  # it was stopped since its replica drains
    granted_at: float = field(init=False)
    is_released: bool = False
    has_prompt: bool = False  # the engine has counted its prompt

    def __post_init__(self) -> None:
        self.granted_at = time.monotonic()
        self.replicas.on_granted(self.arrival.request_id, self.replica_id, self.arrival.slots)

    def on_submitted(self, stream: ResponseStream) -> None:
        """The request runs on the replica."""
        self.stream = stream
        if self.is_stopping:
            stream.stop()

    def stop(self, *, keeps_place: bool = True, moves: bool = False) -> None:
        """Stop the request at its replica; it then goes on with what it has produced, here or elsewhere. A stream that
        is too long to be recorded stays. Idempotent."""
        if self.is_stopping or (self.stream is not None and not self.stream.produced.is_whole):
            return
        self.is_stopping = True
        self.keeps_place = keeps_place
        self.moves = moves
        if self.stream is not None:
            self.stream.stop()

    def on_output(self, tokens: int) -> None:
        """Count output tokens that the engine has produced since the last call, and the prompt as it has counted it."""
        request_id = self.arrival.request_id
        prompt = None if self.stream is None else self.stream.prompt
        is_told = self.has_prompt or self.arrival.has_begun  # an earlier run has paid for it
        counted = 0 if prompt is None or is_told else prompt.prompt_tokens
        if counted:
            self.has_prompt = True
            self.budget.correct_prompt(counted)
        more = self.budget.on_output(tokens)
        if more:
            self.queue.request_kv_tokens(request_id, more)
        self.queue.core.in_flight.progress(request_id, tokens, *([counted] if counted else []))

    def release(self, usage: TokenUsage | None = None) -> None:
        """Release the grant. Idempotent.

        Args:
            usage: the request's usage as the engine reports it; None: use the count made here.
        """
        if self.is_released:
            return
        self.is_released = True
        self.kv_token_s = self.budget.tokens * (time.monotonic() - self.granted_at)
        request_id = self.arrival.request_id
        try:
            # first: the queue must not grant the free slots of a replica on probation
            self.replicas.on_released(request_id, self.replica_id, self.arrival.slots)
        finally:
            if usage is None:
                self.queue.release(request_id, self.budget.output_tokens)
            else:
                made = max(0, usage.completion_tokens - self.budget.earlier_tokens)
                self.queue.release(request_id, made, usage.prompt_tokens)
        self.replicas.drop_gone()
