"""The actor around the quota core, without Ray and its store."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from typing import Any

from ray.exceptions import RpcError

from serve_app.core.memory import (
    Device,
    EngineReport,
    NodeProcesses,
    Rank,
)
from serve_app.quota.actor import GpuMemoryQuota
from serve_app.quota.kv_store import decode, encode
from serve_app.settings import QuotaSettings

SOON_S = 10.0  # for what takes milliseconds on an idle machine
TOKENS = 1600
ALWAYS = ("epoch", "inventory", "node:n")  # what is stored while nobody holds anything
ENGINE = EngineReport("e", "m", (Rank("n", 0),), 100, 100, processes=(("n", ((7, 1),)),))


class World:
    """What lies outside the actor: the store, the devices, the processes."""

    def __init__(self) -> None:
        self.stored: dict[str, bytes] = {}
        self.aside: list[str] = []
        self.failures = 0
        self.writes = threading.Event()  # cleared: the store takes its time
        self.writes.set()
        self.devices: list[Device] | None = [Device("n", 0, 100, 0)]
        self.processes = {7, 9}
        self.leaves: dict[str, float] = {}
        self.silent: set[int] = set()  # processes whose machine does not answer
        self.stored_before: dict[str, list[Device]] = {}

    # as Shelf

    def put(self, name: str, value: Any) -> None:
        self.writes.wait(SOON_S)
        if self.failures:
            self.failures -= 1
            raise RpcError("the GCS is away")
        self.stored[name] = encode(name, value)

    def delete(self, name: str) -> None:
        self.stored.pop(name, None)

    def quarantine(self, name: str) -> None:
        self.aside.append(name)
        self.delete(name)

    def load_all(self) -> dict[str, Any]:
        if self.failures:
            self.failures -= 1
            raise RpcError("the GCS is away")
        return {name: decode(name, value) for name, value in self.stored.items()}

    async def found(self) -> list[Device]:
        if self.devices is None:
            raise RpcError("Ray does not tell its nodes")
        return self.devices

    async def leaving(self) -> dict[str, float]:
        return self.leaves

    async def gone(self, reported: Iterable[NodeProcesses]) -> bool:
        asked = {pid for _, pids in reported for pid, _ in pids}
        if asked & self.silent:
            await asyncio.Event().wait()
        return not asked & self.processes


class WorldInventory:
    def __init__(self, world: World, stored_before: dict[str, list[Device]]) -> None:
        self.devices = world.found
        self.gone = world.gone
        self.leaving = world.leaving
        self.end_orphans = world.gone
        world.stored_before = dict(stored_before)


Scenario = Callable[[GpuMemoryQuota], Awaitable[None]]


def with_actor(*scenarios: Scenario) -> None:
    """Each scenario with an actor of its own, one after the death of the other."""

    async def run(scenario: Scenario) -> None:
        actor = GpuMemoryQuota.__new__(GpuMemoryQuota)
        async with asyncio.timeout(SOON_S):
            await actor.__init__(QuotaSettings())  # type: ignore[misc]
            await scenario(actor)
        for task in actor.tasks:
            task.cancel()
        await asyncio.gather(*actor.tasks, return_exceptions=True)

    for scenario in scenarios:
        asyncio.run(run(scenario))


async def running(actor: GpuMemoryQuota) -> EngineReport:
    reply = await actor.engine(ENGINE)
    reported = replace(ENGINE, holds=reply.holds, kv_tokens=TOKENS, kv_bytes=100)
    await actor.engine(reported)
    return reported
