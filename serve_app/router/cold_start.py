"""What a router does for a model without a replica: it rings, and holds work that has no place in the line.

Serve starts the first replica of a model when a call waits in one of its handles. Our requests wait in a line of our
own, so the router lets one call wait there for all of them. That is all Serve's own scaling sees at zero replicas; our
policy takes it as "somebody waits", sooner than it learns how many, and does not count it as a request.

Invariant: a call waits exactly while the model may start from zero, no replica runs, and somebody waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator

from serve_app.ray_adapter import CALL_ERRORS, in_fresh_context

logger = logging.getLogger("ray.serve")

RING_AGAIN_S = 1.0  # between a call that has ended and the next, should the replica that answered be gone again


class Doorbell:
    """One per model and router.

    Args:
        model: its name, for logs and errors.
        ring: makes the call; it returns once a replica has answered.
    """

    def __init__(self, model: str, ring: Callable[[], Awaitable[object]]) -> None:
        self._model = model
        self._ring = ring
        self._task: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()  # those cancelled, too, until they have ended
        self._opened = asyncio.Event()  # set while a replica runs
        self._from_zero = False
        self._closed = False
        self._waiting = 0  # requests in the queue, and those held here
        self.aside = 0  # requests held here

    def update(self, *, from_zero: bool, running: bool) -> None:
        """Take in whether Serve may start the model from zero replicas, and whether a replica runs."""
        self._from_zero = from_zero
        if running or self._closed:
            self._opened.set()
        else:
            self._opened.clear()
        self._settle()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """A request waits for the block, in the queue or here."""
        self._waiting += 1
        self._settle()
        try:
            yield
        finally:
            self._waiting -= 1
            self._settle()

    async def hold(self, bound_s: float, most: int) -> None:
        """Wait until a replica runs, for work that does not go through the line; no longer than `bound_s`, and not at
        all where `most` wait here already."""
        if self._opened.is_set() or self.aside >= most:
            return
        self.aside += 1
        try:
            with self.waiting():
                async with asyncio.timeout(bound_s):
                    await self._opened.wait()
        except TimeoutError:
            logger.info("%s: no replica came within %.0f s", self._model, bound_s)
        finally:
            self.aside -= 1

    async def close(self) -> None:
        """Ring no more and hold nobody; returns once the call has ended."""
        self._closed = True
        self._opened.set()
        self._settle()
        if self._tasks:
            await asyncio.wait(self._tasks)

    @property
    def ringing(self) -> bool:
        return self._task is not None

    def _settle(self) -> None:
        wanted = self._from_zero and not self._opened.is_set() and bool(self._waiting)
        if wanted and self._task is None:
            self._task = in_fresh_context(self._keep_ringing(), f"doorbell-{self._model}")
            self._tasks.add(self._task)
            self._task.add_done_callback(self._tasks.discard)
        elif not wanted and self._task is not None:
            self._task.cancel()
            self._task = None

    async def _keep_ringing(self) -> None:
        logger.info("%s: no replica runs and a request waits: asking Serve for one", self._model)
        while True:
            try:
                await self._ring()
            except CALL_ERRORS as error:
                logger.warning("%s: the call that waits for a replica failed: %s", self._model, type(error).__name__)
            await asyncio.sleep(RING_AGAIN_S)
