"""Cold start of a model without a replica: requests the first replica, and holds work that does not use the queue.

Serve starts the first replica of a model when a call waits in one of its handles. Our requests wait in our own queue,
so the router keeps one call waiting in the handle for all of them. At zero replicas Serve's scaling sees this call
only; our policy takes it as "requests wait", before it learns how many, and does not count it as a request.

Invariant: the call waits exactly while the model may start from zero, no replica runs, and a request waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator

from serve_app.ray_adapter import CALL_ERRORS, in_fresh_context

logger = logging.getLogger("ray.serve")

COLD_START_RETRY_S = 1.0  # between two calls, in case the replica that answered is gone again


class ColdStartTrigger:
    """The cold start of one model, in one router.

    Args:
        model: its name, for logs and errors.
        call_any_replica: the call; returns once a replica has answered.
    """

    def __init__(self, model: str, call_any_replica: Callable[[], Awaitable[object]]) -> None:
        self._model = model
        self._call_any_replica = call_any_replica
        self.call: asyncio.Task[None] | None = None  # the call that waits in the handle
        self._tasks: set[asyncio.Task[None]] = set()  # includes cancelled ones until they have ended
        self._ready = asyncio.Event()  # set while a replica runs
        self.scales_from_zero = False
        self._closed = False
        self._waiting_count = 0  # requests in the queue, and unqueued ones
        self.unqueued_waiting = 0  # requests that wait here, outside the queue

    def update(self, *, scales_from_zero: bool, running: bool) -> None:
        """Set whether Serve may start the model from zero replicas, and whether a replica runs."""
        self.scales_from_zero = scales_from_zero
        if running or self._closed:
            self._ready.set()
        else:
            self._ready.clear()
        self._start_or_cancel_call()

    @contextlib.contextmanager
    def count_waiting(self) -> Iterator[None]:
        """Count a request as waiting during the block, in the queue or here."""
        self._waiting_count += 1
        self._start_or_cancel_call()
        try:
            yield
        finally:
            self._waiting_count -= 1
            self._start_or_cancel_call()

    async def wait_for_replica(self, timeout_s: float, max_waiting: int) -> None:
        """Wait until a replica runs, for work that does not use the queue; at most `timeout_s`, and not at all if
        `max_waiting` requests wait here already."""
        if self._ready.is_set() or self.unqueued_waiting >= max_waiting:
            return
        self.unqueued_waiting += 1
        try:
            with self.count_waiting():
                async with asyncio.timeout(timeout_s):
                    await self._ready.wait()
        except TimeoutError:
            logger.info("Model %s got no replica within %.0f s; a request fails", self._model, timeout_s)
        finally:
            self.unqueued_waiting -= 1

    async def close(self) -> None:
        """Cancel the call and release all waiting requests; returns once the call has ended."""
        self._closed = True
        self._ready.set()
        self._start_or_cancel_call()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _start_or_cancel_call(self) -> None:
        wanted = self.scales_from_zero and not self._ready.is_set() and bool(self._waiting_count)
        if wanted and self.call is None:
            self.call = in_fresh_context(self._keep_calling(), f"cold-start-{self._model}")
            self._tasks.add(self.call)
            self.call.add_done_callback(self._tasks.discard)
        elif not wanted and self.call is not None:
            self.call.cancel()
            self.call = None

    async def _keep_calling(self) -> None:
        logger.info("Model %s has no replica and a waiting request; Serve is asked for a replica", self._model)
        while True:
            try:
                await self._call_any_replica()
            except CALL_ERRORS as error:
                kind = type(error).__name__
                logger.warning(
                    "Model %s could not ask Serve for a replica; its requests wait for the next try: %s",
                    self._model,
                    kind,
                )
            await asyncio.sleep(COLD_START_RETRY_S)
