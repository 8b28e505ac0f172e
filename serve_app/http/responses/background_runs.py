"""The run of a background response at a router: its events go to the store as they come, for whoever reads them.

Invariant: a response ends once, with its last events, by the run that made it; a run that is left or fails does not end
it, and another one begins. A cancelled response ends as soon as its run has seen that.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from serve_app.core.responses import CANCELLED, EventPiece, as_json, record_of
from serve_app.errors import NotFound, StoreAway
from serve_app.http.response import HttpExchange
from serve_app.http.responses.sent_answer import SentAnswer
from serve_app.http.responses.turn import Turn, new_id
from serve_app.ray_adapter import in_fresh_context
from serve_app.settings import ResponseSettings
from serve_app.store import BackgroundStore

logger = logging.getLogger("ray.serve")

WRITE_S = 0.5  # between writes of new events: what a reader waits, and a commit of each running response
IDLE_WRITES = 4  # without events: then it is asked once whether the response is cancelled
END_S = 10.0  # for a store that is away to take the end; then another run begins
RETRY_S = 0.25  # between two attempts


class BackgroundRuns:
    """The runs of one router.

    Args:
        get_store: that holds now.
        now: seconds since 1970 UTC.
    """

    def __init__(self, get_store: Callable[[], BackgroundStore], now: Callable[[], float]) -> None:
        self._get_store = get_store
        self._now = now
        self.settings = ResponseSettings()

    @contextlib.asynccontextmanager
    async def logged(self, turn: Turn, exchange: HttpExchange) -> AsyncIterator[None]:
        """Write the answer of the block to the store. Raises NotFound: the response has ended, or was deleted;
        StoreAway."""
        response_id = turn.response_id
        first = await self._get_store().begin(response_id)
        if first is None:
            raise NotFound(f"{response_id} has ended", code="response_not_found")
        log = list[bytes]()
        answer = SentAnswer(turn.fields, turn.stored, first, log)
        run = EventLog(response_id, turn.tenant, log, answer)
        writing = in_fresh_context(self._write(run, asyncio.current_task()), f"events-{response_id}")
        try:
            with exchange.through(answer.over):
                yield
        except asyncio.CancelledError:
            if run.is_cancelled:
                await self._end(run, answer.left(CANCELLED))
            raise
        finally:
            writing.cancel()
            await asyncio.wait({writing})
        response = answer.response()
        if response is not None:
            await self._end(run, response)
        await answer.finish()

    async def _write(self, run: EventLog, task: asyncio.Task[Any] | None) -> None:
        """Write events from time to time, until cancelled; `task` ends if the response is cancelled."""
        idle = 0
        while True:
            await asyncio.sleep(WRITE_S)
            stream = run.answer.stream
            idle = 0 if run.log else idle + 1
            if (stream is not None and stream.final is not None) or idle % IDLE_WRITES:
                continue
            piece = run.piece()
            begun = None if stream is None else stream.begun
            body = None if begun is None else as_json({name: one for name, one in begun.items() if name != "output"})
            try:
                is_over = await self._get_store().write(run.response_id, piece, body)
            except StoreAway as error:
                logger.info("Response %s has events that wait for the store: %s", run.response_id, error)
                continue
            run.written(piece)
            if is_over and task is not None:
                run.is_cancelled = True
                task.cancel()
                return

    async def _end(self, run: EventLog, response: Mapping[str, Any] | None) -> None:
        """Store the end. Raises StoreAway."""
        if response is None:  # nothing of it was sent
            await self._get_store().end_cancelled(run.response_id)
            return None
        keep_s = self.settings.keep_s
        record = record_of(response, [], tenant=run.tenant, now=self._now(), keep_s=keep_s, new_id=new_id)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + END_S
        while True:
            try:
                return await self._get_store().end(record, run.piece(), self.settings.max_bytes_per_tenant)
            except StoreAway as error:
                if loop.time() > deadline:
                    logger.warning("Response %s was not kept, and runs again: %s", run.response_id, error)
                    raise
            await asyncio.sleep(RETRY_S)


class EventLog:
    """The events of one run. `log`: those that are not written."""

    def __init__(self, response_id: str, tenant: str, log: list[bytes], answer: SentAnswer) -> None:
        self.response_id = response_id
        self.tenant = tenant
        self.log = log
        self.answer = answer
        self.is_cancelled = False

    def piece(self) -> EventPiece | None:
        """The events that are not written; None: there are none."""
        stream = self.answer.stream
        if stream is None or not self.log:
            return None
        last = stream.next_number - 1
        return EventPiece(last - len(self.log) + 1, last, b"".join(self.log).decode())

    def written(self, piece: EventPiece | None) -> None:
        if piece is not None:
            del self.log[: piece.last - piece.first + 1]
