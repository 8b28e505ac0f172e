"""A request's grant on a replica, from the queue's decision until its release.

Invariant: a grant is released exactly once, however the request ends; KV token-seconds count from grant to release.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from serve_app.core.kv_budget import KvBudget
from serve_app.core.queue import Arrival
from serve_app.router.model_queue import ModelQueue
from serve_app.router.replicas import ReplicaSet
from serve_app.transport import ResponseStream, TokenUsage


@dataclass(slots=True)
class RequestGrant:
    """One request on one replica.

    Args:
        queue: the queue that granted it.
        replicas: of the model.
        arrival: the request.
        replica_id: the replica on which the queue granted it.
        budget: the request's KV tokens.
        is_load: whether it counts for the number of replicas.
    """

    queue: ModelQueue
    replicas: ReplicaSet
    arrival: Arrival
    replica_id: str
    budget: KvBudget
    is_load: bool = True
    kv_token_s: float = 0.0  # KV tokens held, times seconds; known after the release
    stream: ResponseStream | None = None  # of its run, once it is submitted
    is_stopping: bool = False
    keeps_place: bool = True  # see `Preempt`
    is_drained: bool = False  # it was stopped since its replica drains
    granted_at: float = field(init=False)
    is_released: bool = False
    has_prompt: bool = False  # the engine has counted its prompt
    served_tokens: int = 0  # prompt and output of this run; an earlier run has had the prompt of one that goes on

    def __post_init__(self) -> None:
        self.granted_at = time.monotonic()
        self.replicas.on_granted(self.arrival.request_id, self.replica_id, self.arrival.slots)

    def on_submitted(self, stream: ResponseStream) -> None:
        """The request runs on the replica."""
        self.stream = stream
        if self.is_stopping:
            stream.stop()

    def stop(self, *, keeps_place: bool = True, is_drained: bool = False) -> None:
        """Stop the request at its replica; it is then continued with what it has produced, here or elsewhere. A stream
        that is too long to be recorded stays. Idempotent."""
        if self.is_stopping or (self.stream is not None and not self.stream.produced.is_whole):
            return
        self.is_stopping = True
        self.keeps_place = keeps_place
        self.is_drained = is_drained
        if self.stream is not None:
            self.stream.stop()

    def on_output(self, tokens: int) -> None:
        """Count output tokens that the engine has produced since the last call, and the prompt as it has counted it."""
        request_id = self.arrival.request_id
        prompt = None if self.stream is None else self.stream.prompt
        is_prompt_paid = self.has_prompt or self.arrival.has_begun  # an earlier run has paid for it
        counted = 0 if prompt is None or is_prompt_paid else prompt.prompt_tokens
        if counted:
            self.has_prompt = True
            self.budget.correct_prompt(counted)
        self.served_tokens += tokens + counted
        more = self.budget.on_output(tokens)
        if more:
            self.queue.request_kv_tokens(request_id, more)
        self.queue.progress(request_id, tokens, counted)

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
                made = max(0, usage.completion_tokens - self.arrival.produced_tokens)
                prompt = 0 if self.arrival.has_begun else usage.prompt_tokens
                self.served_tokens = max(self.served_tokens, made + prompt)
                self.queue.release(request_id, made, usage.prompt_tokens)
        self.replicas.drop_gone()
