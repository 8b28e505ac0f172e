"""The intake of all streams of the settings in one process, and the key that each stream's rows run as.

Invariant: whose a row is comes from the settings alone; an entry cannot name a key or a tenant.
"""

from __future__ import annotations

import asyncio
import os
import socket
import uuid
from collections.abc import Awaitable, Callable, Mapping

from serve_app.batch.interfaces import RowAnswer
from serve_app.batch.model_paces import ModelPaces
from serve_app.batch.redis_streams import GroupConsumer, connect
from serve_app.batch.router_calls import RouterCalls
from serve_app.batch.stream_intake import EntryRunner, StreamIntake
from serve_app.errors import Unauthorized
from serve_app.settings import RedisSettings


class KeyRows:
    """Runs rows as keys, whose tenants the configuration or the store knows.

    Args:
        configured: tenants of the keys of the configuration, by name.
        stored: the tenant of a key of the store. Raises KeyError, StoreAway.
    """

    def __init__(
        self, rows: RouterCalls, configured: Mapping[str, str], stored: Callable[[str], Awaitable[str]]
    ) -> None:
        self._rows = rows
        self._configured = configured
        self._stored = stored
        self._found: dict[str, str] = {}

    async def run_as(self, key_id: str, path: str, body: bytes, key: str) -> RowAnswer:
        """See `stream_intake.EntryRunner`."""
        try:
            tenant = await self._tenant(key_id)
        except KeyError:
            return RowAnswer.of_error(Unauthorized(f"there is no key {key_id!r}"))
        answer = await self._rows.run_as(key_id, tenant, path, body, key)
        if answer.status == Unauthorized.status:
            self._found.pop(key_id, None)  # it may have been made anew for another tenant
        return answer

    async def _tenant(self, key_id: str) -> str:
        if key_id in self._configured:
            return self._configured[key_id]
        if key_id not in self._found:
            self._found[key_id] = await self._stored(key_id)
        return self._found[key_id]


class RedisIntake:
    """All streams of the settings, read in this process.

    Args:
        paces: followed by somebody else.
    """

    def __init__(self, settings: RedisSettings, runner: EntryRunner, paces: ModelPaces) -> None:
        self._redis = connect(settings.url, len(settings.streams))
        name = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        inputs = [one.stream for one in settings.streams]
        self._streams = [
            StreamIntake(GroupConsumer(self._redis, one, name), one, runner, paces.sender(), inputs=inputs)
            for one in settings.streams
        ]

    async def run(self) -> None:
        """Until `close` is called, or this is cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                for stream in self._streams:
                    group.create_task(stream.run())
        finally:
            await self._redis.aclose()

    def close(self) -> None:
        """Take nothing more, and give back what has not ended; `run` returns within seconds."""
        for stream in self._streams:
            stream.close()
