"""A request's grant on a replica, from the queue's decision until its release.

Invariant: a grant is released exactly once, however the request ends; KV token-seconds count from grant to release.
"""

from __future__ import annotations

import time

from serve_app.core.queue import Arrival, Grant
from serve_app.router.kv_budget import KvBudget
from serve_app.router.model_queue import ModelQueue
from serve_app.router.replicas import ReplicaSet
from serve_app.transport import TokenUsage


class RequestGrant:
    """One request on one replica.

    Args:
        queue: the queue that granted it.
        replicas: of the model.
        arrival: the request.
        grant: the queue's decision.
        budget: the request's KV tokens.
    """

    __slots__ = (
        "_budget",
        "_granted_at",
        "_queue",
        "_released",
        "_replicas",
        "_request_id",
        "_slots",
        "kv_token_s",
        "replica_id",
    )

    def __init__(
        self, queue: ModelQueue, replicas: ReplicaSet, arrival: Arrival, grant: Grant, budget: KvBudget
    ) -> None:
        self._queue, self._replicas, self._budget = queue, replicas, budget
        self._request_id, self._slots, self.replica_id = arrival.request_id, arrival.slots, grant.replica_id
        self.kv_token_s = 0.0  # KV tokens held, times seconds; known after the release
        self._granted_at = time.monotonic()
        self._released = False
        replicas.on_granted(arrival.request_id, grant.replica_id, arrival.slots)

    def on_output(self, tokens: int) -> None:
        """Count output tokens that the engine has produced since the last call."""
        more = self._budget.on_output(tokens)
        if more:
            self._queue.request_kv_tokens(self._request_id, more)
        self._queue.progress(self._request_id, tokens)

    def release(self, usage: TokenUsage | None = None) -> None:
        """Release the grant. Idempotent.

        Args:
            usage: the request's usage as the engine reports it; None: use the count made here.
        """
        if self._released:
            return
        self._released = True
        self.kv_token_s = self._budget.tokens * (time.monotonic() - self._granted_at)
        try:
            # first: the queue must not grant the free slots of a replica on probation
            self._replicas.on_released(self._request_id, self.replica_id, self._slots)
        finally:
            if usage is None:
                self._queue.release(self._request_id, self._budget.output_tokens)
            else:
                self._queue.release(self._request_id, usage.completion_tokens, usage.prompt_tokens)
        self._replicas.drop_gone()
