"""The quota actor as its callers hold it: found by its name, started by the first to ask, found again after its end."""

from __future__ import annotations

import asyncio
from typing import Any

import ray
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import ActorDiedError, RayError

from serve_app.core.memory import EngineReply, EngineReport, StartsAsk, StartsReply
from serve_app.core.shared_queue import Exchange, Reply
from serve_app.quota.actor import GpuMemoryQuota
from serve_app.quota.inventory import InventorySettings
from serve_app.settings import QuotaSettings

ACTOR = "quota"
NAMESPACE = "serve_app"
MAX_CONCURRENCY = 10_000  # calls that wait (routers, sessions) must never keep one that answers at once waiting
HEAD = {"node:__internal_head__": 0.001}  # Ray's own resource of the head

AWAY = (RayError, TimeoutError)  # what a call of the actor raises while it is not there


class QuotaActor:
    """The cluster's quota actor as a caller holds it. Ray starts it again when it dies; should it be gone for good
    (killed by an operator), the next word starts another one."""

    def __init__(self, settings: QuotaSettings) -> None:
        self._settings = settings
        self.handle = quota_actor(settings)

    def renew(self) -> None:
        """Find it again, or start it. Raises what Ray does while it is away."""
        self.handle = quota_actor(self._settings)

    async def exchange(self, told: Exchange) -> Reply:
        """See `GpuMemoryQuota.exchange`."""
        return await self.call("exchange", told)  # type: ignore[no-any-return]

    async def watch(self, told: Exchange) -> Reply:
        """See `GpuMemoryQuota.watch`."""
        return await self.call("watch", told)  # type: ignore[no-any-return]

    async def call(self, method: str, *arguments: Any) -> Any:
        """Any method of it by name."""
        try:
            return await getattr(self.handle, method).remote(*arguments)
        except ActorDiedError:
            await asyncio.to_thread(self.renew)
            raise

    def engine(self, told: EngineReport, timeout_s: float) -> EngineReply:
        """See `GpuMemoryQuota.engine`; waits for the answer."""
        try:
            answer: ObjectRef[EngineReply] = self.handle.engine.remote(told)
            return ray.get(answer, timeout=timeout_s)
        except ActorDiedError:
            self.renew()
            raise

    def starts(self, asks: tuple[StartsAsk, ...], timeout_s: float) -> tuple[StartsReply, ...]:
        """See `GpuMemoryQuota.starts`; waits for the answer."""
        try:
            answer: ObjectRef[tuple[StartsReply, ...]] = self.handle.starts.remote(asks)
            return ray.get(answer, timeout=timeout_s)
        except ActorDiedError:
            self.renew()
            raise

    def devices(self, timeout_s: float) -> dict[str, tuple[int, int]]:
        """See `GpuMemoryQuota.devices`; waits for the answer."""
        answer: ObjectRef[dict[str, tuple[int, int]]] = self.handle.devices.remote()
        return ray.get(answer, timeout=timeout_s)


def quota_actor(settings: QuotaSettings) -> ActorHandle[Any]:
    """The cluster's quota actor; started by the first that asks, with its settings. Ray has to be initialised."""
    inventory = InventorySettings(
        reserved_bytes=int(settings.reserved_gb * 1e9),
        host_share=settings.host_memory_share,
        device_bytes=None if settings.device_gb is None else int(settings.device_gb * 1e9),
    )
    made: Any = ray.remote(GpuMemoryQuota).options(
        name=ACTOR,
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        max_restarts=-1,
        num_cpus=0,
        resources=HEAD,
        max_concurrency=MAX_CONCURRENCY,
        scheduling_strategy="DEFAULT",  # not in the placement group of the replica that happens to start it
    )
    started: ActorHandle[Any] = made.remote(inventory, settings.defrag_above)
    return started
