"""Rows from one Redis stream: entries in, replies out, at least once.

A stream is read by one consumer a process. It takes entries only while their rows can start
(`core.batches.pace`), runs each under the Idempotency-Key of its entry, and ends it with one reply. It renews what it
holds every few seconds. What a dead consumer held is claimed by the others, which join its runs.

Invariant: of an entry that was taken, exactly one is true: it is held here, it is pending in Redis for another
delivery, or it has its reply. An unreachable Redis changes none of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Coroutine
from dataclasses import dataclass, replace
from typing import Any, Protocol

from redis.exceptions import RedisError

from serve_app.batch.interfaces import RowAnswer
from serve_app.batch.model_paces import RowSender
from serve_app.batch.redis_streams import GroupConsumer
from serve_app.core.batches import BadRow, Pauses, intake
from serve_app.errors import Unavailable
from serve_app.settings import RedisStreamSettings

logger = logging.getLogger("ray.serve")

READ_BLOCK_MS = 500  # a read waits so long for an entry; a close waits for a read
HELD_BLOCK_MS = 50  # the same while entries here wait to start
ROOM_WAIT_S = 0.1  # until the figures are read again, if no row ends before
RECONNECT_S = (0.1, 5.0)  # the first wait and the longest one; each is twice the one before, less a random part
RENEWALS = 3  # in the time after which an entry may be claimed: two of them may be lost
FORGET_EVERY_S = 600.0
FAILED_WAIT_S = (1.0, 30.0)  # before the next delivery of an entry that failed; an engine restarts in this time
TIMER_S = 0.001  # a timer of the event loop may be early by its clock's resolution
CLOSE_S = 5.0  # to end a read and to give entries back


class EntryRunner(Protocol):
    """Runs the request of an entry at a router: as `RowRunner`, for a key and not for a batch."""

    async def run_as(self, key_id: str, path: str, body: bytes, key: str) -> RowAnswer:
        """`key`: the Idempotency-Key. Raises: no router answered."""


@dataclass(slots=True, eq=False)
class _HeldEntry:
    """An entry that this consumer holds.

    Args:
        task: what goes on with it; None: it waits for a place.
        in_flight: its row is counted in the pace.
    """

    entry: intake.StreamEntry
    request: intake.EntryRequest | None = None
    keys_used_up: int = 0
    task: asyncio.Task[None] | None = None
    in_flight: bool = False


class _Waits:
    """Waits between attempts: each twice the one before, to a bound, less a random part of up to a half."""

    def __init__(self, first_s: float, longest_s: float) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._attempts = 0

    def next_s(self) -> float:
        self._attempts += 1
        return min(self._longest_s, self._first_s * 2.0 ** min(self._attempts - 1, 32)) * random.uniform(0.5, 1.0)

    def reset(self) -> None:
        self._attempts = 0


class StreamIntake:
    """The consumer of one stream in this process.

    Args:
        paces: of this consumer alone; closed with it.
        inputs: all streams that are read here: no reply goes to one of them.
    """

    def __init__(
        self,
        consumer: GroupConsumer,
        settings: RedisStreamSettings,
        runner: EntryRunner,
        paces: RowSender,
        *,
        inputs: Collection[str] = (),
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._consumer = consumer
        self._settings = settings
        self._runner = runner
        self._paces = paces
        self._no_replies = {*inputs, settings.stream, settings.dead_stream}
        self._now = now
        self._held: dict[str, _HeldEntry] = {}
        self._waiting: dict[str, deque[_HeldEntry]] = {}  # by model
        self._running = 0
        self._pauses = Pauses()
        self._changed = asyncio.Event()
        self._closing = asyncio.Event()
        self._claim_at = 0.0
        paces.on_change = self._on_places

    async def run(self) -> None:
        """Read, run and reply until `close` is called. A cancelled one leaves its entries to be claimed."""
        renewal = asyncio.create_task(self._renew_held())
        try:
            await self._read()
            await self._give_back()
        finally:
            self._closing.set()  # a row that is cancelled starts no other one
            self._paces.close()
            tasks = [renewal, *(held.task for held in self._held.values() if held.task is not None)]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def close(self) -> None:
        """Take nothing more, and give back what has not ended; `run` returns then."""
        self._closing.set()
        self._changed.set()

    async def _read(self) -> None:
        waits = _Waits(*RECONNECT_S)
        is_prepared = False
        while not self._closing.is_set():
            try:
                if not is_prepared:
                    await self._prepare()
                    is_prepared = True
                await self._read_once()
                waits.reset()
            except (RedisError, OSError) as error:
                is_prepared = False
                wait = waits.next_s()
                logger.warning(
                    "Stream %s cannot be read, and its entries wait; trying again in %.1f s: %s",
                    self._settings.stream,
                    wait,
                    _text(error),
                )
                await _wait(self._closing, wait)

    async def _prepare(self) -> None:
        """After a time without Redis: consumers that live keep what they hold, so nobody claims at once."""
        await self._consumer.prepare()
        await self._renew()
        self._claim_at = self._now() + self._renewal_s()

    async def _read_once(self) -> None:
        self._start_waiting()
        places = [self._paces.may_start(model) for model in self._paces.models()]
        held_back = len(self._held) - self._running
        count = intake.entries_to_read(places, held_back, self._paces.max_in_flight - len(self._held))
        if count <= 0:
            self._changed.clear()
            await _wait(self._changed, ROOM_WAIT_S)
            return
        entries: list[intake.StreamEntry] = []
        if self._now() >= self._claim_at:
            entries = await self._consumer.claim(count)
            if len(entries) < count:
                self._claim_at = self._now() + self._renewal_s()
        if not entries:
            entries = await self._consumer.read(count, HELD_BLOCK_MS if held_back else READ_BLOCK_MS)
        for entry in entries:
            self._take(entry)

    def _take(self, entry: intake.StreamEntry) -> None:
        """Hold an entry, until it has its reply."""
        if entry.entry_id in self._held:
            return
        held = self._held[entry.entry_id] = _HeldEntry(entry)
        try:
            held.request = intake.request_of(entry)
        except BadRow as bad:
            error = bad.error
            body = intake.error_body(error.message, code=error.code, param=error.param)
            self._go_on(held, self._bury(held, f"400 {error.code}: {error.message}", RowAnswer(400, body)))
            return
        if entry.deliveries > self._settings.max_deliveries:
            reason = f"delivered {entry.deliveries - 1} times, and no consumer has ended it"
            body = intake.error_body(reason, code="max_deliveries")
            self._go_on(held, self._bury(held, reason, RowAnswer(500, body)))
            return
        self._waiting.setdefault(held.request.model, deque()).append(held)
        self._start_waiting()

    def _on_places(self) -> None:
        self._start_waiting()
        self._changed.set()

    def _start_waiting(self) -> None:
        """Send rows, as many as may be in flight now."""
        for model, waiting in list(self._waiting.items()):
            paused = self._closing.is_set() or self._pauses.is_paused(self._settings.stream, model, self._now())
            while waiting and not paused and self._paces.may_start(model) > 0:
                held = waiting.popleft()
                self._paces.on_start(model)
                held.in_flight = True
                self._running += 1
                self._go_on(held, self._serve(held))
            self._paces.wait(model, 0 if paused else len(waiting))
            if not waiting:
                del self._waiting[model]

    def _go_on(self, held: _HeldEntry, step: Coroutine[Any, Any, None]) -> None:
        held.task = asyncio.create_task(step)
        held.task.add_done_callback(lambda task: self._on_done(held, task))

    def _on_done(self, held: _HeldEntry, task: asyncio.Task[None]) -> None:
        if held.task is not task:
            return  # it waits again, or its next run has begun
        self._leave_pace(held)  # of a task that was cancelled before its first step
        if not task.cancelled() and task.exception() is not None:
            logger.error(
                "Entry %s of stream %s failed and waits for another consumer. Report this traceback",
                held.entry.entry_id,
                self._settings.stream,
                exc_info=task.exception(),
            )
            self._forget(held.entry.entry_id)

    def _leave_pace(self, held: _HeldEntry) -> None:
        if held.in_flight and held.request is not None:
            held.in_flight = False
            self._running -= 1
            self._paces.on_end(held.request.model)

    async def _serve(self, held: _HeldEntry) -> None:
        """Run the request of an entry once, and do what its answer says."""
        assert held.request is not None
        request = held.request
        entry = held.entry
        try:
            key = intake.idempotency_key(entry.request_id, held.keys_used_up)
            answer = await self._answer(request, key)
        finally:
            self._leave_pace(held)
        code = answer.error_code
        match intake.verdict(answer.status, code):
            case intake.EntryVerdict.ANSWERED:
                await self._end(held, answer)
            case intake.EntryVerdict.LATER:
                wait = intake.wait_s(answer.status, answer.retry_after_s)
                if answer.status == intake.KEY_REFUSED:
                    logger.error(
                        "Stream %s waits because its key %s was refused. Set key_id of this stream to a valid key",
                        self._settings.stream,
                        self._settings.key_id,
                    )
                self._pauses.pause(self._settings.stream, request.model, self._now() + wait)
                self._wait_again(held, first=True)
                asyncio.get_running_loop().call_later(wait + TIMER_S, self._start_waiting)
            case intake.EntryVerdict.FAILED if entry.deliveries < self._settings.max_deliveries:
                held.keys_used_up += code in intake.KEY_USED_UP
                await self._until_written(lambda: self._consumer.count_failure(entry))
                held.entry = replace(entry, deliveries=entry.deliveries + 1)
                first_s, longest_s = FAILED_WAIT_S
                await asyncio.sleep(min(longest_s, first_s * 2.0 ** (entry.deliveries - 1)))
                self._wait_again(held, first=False)
            case _:
                await self._bury(held, f"{answer.status} {code or 'failed'}", answer)

    async def _answer(self, request: intake.EntryRequest, key: str) -> RowAnswer:
        try:
            return await self._runner.run_as(self._settings.key_id, request.path, request.body, key)
        except Exception as error:  # noqa: BLE001  whatever it is: no router has answered, and the entry waits
            logger.info(
                "Request %s of stream %s got no answer and is sent again: %r", key, self._settings.stream, error
            )
            away = Unavailable("no router has answered")
            return RowAnswer.of_error(away, getattr(error, "retry_after_s", None))

    def _wait_again(self, held: _HeldEntry, *, first: bool) -> None:
        """Put an entry back among those that wait to start."""
        assert held.request is not None
        held.task = None
        waiting = self._waiting.setdefault(held.request.model, deque())
        if first:
            waiting.appendleft(held)
        else:
            waiting.append(held)
        self._on_places()

    async def _end(self, held: _HeldEntry, answer: RowAnswer, *, dead_letter: dict[bytes, bytes] | None = None) -> None:
        """Reply to an entry; what is written is out of memory."""
        entry = held.entry
        settings = self._settings
        reply_stream = entry.reply_stream(settings.reply_stream, settings.reply_prefix, self._no_replies)
        reply = {
            b"id": entry.request_id.encode(),
            b"entry": entry.entry_id.encode(),
            b"status": str(answer.status).encode(),
            b"body": answer.body,
        }
        await self._until_written(lambda: self._consumer.end(entry, reply_stream, reply, dead_letter))
        self._forget(entry.entry_id)

    async def _bury(self, held: _HeldEntry, reason: str, answer: RowAnswer) -> None:
        """Make an entry a dead letter, and reply with its error."""
        logger.warning(
            "Entry %s of stream %s failed for good and is a dead letter: %s",
            held.entry.entry_id,
            self._settings.stream,
            reason,
        )
        await self._end(held, answer, dead_letter=held.entry.dead_letter(reason))

    def _forget(self, entry_id: str) -> None:
        self._held.pop(entry_id, None)
        self._changed.set()

    async def _until_written(self, write: Callable[[], Awaitable[None]]) -> None:
        """Write to Redis, again and again while it is away: the reply of a row is worth its run."""
        waits = _Waits(*RECONNECT_S)
        while True:
            try:
                return await write()
            except (RedisError, OSError) as error:
                wait = waits.next_s()
                logger.warning(
                    "Stream %s cannot be written; its results wait %.1f s for the next try: %s",
                    self._settings.stream,
                    wait,
                    _text(error),
                )
                await asyncio.sleep(wait)

    async def _renew_held(self) -> None:
        """Say of every entry held here that it is, and now and then which consumers are gone."""
        forget_at = self._now()
        while True:
            await asyncio.sleep(self._renewal_s())
            try:
                await self._renew()
                if self._now() >= forget_at:
                    forget_at = self._now() + FORGET_EVERY_S
                    await self._consumer.forget_consumers()
            except (RedisError, OSError) as error:
                logger.warning(
                    "Stream %s did not renew its entries; other consumers may claim them: %s",
                    self._settings.stream,
                    _text(error),
                )

    async def _renew(self) -> None:
        """What another consumer has claimed is left to it: it joins the run."""
        for entry_id in await self._consumer.renew(list(self._held)):
            held = self._held.pop(entry_id, None)
            if held is None:
                continue
            logger.info(
                "Entry %s of stream %s is pending for another consumer, which joins its run",
                entry_id,
                self._settings.stream,
            )
            if held.task is not None:
                held.task.cancel()
            elif held.request is not None and held in self._waiting.get(held.request.model, ()):
                self._waiting[held.request.model].remove(held)

    async def _give_back(self) -> None:
        """The end of this process is no failure of what it holds."""
        for held in self._held.values():
            if held.task is not None:
                held.task.cancel()
        await asyncio.gather(*(held.task for held in self._held.values() if held.task), return_exceptions=True)
        entries = [held.entry for held in self._held.values()]
        if entries:
            try:
                async with asyncio.timeout(CLOSE_S):
                    await self._consumer.give_back(entries)
            except (RedisError, OSError) as error:  # they are claimed later, and this delivery counts
                logger.warning(
                    "Stream %s did not take back %d entries; they wait for their claim, and this delivery counts: %s",
                    self._settings.stream,
                    len(entries),
                    _text(error),
                )

    def _renewal_s(self) -> float:
        return self._settings.claim_idle_s / RENEWALS


async def _wait(event: asyncio.Event, longest_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(longest_s):
            await event.wait()


def _text(error: BaseException) -> str:
    """The repr of an error of this client leaves out what the server has said."""
    return f"{type(error).__name__}: {error}"
