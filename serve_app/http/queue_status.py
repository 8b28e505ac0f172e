"""Tells a client where its request stands while it waits in the line: comments of the stream that its answer will be.

`: queue position=3 expected_start_s=1.2`, the second figure once something is measured. A position is an estimate, as
`core.queue.admission.QueueStatus` says, and may rise.

Invariant: no comment goes out once `end` has returned, so none comes between the frames of an answer; and none within
`FIRST_S`, so a request that is answered or refused by then has its own status and headers.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from types import TracebackType

from serve_app.core.queue import QueueStatus

FIRST_S = 0.1  # a wait that a person notices; what the line refuses on arrival is refused long before
LOOK_S = 1.0  # a look takes 8 us with 1,500 in the line: not even a hundredth of a core for a thousand who wait
EVERY_S = 5.0  # with nothing new to tell: proxies and clients see that the connection lives


class QueueComments:
    """Comments of one request that waits; a context manager for the time of its wait.

    Args:
        ask: where it stands; None: it does not wait in the line at the moment.
        tell: sends one comment.
    """

    def __init__(self, ask: Callable[[], QueueStatus | None], tell: Callable[[str], Awaitable[None]]) -> None:
        self._ask, self._tell = ask, tell
        self._over = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> QueueComments:
        self._task = asyncio.create_task(self._run(), name="queue-status")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._task is not None
        self._over.set()
        if kind is asyncio.CancelledError:  # else a comment on its way is sent: an error event may follow it
            self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)  # how it failed, `end` has raised if anybody asked

    async def end(self) -> None:
        """The wait is over. Raises what `tell` has raised; again does nothing."""
        assert self._task is not None
        self._over.set()
        await self._task

    async def _run(self) -> None:
        position, silent_s, pause_s = 0, 0.0, FIRST_S
        while not await self._over_within(pause_s):
            silent_s, pause_s = silent_s + pause_s, LOOK_S
            status = self._ask()
            if status is not None and (status.position != position or silent_s >= EVERY_S):
                await self._tell(said(status))
                position, silent_s = status.position, 0.0

    async def _over_within(self, seconds: float) -> bool:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._over.wait(), seconds)
        return self._over.is_set()


def said(status: QueueStatus) -> str:
    """A status as a comment has it."""
    text = f"queue position={status.position}"
    return text if status.expected_start_s is None else f"{text} expected_start_s={status.expected_start_s:.1f}"
