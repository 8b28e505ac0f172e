"""Client of the quota actor: finds it by name, starts it if it does not exist, and finds it again after its end."""

from __future__ import annotations

import asyncio
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorDiedError

from serve_app.core.batches import ModelFigures
from serve_app.core.memory import EngineReply, EngineReport, StartsReply, StartsRequest
from serve_app.core.shared_queue import ActorReply, RouterMessage
from serve_app.names import RELEASE
from serve_app.quota.actor import GpuMemoryQuota
from serve_app.quota.report import ModelFiguresRequest
from serve_app.ray_adapter import HEAD_ACTOR
from serve_app.settings import QuotaSettings

ACTOR = "quota"
MAX_CONCURRENCY = 10_000  # waiting calls (routers, sessions) must not block calls that answer at once


class QuotaActor:
    """Client of the cluster's quota actor. Ray restarts the actor when it dies; if it is gone for good (killed by an
    operator), the next call fails and starts another one."""

    def __init__(self, settings: QuotaSettings) -> None:
        self._settings = settings
        self.handle = quota_actor(settings)
        self.handle.upgrade.remote(RELEASE)  # not waited for: an actor that restarts is found again, as after a death

    async def exchange(self, message: RouterMessage) -> ActorReply:
        """See `GpuMemoryQuota.exchange`."""
        return await self.call("exchange", message)  # type: ignore[no-any-return]

    async def watch(self, message: RouterMessage) -> ActorReply:
        """See `GpuMemoryQuota.watch`."""
        return await self.call("watch", message)  # type: ignore[no-any-return]

    async def model_figures(self) -> dict[str, ModelFigures]:
        """The figures of each model's queue, see `report.model_figures`. Raises AWAY."""
        return await self.call("exchange", ModelFiguresRequest())  # type: ignore[no-any-return]

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call any method of the actor by name."""
        try:
            return await getattr(self.handle, method).remote(*arguments)
        except ActorDiedError:
            self.handle = await asyncio.to_thread(quota_actor, self._settings)
            raise

    def engine(self, report: EngineReport, timeout_s: float) -> EngineReply:
        """See `GpuMemoryQuota.engine`; waits for the answer."""
        return self._call_and_wait("engine", timeout_s, report)  # type: ignore[no-any-return]

    def starts(self, asks: tuple[StartsRequest, ...], timeout_s: float) -> tuple[StartsReply, ...]:
        """See `GpuMemoryQuota.starts`; waits for the answer."""
        return self._call_and_wait("starts", timeout_s, asks)  # type: ignore[no-any-return]

    def devices(self, timeout_s: float) -> dict[str, tuple[int, int]]:
        """See `GpuMemoryQuota.devices`; waits for the answer."""
        return self._call_and_wait("devices", timeout_s)  # type: ignore[no-any-return]

    def _call_and_wait(self, method: str, timeout_s: float, *arguments: Any) -> Any:
        try:
            return ray.get(getattr(self.handle, method).remote(*arguments), timeout=timeout_s)
        except ActorDiedError:
            self.handle = quota_actor(self._settings)
            raise


def quota_actor(settings: QuotaSettings) -> ActorHandle[Any]:
    """The cluster's quota actor; the first caller starts it, with its settings. Ray must be initialised."""
    made: Any = ray.remote(GpuMemoryQuota).options(name=ACTOR, max_concurrency=MAX_CONCURRENCY, **HEAD_ACTOR)
    started: ActorHandle[Any] = made.remote(settings)
    return started
