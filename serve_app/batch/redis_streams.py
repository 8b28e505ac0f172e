"""One Redis stream as one consumer of its group sees it: the commands, and nothing that decides.

Invariant: an entry leaves the pending entries of the group in the transaction that adds its reply, and never before.
What a lost connection leaves half done is done again: a reply may be there twice, and is never missing.

Redis's documentation of XREADGROUP, XAUTOCLAIM and XCLAIM is the source of what each command counts.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ResponseError

from serve_app.batch.calls import bounded
from serve_app.core.batches import intake
from serve_app.settings import RedisStreamSettings

logger = logging.getLogger("ray.serve")

PASSWORD_VARIABLE = "REDIS_PASSWORD"
CONNECT_S = 5.0
ANSWER_S = 10.0  # above the longest blocking read; a server that swaps answers within seconds
CONNECTIONS = 4  # of a process to one server: a blocking read of each stream, and commands of a millisecond
MAX_CLAIM_CALLS = 32  # in one search for entries of dead consumers; the next search goes on where this one ended
CONSUMER_GONE_MS = 3_600_000  # a consumer that lives asks at least every few seconds

Fields = Mapping[bytes, bytes]
P = ParamSpec("P")
T = TypeVar("T")


def _bounded(commands: Callable[P, Awaitable[T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """Raises TimeoutError after `ANSWER_S`. The client's own bound sends in `asyncio.wait_for`, and that loses
    cancellations on Python 3.11."""

    @functools.wraps(commands)
    async def run(*arguments: P.args, **named: P.kwargs) -> T:
        return await bounded(commands(*arguments, **named), ANSWER_S)

    return run


def connect(url: str, streams: int) -> Redis:
    """A client of a server; it connects with the first command, and again after a loss. No command is repeated by
    itself: its caller knows which ones may be."""
    pool = BlockingConnectionPool.from_url(
        url,
        password=os.environ.get(PASSWORD_VARIABLE) or None,
        max_connections=streams + CONNECTIONS,
        timeout=ANSWER_S,
        protocol=2,
        socket_connect_timeout=CONNECT_S,
        socket_timeout=None,
        socket_keepalive=True,
        retry=Retry(NoBackoff(), 0),
    )
    return Redis.from_pool(pool)


class GroupConsumer:
    """A consumer of a stream's group.

    Args:
        name: no two consumers of the group have the same.
    """

    def __init__(self, redis: Redis, stream: RedisStreamSettings, name: str) -> None:
        self._redis = redis
        self._stream = stream
        self._name = name
        self._key = (stream.stream, stream.group)
        self._idle_ms = round(stream.claim_idle_s * 1000)
        self._claimed_until: bytes | str = "0-0"

    @_bounded
    async def prepare(self) -> None:
        """Make the stream and its group, if they are missing: from the stream's first entry on.

        Raises:
            ResponseError: one of the three names is a key of another type.
        """
        try:
            await self._redis.xgroup_create(*self._key, id="0", mkstream=True)
        except ResponseError as error:
            if not str(error).startswith("BUSYGROUP"):
                raise
        for name in (self._stream.reply_stream, self._stream.dead_stream):
            if not await self._is_stream(name):
                raise ResponseError(f"WRONGTYPE {name} is a key of another type, and no stream can be made of it")

    @_bounded
    async def read(self, count: int, block_ms: int) -> list[intake.StreamEntry]:
        """Entries that no consumer has had; waits for the first one, so long at most."""
        found: Any = await self._redis.xreadgroup(
            self._stream.group, self._name, {self._stream.stream: ">"}, count=count, block=block_ms
        )
        return [self._entry(entry_id, fields, 1) for _, entries in found or () for entry_id, fields in entries]

    @_bounded
    async def claim(self, count: int) -> list[intake.StreamEntry]:
        """Entries of consumers that have not been heard of for `claim_idle_s`; this counts as a delivery."""
        found: list[tuple[bytes, Any]] = []
        for _ in range(MAX_CLAIM_CALLS):
            answer: Any = await self._redis.xautoclaim(
                *self._key, self._name, self._idle_ms, start_id=self._claimed_until, count=count - len(found)
            )
            self._claimed_until = answer[0]
            entries = answer[1]
            found += entries
            if len(found) >= count or self._claimed_until == b"0-0":
                break
        deliveries = await self._deliveries([entry_id for entry_id, _ in found])
        ours = [(entry_id, fields) for entry_id, fields in found if entry_id.decode() in deliveries]
        return [self._entry(entry_id, fields, deliveries[entry_id.decode()]) for entry_id, fields in ours]

    @_bounded
    async def renew(self, entry_ids: Collection[str]) -> set[str]:
        """Nobody claims these for another `claim_idle_s`. Returns those that are no longer ours."""
        ours = await self._deliveries(entry_ids)
        if ours:
            await self._redis.xclaim(*self._key, self._name, 0, list(ours), justid=True)
        return set(entry_ids) - ours.keys()

    @_bounded
    async def count_failure(self, entry: intake.StreamEntry) -> None:
        """The run of an entry has failed: its next one is another delivery."""
        await self._redis.xclaim(
            *self._key, self._name, 0, [entry.entry_id], retrycount=entry.deliveries + 1, justid=True
        )

    @_bounded
    async def give_back(self, entries: Iterable[intake.StreamEntry]) -> None:
        """Other consumers may claim these at once, and this delivery does not count."""
        async with self._redis.pipeline(transaction=False) as commands:
            for entry in entries:
                again = max(0, entry.deliveries - 1)
                commands.xclaim(
                    *self._key, self._name, 0, [entry.entry_id], idle=self._idle_ms, retrycount=again, justid=True
                )
            await commands.execute(raise_on_error=False)

    @_bounded
    async def end(
        self, entry: intake.StreamEntry, reply_stream: str, reply: Fields, dead_letter: Fields | None = None
    ) -> None:
        """Reply to an entry and take it out of the pending ones, all or nothing; with a dead letter, that as well.

        A transaction of Redis does not undo: a reply to a key of another type would be lost with the entry already
        acknowledged. So the type is asked before, and the reply goes to the stream of the settings instead.
        """
        stream = self._stream
        if reply_stream != stream.reply_stream and not await self._is_stream(reply_stream):
            reply_stream = stream.reply_stream
        async with self._redis.pipeline(transaction=True) as commands:
            if dead_letter is not None:
                commands.xadd(
                    stream.dead_stream, dict[Any, Any](dead_letter), maxlen=stream.dead_maxlen, approximate=True
                )
            commands.xadd(reply_stream, dict[Any, Any](reply), maxlen=stream.reply_maxlen, approximate=True)
            commands.xack(*self._key, entry.entry_id)
            if stream.delete_answered:
                commands.xdel(stream.stream, entry.entry_id)
            await commands.execute()

    @_bounded
    async def forget_consumers(self) -> None:
        """Delete consumers that are long gone and have nothing pending: every process brings a name of its own."""
        consumers: Any = await self._redis.xinfo_consumers(*self._key)
        for consumer in consumers:
            name = consumer["name"]
            pending = consumer["pending"]
            idle_ms = consumer["idle"]
            if name != self._name.encode() and pending == 0 and idle_ms > CONSUMER_GONE_MS:
                await self._redis.xgroup_delconsumer(*self._key, name)
                consumer_name = name.decode(errors="replace")
                logger.info("Stream %s dropped its idle consumer %s", self._stream.stream, consumer_name)

    async def _is_stream(self, name: str) -> bool:
        return await self._redis.type(name) in (b"stream", b"none")

    async def _deliveries(self, entry_ids: Collection[bytes | str]) -> dict[str, int]:
        """How often each of these was delivered; without those that are not pending for this consumer."""
        if not entry_ids:
            return {}
        async with self._redis.pipeline(transaction=False) as commands:
            for entry_id in entry_ids:
                commands.xpending_range(*self._key, entry_id, entry_id, 1, consumername=self._name)
            pending: Sequence[Any] = await commands.execute()
        return {one["message_id"].decode(): one["times_delivered"] for found in pending for one in found}

    def _entry(self, entry_id: bytes, fields: dict[bytes, bytes] | None, deliveries: int) -> intake.StreamEntry:
        return intake.StreamEntry(self._stream.stream, entry_id.decode(), fields or {}, deliveries)
