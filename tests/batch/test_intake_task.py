"""A worker process reads the streams of its settings, as the keys that these name."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import pytest

from serve_app.batch.intake_task import IntakeTask
from serve_app.batch.interfaces import RowAnswer
from serve_app.batch.model_paces import ModelPaces
from serve_app.core.batches import ModelFigures
from serve_app.settings import parse
from serve_app.store import Store
from tests.batch.conftest import NewStreams
from tests.batch.streams import CLAIM_IDLE_S, MODEL, SOON_S, KeyedRouter, Streams
from tests.fakes.until import until

KEY = {"key": "k" * 20, "name": "ops", "tenant": "night"}


class IdleQueues:
    async def get(self) -> dict[str, ModelFigures]:
        return {MODEL: ModelFigures(slots=16, busy=0, waiting=0, waiting_low=0)}


class TenantRouter:
    """Knows the tenant of each key, as routers do."""

    def __init__(self, **tenants: str) -> None:
        self.tenants = tenants
        self.router = KeyedRouter()
        self.asked = set[tuple[str, str]]()

    async def run_as(self, key_id: str, tenant: str, path: str, body: bytes, key: str) -> RowAnswer:
        self.asked.add((key_id, tenant))
        if self.tenants.get(key_id) != tenant:
            return RowAnswer(401, b"{}", 0.01)
        return await self.router.run_as(key_id, path, body, key)


class StoredKeys:
    """Keys of the store: the tenant of each."""

    def __init__(self) -> None:
        self.tenants: dict[str, str] = {}

    async def __call__(self, method: str, key_id: str) -> Any:
        assert method == "key"
        found = self.tenants[key_id]
        return type("Record", (), {"tenant": found})


def task_of(rows: TenantRouter, stored: StoredKeys, *streams: Streams) -> IntakeTask:
    names = ("stream", "reply_stream", "dead_stream", "key_id")
    listed = [{name: getattr(one.settings, name) for name in names} | {"claim_idle_s": CLAIM_IDLE_S} for one in streams]
    url = streams[0].server.url if streams else ""
    redis = {"redis": {"url": url, "streams": listed}} if streams else {}
    settings = parse({"auth": {"keys": [KEY]}, "batch": redis})
    return IntakeTask(settings, rows, ModelPaces(IdleQueues(), 512, 1), Store(stored))


def test_each_stream_is_run_as_its_key(new_streams: NewStreams) -> None:
    stream = new_streams(key_id="ops")
    two = new_streams(key_id="key-2")
    stream.add(20)
    two.add(20, id=None)

    async def scenario() -> None:
        rows = TenantRouter(ops="night", **{"key-2": "day"})
        stored = StoredKeys()
        task = task_of(rows, stored, stream, two)
        task.start()
        await stream.replied(20)
        assert two.replies() == [], "its key is not there yet, and its entries wait"
        assert two.dead() == []
        await task.close()
        stored.tenants["key-2"] = "day"
        task = task_of(rows, stored, stream, two)
        task.start()
        await two.replied(20)
        assert rows.asked == {("ops", "night"), ("key-2", "day")}
        await task.close()

    asyncio.run(scenario())
    assert {reply["status"] for reply in [*stream.replies(), *two.replies()]} == {"200"}


def test_a_key_that_moved_to_another_tenant_is_looked_up_again(streams: Streams) -> None:
    stream = streams
    stream.settings = stream.settings.model_copy(update={"key_id": "key-2"})
    stream.add(1)

    async def scenario() -> None:
        rows = TenantRouter(**{"key-2": "day"})
        stored = StoredKeys()
        stored.tenants["key-2"] = "before"
        task = task_of(rows, stored, stream)
        task.start()
        await until(lambda: ("key-2", "before") in rows.asked, SOON_S, "the key is tried")
        stored.tenants["key-2"] = "day"
        await stream.replied(1)
        await task.close()

    asyncio.run(scenario())


def test_without_streams_or_without_the_client_nothing_is_read(
    streams: Streams, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        without = task_of(TenantRouter(), StoredKeys())
        without.start()
        await without.close()
        assert caplog.text == ""
        monkeypatch.setitem(sys.modules, "serve_app.batch.redis_intake", None)
        task = task_of(TenantRouter(), StoredKeys(), streams)
        task.start()
        await until(lambda: "serve-app[redis]" in caplog.text, SOON_S, "the log says what is missing")
        await task.close()

    asyncio.run(scenario())
