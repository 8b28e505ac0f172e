"""Fetches the limits and the load that the engines of one model report.

Invariant: a call ends within `ANSWER_TIMEOUT_S`, whatever the replica does.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from serve_app.errors import Unavailable
from serve_app.ray_adapter import NO_ANSWER, Handle, in_fresh_context
from serve_app.router.model_queue import ModelQueue
from serve_app.router.replicas import ReplicaSet
from serve_app.transport import EngineInfo, EngineLoad

logger = logging.getLogger("ray.serve")

ANSWER_TIMEOUT_S = 1.0  # a scrape or a listing must not hang on a replica that does not answer
# the replica may leave before or during the call
CALL_FAILURES: tuple[type[BaseException], ...] = (Unavailable, *NO_ANSWER)


class EngineInfoClient:
    """Calls the replicas of one model for their limits and load.

    Args:
        handle: its engine deployment.
        replicas: of the model.
        queue: of the model; an engine's start time tells it how long a request without a replica waits.
    """

    def __init__(self, handle: Handle, replicas: ReplicaSet, queue: ModelQueue) -> None:
        self._handle, self._replicas, self._queue = handle, replicas, queue
        self._task: asyncio.Task[EngineInfo | None] | None = None
        self.cached: EngineInfo | None = None  # the last answer

    def refresh(self) -> None:
        """Fetch the limits again, since a new replica may have a new configuration; one call at a time."""
        if self._task is None:
            self._task = in_fresh_context(self.fetch_info(), f"info-{self._queue.model}")
            self._task.add_done_callback(lambda _: setattr(self, "_task", None))

    async def fetch_info(self) -> EngineInfo | None:
        """Fetch the limits; returns the last known ones, None if no engine has ever answered."""
        try:
            self.cached = await self.call("info", self._replicas.next_replica())
            self._queue.replica_start.reported(self.cached.start_s)
        except CALL_FAILURES as error:
            logger.warning("%s: no engine reports its limits: %s", self._queue.model, error)
        return self.cached

    async def fetch_load(self, replica_id: str) -> EngineLoad | None:
        """Fetch the live load of one engine; None if it does not answer in time."""
        try:
            return await self.call("load", replica_id)  # type: ignore[no-any-return]
        except CALL_FAILURES:
            return None

    async def call(self, method: str, replica_id: str) -> Any:
        """Call in a context of its own: a scrape's HTTP request must not decide how the reply is read."""
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            return await in_fresh_context(self._handle.call(method, replica_id=replica_id), f"{method}-{replica_id}")
