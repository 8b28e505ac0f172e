"""Sends a waiting client its queue position, as comments at the beginning of its answer's stream, and where the stream
waits for another replica.

`: queue position=3 expected_start_s=1.2`, the second value once the drain rate is measured. A position is an estimate,
as `core.queue.admission.QueueStatus` describes, and may rise.

Invariant: no comment is sent after `end` has returned, so none comes between the frames of an answer; and none within
`FIRST_COMMENT_S`, so a request answered or refused by then has its own status and headers.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping

from serve_app.core.queue import QueueStatus
from serve_app.http.request_record import RequestRecord
from serve_app.router import ModelRouter

FIRST_COMMENT_S = 0.1  # a wait that a person notices; refusals on arrival come long before
STATUS_POLL_S = 1.0  # a poll takes 8 us with 1,500 queued: less than 0.01 core for a thousand waiting clients
MAX_SILENCE_S = 5.0  # without a change: proxies and clients see that the connection is alive


class QueueComments:
    """Comments for one waiting request; a context manager around its wait.

    Args:
        get_status: the request's queue status; None: it does not wait in the queue at the moment.
        send_comment: sends one comment.
        from_start: whether the client wants them before its answer, too; those within keep every connection alive.
    """

    def __init__(
        self,
        get_status: Callable[[], QueueStatus | None],
        send_comment: Callable[[str], Awaitable[None]],
        *,
        from_start: bool = True,
    ) -> None:
        self._get_status = get_status
        self._send_comment = send_comment
        self._from_start = from_start
        self._ended = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> QueueComments:
        if self._from_start:
            self.resume()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._ended.set()
        if self._task is None:
            return
        if kind is asyncio.CancelledError:  # else a comment being sent is completed: an error event may follow it
            self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)  # `end` raises the failure

    async def end(self) -> None:
        """End the wait. Raises what `send_comment` has raised; without a wait, it has no effect."""
        self._ended.set()
        if self._task is not None:
            await self._task

    def resume(self) -> None:
        """Wait again, after `end`."""
        self._ended.clear()
        self._task = asyncio.create_task(self._run(), name="queue-status")

    async def _run(self) -> None:
        position = 0
        silent_s = 0.0
        pause_s = FIRST_COMMENT_S
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._ended.wait()
            if self._ended.is_set():
                return
            silent_s, pause_s = silent_s + pause_s, STATUS_POLL_S
            status = self._get_status()
            if status is not None and (status.position != position or silent_s >= MAX_SILENCE_S):
                text = f"queue position={status.position}"
                if status.expected_start_s is not None:
                    text += f" expected_start_s={status.expected_start_s:.1f}"
                await self._send_comment(text)
                position = status.position
                silent_s = 0.0


def queue_status(models: Mapping[str, ModelRouter], record: RequestRecord) -> QueueStatus | None:
    """Where a request stands; of a list of prompts, where the first one stands that waits. `models`: by name."""
    model = models.get(record.model)
    if model is None:
        return None
    found = (model.queue.status(part.request_id) for part in record.parts or [record])
    return next((status for status in found if status is not None), None)
