"""What the engines of one model say of themselves when they are asked: their limits, their load.

Invariant: who asks waits no longer than `ASK_TIMEOUT_S`, whatever the replica does.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from serve_app.errors import Unavailable
from serve_app.ray_adapter import NO_ANSWER, Handle, in_fresh_context
from serve_app.transport import EngineInfo, EngineLoad

logger = logging.getLogger("ray.serve")

ASK_TIMEOUT_S = 1.0  # a scrape or a listing must not hang on a replica that does not answer
# the replica may leave while it is asked, or before
ASK_ERRORS: tuple[type[BaseException], ...] = (Unavailable, *NO_ANSWER)


class Asking:
    """Questions to the replicas of one model.

    Args:
        model: its name, for logs and tasks.
        handle: its engine deployment.
        any_replica: one that runs; Unavailable: none does.
        on_info: called with each answer about limits.
    """

    def __init__(
        self, model: str, handle: Handle, any_replica: Callable[[], str], on_info: Callable[[EngineInfo], None]
    ) -> None:
        self._model = model
        self._handle = handle
        self._any_replica = any_replica
        self._on_info = on_info
        self._task: asyncio.Task[EngineInfo | None] | None = None
        self.known: EngineInfo | None = None  # the last answer

    def refresh(self) -> None:
        """Ask for the limits anew, since a new replica may be of a new configuration; one question at a time."""
        if self._task is None:
            self._task = in_fresh_context(self.info(), f"info-{self._model}")
            self._task.add_done_callback(lambda _: setattr(self, "_task", None))

    async def info(self) -> EngineInfo | None:
        """Ask what the model's engines can do; None while none has been asked with success."""
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S):
                self.known = await self._ask("info", self._any_replica())
            self._on_info(self.known)
        except ASK_ERRORS as error:
            logger.warning("%s: no engine tells its limits: %s", self._model, error)
        return self.known

    async def load(self, replica_id: str) -> EngineLoad | None:
        """Live figures of one engine; None when it does not answer in time."""
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S):
                return await self._ask("load", replica_id)  # type: ignore[no-any-return]
        except ASK_ERRORS:
            return None

    async def _ask(self, method: str, replica_id: str) -> Any:
        """In a context of its own: a scrape's HTTP request must not decide how the reply is read."""
        return await in_fresh_context(self._handle.call(method, replica_id=replica_id), f"{method}-{replica_id}")
