"""Runs one row: reads its line, sends it to a router, and decides what its answer means.

Invariant: each run ends as exactly one of: a result, a return with an attempt counted, a return without.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass

from serve_app.batch.calls import until_answered
from serve_app.batch.files import FileStorage
from serve_app.batch.interfaces import RowAnswer, RowRunner
from serve_app.batch.result_lines import answer_result, error_result, row_key, runs_again
from serve_app.core.batches import BadRow, BatchRecord, ClaimedRow, RowResult, intake, read_row
from serve_app.errors import NotFound, ServeAppError

logger = logging.getLogger("ray.serve")

FIRST_PAUSE_S = 1.0  # after a refusal without Retry-After, or without a router; twice as long each time
MAX_PAUSE_S = 30.0
MIN_PAUSE_S = 0.1
FIRST_ANSWER_BYTES = 16 * 2**10  # expected of the first answers
FORGET = 0.99  # per answer: how fast the largest answer of the last hundred or so is forgotten
READ_WEIGHT = 0.1  # of the newest read in the mean


@dataclass(frozen=True, slots=True)
class Ended:
    """How a run ended: with a result, or the row goes back, after which its key and model pause for `pause_s`."""

    result: RowResult | None = None
    count_attempt: bool = False
    pause_s: float = 0.0


class RowRun:
    """Runs rows, and knows how many bytes those in flight hold.

    Args:
        wall: seconds since 1970 UTC.
    """

    def __init__(self, files: FileStorage, runner: RowRunner, wall: Callable[[], float]) -> None:
        self._files = files
        self._runner = runner
        self._wall = wall
        self.read_s = 0.0  # mean of what the read of a line takes
        self._in_flight = self._body_bytes = 0
        self._answer_bytes = float(FIRST_ANSWER_BYTES)
        self._refused: dict[tuple[str, str], int] = {}  # pauses in a row, by key and model
        self._paused_until: dict[tuple[str, str], float] = {}

    def begin(self, row: ClaimedRow) -> None:
        self._in_flight += 1
        self._body_bytes += row.length

    def end(self, row: ClaimedRow) -> None:
        self._in_flight -= 1
        self._body_bytes -= row.length

    def bytes_with(self, row: ClaimedRow) -> float:
        """Bytes of the rows in flight, with `row`: their bodies, and the largest answers of late for them all."""
        return self._body_bytes + row.length + (self._in_flight + 1) * self._answer_bytes

    async def run(self, batch: BatchRecord, row: ClaimedRow) -> Ended:
        """Run a row until its batch expires."""
        try:
            body = await self._body(batch, row)
        except NotFound:
            return Ended(error_result(row, "input_file_not_found", f"there is no file {batch.input_file_id} any more"))
        except BadRow as error:
            return Ended(error_result(row, error.error.code, error.error.message))
        key = row_key(batch.batch_id, row.number, row.attempts)
        try:
            async with asyncio.timeout(max(0.0, batch.expires_at - self._wall())):
                answer = await self._runner.run(batch, batch.endpoint, body, key)
        except (ServeAppError, TimeoutError, OSError) as error:
            logger.info(
                "Row %d of batch %s got no answer from a router and runs again: %r", row.number, batch.batch_id, error
            )
            return Ended(pause_s=self._pause_s(batch.payer, row.model, None))
        except Exception:
            logger.exception(
                "Row %d of batch %s failed inside the batch worker and runs again. Report this traceback",
                row.number,
                batch.batch_id,
            )
            return Ended(pause_s=self._pause_s(batch.payer, row.model, None))
        self._answer_bytes = max(float(len(answer.body)), self._answer_bytes * FORGET)
        return self._ended(batch, row, answer)

    async def _body(self, batch: BatchRecord, row: ClaimedRow) -> bytes:
        loop = asyncio.get_running_loop()
        began = loop.time()
        line = await until_answered(
            lambda: self._files.read(batch.input_file_id, row.offset, row.length),
            f"reading row {row.number} of batch {batch.batch_id}",
        )
        self.read_s += READ_WEIGHT * (loop.time() - began - self.read_s)
        return json.dumps(read_row(line, row.number).body, separators=(",", ":")).encode()

    def _ended(self, batch: BatchRecord, row: ClaimedRow, answer: RowAnswer) -> Ended:
        """A refusal waits, an engine's death is repeated, all else is the result."""
        if answer.status in intake.LATER:
            return Ended(pause_s=self._pause_s(batch.payer, row.model, answer.retry_after_s))
        self._refused.pop((batch.payer, row.model), None)
        if runs_again(row, answer):
            return Ended(count_attempt=True)
        return Ended(answer_result(row, answer))

    def _pause_s(self, key: str, model: str, retry_after_s: float | None) -> float:
        """Retry-After, or twice as long as the last time; rows refused during a pause are of the same time."""
        if retry_after_s is not None:
            return max(MIN_PAUSE_S, retry_after_s)
        now = asyncio.get_running_loop().time()
        at = (key, model)
        if now < self._paused_until.get(at, 0.0):
            return MIN_PAUSE_S
        times = self._refused.get(at, 0)
        self._refused[at] = times + 1
        pause_s = min(MAX_PAUSE_S, FIRST_PAUSE_S * 2.0**times)
        self._paused_until[at] = now + pause_s
        return pause_s
