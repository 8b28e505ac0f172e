"""The intake of a worker process, from its start to its end; nothing where the settings name no streams.

Invariant: a worker without Redis needs no client of it, and a fault of the intake ends no batch.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from serve_app.batch.model_paces import ModelPaces
from serve_app.batch.router_calls import RouterCalls
from serve_app.settings import Settings
from serve_app.store import Store

if TYPE_CHECKING:
    from serve_app.batch.redis_intake import RedisIntake

logger = logging.getLogger("ray.serve")

CLOSE_S = 10.0  # above a read, the commands that give entries back, and a Redis that is away
RESTART_S = 5.0  # after a fault of our own


class IntakeTask:
    """Reads the streams of the settings while it runs."""

    def __init__(self, settings: Settings, rows: RouterCalls, paces: ModelPaces, store: Store) -> None:
        self._settings = settings
        self._rows = rows
        self._paces = paces
        self._store = store
        self._intake: RedisIntake | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_closing = False

    def start(self) -> None:
        if self._settings.batch.redis is not None:
            self._task = asyncio.create_task(self._run(), name="redis intake")

    async def close(self) -> None:
        """Give back what has not ended."""
        self._is_closing = True
        if self._task is None:
            return
        if self._intake is not None:
            self._intake.close()
            await asyncio.wait({self._task}, timeout=CLOSE_S)
        self._task.cancel()
        await asyncio.wait({self._task})

    async def _run(self) -> None:
        try:
            from serve_app.batch.redis_intake import KeyRows, RedisIntake  # here: they need the extra
        except ImportError as error:
            logger.error(
                "Batch worker reads no entries of batch.redis: %s. Run `pip install 'serve-app[redis]'` on every node",
                error,
            )
            return
        batch = self._settings.batch
        assert batch.redis is not None
        tenants = {key.name: key.tenant for key in self._settings.auth.keys if key.name is not None}
        rows = KeyRows(self._rows, tenants, self._stored_tenant)
        while not self._is_closing:
            self._intake = RedisIntake(batch.redis, rows, self._paces)
            try:
                await self._intake.run()
                return
            except Exception:
                logger.exception(
                    "Batch worker: the intake of streams failed and restarts in %.0f s. Report this traceback",
                    RESTART_S,
                )
            await asyncio.sleep(RESTART_S)

    async def _stored_tenant(self, key_id: str) -> str:
        return (await self._store.key(key_id)).tenant
