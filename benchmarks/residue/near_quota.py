"""The quota actor in the router's own process: `GpuMemoryQuota` as it is, with a store and devices that are at hand.

What routers and engines say to it is not copied and crosses no border, so a request costs what the actor's own work
is. Engines say every `ENGINE_HEARTBEAT_S` that they are there, as real ones do. It is no world of its own: the actor is
production's, whose memory is measured.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from typing import Any
from unittest import mock

from serve_app.core.memory import Device, EngineReport, Rank
from serve_app.core.shared_queue import ActorReply, RouterMessage
from serve_app.core.times import ENGINE_HEARTBEAT_S
from serve_app.quota import GpuMemoryQuota
from serve_app.quota import actor as quota
from serve_app.settings import QuotaSettings

NODE = "here"
LAST_WORDS = 100
LAST_WORD_S = 0.05
DEVICE_BYTES = 1_000_000
ENGINE_BYTES = 1_000


class _Store(dict[str, Any]):
    """In place of `Shelf`."""

    def put(self, name: str, value: Any) -> None:
        self[name] = value

    def delete(self, name: str) -> None:
        self.pop(name, None)

    def load_all(self) -> dict[str, Any]:
        return dict(self)


class _Devices:
    """In place of `Inventory`: one device, on which what has ended is gone."""

    async def devices(self) -> list[Device]:
        return [Device(NODE, 0, DEVICE_BYTES, 0)]

    async def leaving(self) -> dict[str, float]:
        return {}

    async def gone(self, report: EngineReport | None) -> bool:
        return True

    end_orphans = gone


class NearQuota:
    """The actor and its engines. Entered with `near_quota`."""

    def __init__(self, actor: GpuMemoryQuota) -> None:
        self._actor = actor
        self._engines: dict[str, EngineReport] = {}

    async def exchange(self, message: RouterMessage) -> ActorReply:
        reply = await self._actor.exchange(message)
        assert isinstance(reply, ActorReply)
        return reply

    async def watch(self, message: RouterMessage) -> ActorReply:
        return await self._actor.watch(message)

    async def engine_runs(self, name: str, model: str, slots: int, kv_tokens: int) -> None:
        """An engine gets its memory and starts."""
        report = EngineReport(name, model, (Rank(NODE),), ENGINE_BYTES, ENGINE_BYTES, slots=slots, measures=False)
        reply = await self._actor.engine(report)
        report = dataclasses.replace(report, holds=reply.holds, kv_tokens=kv_tokens, kv_bytes=ENGINE_BYTES)
        self._engines[name] = report
        await self._actor.engine(report)

    async def engine_ends(self, name: str) -> None:
        """An engine has ended, and its memory is free."""
        await self._actor.engine(dataclasses.replace(self._engines.pop(name), gone=True))

    async def beat(self) -> None:
        """Engines go on saying that they are there; never returns."""
        while True:
            await asyncio.sleep(ENGINE_HEARTBEAT_S)
            for report in list(self._engines.values()):
                if report.owner in self._engines:  # one may have ended meanwhile
                    await self._actor.engine(report)

    async def left(self) -> dict[str, Any]:
        """What the lines still have of requests, once the last words about them had time to come; empty: nothing."""
        for _ in range(LAST_WORDS):
            if not (found := self._held()):
                break
            await asyncio.sleep(LAST_WORD_S)
        return found

    def _held(self) -> dict[str, Any]:
        queue = self._actor.core.queue
        waiting = {model: state.admission.waiting for model, state in queue.models.by_name.items()}
        found: dict[str, Any] = {model: count for model, count in waiting.items() if count}
        requests = list(queue.requests.by_ticket)
        return found | ({"requests": requests} if requests else {})


@contextlib.asynccontextmanager
async def near_quota() -> AsyncIterator[NearQuota]:
    """An actor that has just come up, until the end of the block."""
    actor = GpuMemoryQuota.__new__(GpuMemoryQuota)
    with (
        mock.patch.object(quota, "GcsStore", return_value=_Store()),
        mock.patch.object(quota, "Inventory", return_value=_Devices()),
    ):
        await actor.__init__(QuotaSettings())  # type: ignore[misc]
    near = NearQuota(actor)
    beats = asyncio.create_task(near.beat(), name="engines-beat")
    try:
        yield near
    finally:
        tasks = [beats, *actor.tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if actor.queue_timer is not None:
            actor.queue_timer.cancel()
