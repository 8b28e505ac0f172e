"""A request's place on a replica, from the queue's decision until it is given back.

Invariant: a grant is given back exactly once, however the request ends; KV tokens count from the grant to that moment.
"""

from __future__ import annotations

import time

from serve_app.core.queue import Arrival, Grant
from serve_app.router.kv_budget import Budget
from serve_app.router.model_queue import ModelQueue
from serve_app.router.replicas import ReplicaSet
from serve_app.transport import Usage


class RequestGrant:
    """One request on one replica.

    Args:
        queue: where it was granted.
        replicas: of the model.
        arrival: the request.
        grant: the queue's decision.
        budget: the request's KV tokens.
    """

    __slots__ = (
        "_budget",
        "_queue",
        "_released",
        "_replicas",
        "_request_id",
        "_since",
        "_slots",
        "kv_token_s",
        "replica_id",
    )

    def __init__(self, queue: ModelQueue, replicas: ReplicaSet, arrival: Arrival, grant: Grant, budget: Budget) -> None:
        self._queue, self._replicas, self._budget = queue, replicas, budget
        self._request_id, self._slots, self.replica_id = arrival.request_id, arrival.slots, grant.replica_id
        self.kv_token_s = 0.0  # KV tokens held, times seconds; known once the grant is given back
        self._since = time.monotonic()
        self._released = False
        replicas.begin(arrival.request_id, grant.replica_id, arrival.slots)

    def produced(self, tokens: int) -> None:
        """The engine has produced so many tokens more."""
        more = self._budget.produced(tokens)
        if more:
            self._queue.grow(self._request_id, more)
        self._queue.progress(self._request_id, tokens)

    def release(self, usage: Usage | None = None) -> None:
        """Give the place back; again changes nothing.

        Args:
            usage: what the engine says that the request has used; None: what was counted here.
        """
        if self._released:
            return
        self._released = True
        self.kv_token_s = self._budget.tokens * (time.monotonic() - self._since)
        try:
            self._replicas.end(
                self._request_id, self.replica_id, self._slots
            )  # first: what a replica on probation has free is not to be granted
        finally:
            if usage is None:
                self._queue.done(self._request_id, self._budget.output_tokens)
            else:
                self._queue.done(self._request_id, usage.completion_tokens, usage.prompt_tokens)
        self._replicas.forget_gone()
