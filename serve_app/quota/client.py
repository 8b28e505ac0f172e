"""Client of the quota actor."""

from __future__ import annotations

from collections.abc import Collection

from serve_app.core.batches import ModelFigures
from serve_app.core.live import QuotaPart
from serve_app.core.memory import EngineReply, EngineReport, StartsReply, StartsRequest
from serve_app.core.shared_queue import ActorReply, RouterMessage
from serve_app.names import QUOTA_ACTOR
from serve_app.quota.actor import GpuMemoryQuota
from serve_app.quota.live import LiveRequest
from serve_app.quota.report import ModelFiguresRequest
from serve_app.ray_adapter import HeadActor
from serve_app.settings import QuotaSettings

MAX_CONCURRENCY = 10_000  # waiting calls (routers, sessions) must not block calls that answer at once


class QuotaActor:
    """Client of the cluster's quota actor, which the first caller starts, with its settings. Calls are made once, and
    repeated by those who make them. Ray must be initialised."""

    def __init__(self, settings: QuotaSettings) -> None:
        self.actor = HeadActor(QUOTA_ACTOR, GpuMemoryQuota, MAX_CONCURRENCY, (settings,))
        self.actor.find()
        self.call = self.actor.call

    async def exchange(self, message: RouterMessage) -> ActorReply:
        """See `GpuMemoryQuota.exchange`."""
        return await self.call("exchange", message)  # type: ignore[no-any-return]

    async def watch(self, message: RouterMessage) -> ActorReply:
        """See `GpuMemoryQuota.watch`."""
        return await self.call("watch", message)  # type: ignore[no-any-return]

    async def model_figures(self) -> dict[str, ModelFigures]:
        """The figures of each model's queue, see `Quota.model_figures`. Raises AWAY."""
        return await self.call("exchange", ModelFiguresRequest())  # type: ignore[no-any-return]

    async def live(self, tenants: Collection[str]) -> QuotaPart:
        """What happens now, see `live.live_part`. Raises AWAY."""
        return await self.call("exchange", LiveRequest(tuple(tenants)))  # type: ignore[no-any-return]

    def engine(self, report: EngineReport, timeout_s: float) -> EngineReply:
        """See `GpuMemoryQuota.engine`; waits for the answer."""
        return self.actor.call_and_wait("engine", timeout_s, report)  # type: ignore[no-any-return]

    def starts(self, asks: tuple[StartsRequest, ...], timeout_s: float) -> tuple[StartsReply, ...]:
        """See `GpuMemoryQuota.starts`; waits for the answer."""
        return self.actor.call_and_wait("starts", timeout_s, asks)  # type: ignore[no-any-return]

    def devices(self, timeout_s: float) -> dict[str, tuple[int, int]]:
        """See `GpuMemoryQuota.devices`; waits for the answer."""
        return self.actor.call_and_wait("devices", timeout_s)  # type: ignore[no-any-return]
