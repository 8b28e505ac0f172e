"""A stream with its consumers, for tests: a router whose runs are joined by their keys, places, and what Redis has."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection
from typing import Any

from serve_app.batch.interfaces import RowAnswer
from serve_app.batch.model_paces import RowSender
from serve_app.batch.redis_streams import GroupConsumer, connect
from serve_app.batch.stream_intake import StreamIntake
from serve_app.settings import RedisStreamSettings
from tests.fakes.redis_server import RedisServer
from tests.fakes.until import until

MODEL = "tiny"
CLAIM_IDLE_S = 1.0  # the shortest there is
SOON_S = 30.0  # for what takes tenths of a second on an idle machine

Run = Callable[[str, dict[str, Any]], RowAnswer]


def ok(key: str, body: dict[str, Any]) -> RowAnswer:
    return RowAnswer(200, json.dumps({"key": key, "prompt": body.get("prompt")}).encode())


class KeyedRouter:
    """Runs a request once under its key: a repeat joins the run or gets its answer, as the routers' own keys do.

    Args:
        run: decides an answer; one that says "later" or is an engine's failure is not kept.
    """

    def __init__(self, run: Run = ok) -> None:
        self.run = run
        self.gate = asyncio.Event()
        self.gate.set()
        self.calls: Counter[str] = Counter()
        self.runs: Counter[str] = Counter()
        self.owners: set[str] = set()
        self.running = 0
        self.most = 0
        self.on_run: Callable[[], None] = lambda: None
        self._tasks: dict[str, asyncio.Task[RowAnswer]] = {}

    async def run_as(self, key_id: str, path: str, body: bytes, key: str) -> RowAnswer:
        self.owners.add(key_id)
        self.calls[key] += 1
        if key not in self._tasks:
            self._tasks[key] = asyncio.create_task(self._run(key, json.loads(body)))
        answer = await asyncio.shield(self._tasks[key])
        if answer.status == 429 or answer.status >= 500:
            self._tasks.pop(key, None)
        return answer

    async def _run(self, key: str, body: dict[str, Any]) -> RowAnswer:
        self.runs[key] += 1
        self.running += 1
        self.most = max(self.most, self.running)
        self.on_run()
        try:
            await self.gate.wait()
            await asyncio.sleep(body.get("sleep_s", 0))  # bound: the test's own
            return self.run(key, body)
        finally:
            self.running -= 1


class FixedPaces:
    """So many rows of the model in flight."""

    max_in_flight = 512

    def __init__(self, places: int = 8) -> None:
        self.places = places
        self.in_flight = 0
        self.waiting: dict[str, int] = {}
        self.is_closed = False
        self.on_change: Callable[[], None] = lambda: None

    def models(self) -> Collection[str]:
        return (MODEL,)

    def may_start(self, model: str) -> int:
        return self.places - self.in_flight

    def wait(self, model: str, rows: int) -> None:
        self.waiting[model] = rows

    def on_start(self, model: str) -> None:
        self.in_flight += 1

    def on_end(self, model: str) -> None:
        self.in_flight -= 1
        self.on_change()

    def close(self) -> None:
        self.is_closed = True


class Streams:
    """The three streams of one test, as a producer and a reader of replies see them."""

    def __init__(self, server: RedisServer, name: str, **settings: Any) -> None:
        self.server = server
        self.redis = server.client()
        names = {field: f"{name}:{field}" for field in ("stream", "reply_stream", "dead_stream")}
        self.settings = RedisStreamSettings(**names, **{"key_id": "ops", "claim_idle_s": CLAIM_IDLE_S, **settings})

    def add(self, count: int = 1, **fields: Any) -> list[str]:
        """Entries with numbered ids `row-N`, unless `id` is given. Returns the ids of the entries."""
        body = {"model": MODEL, "prompt": "x"}
        entries = []
        for number in range(count):
            entry = {"id": f"row-{number}", "body": json.dumps(body)} | fields
            found: Any = self.redis.xadd(self.settings.stream, {name: v for name, v in entry.items() if v is not None})
            entries.append(found.decode())
        return entries

    def replies(self, stream: str | None = None) -> list[dict[str, Any]]:
        found: Any = self.redis.xrange(stream or self.settings.reply_stream)
        return [{name.decode(): value.decode() for name, value in fields.items()} for _, fields in found]

    def dead(self) -> list[dict[str, Any]]:
        return self.replies(self.settings.dead_stream)

    def pending(self) -> dict[str, int]:
        """Deliveries of each pending entry."""
        found: Any = self.redis.xpending_range(self.settings.stream, self.settings.group, "-", "+", 10_000)
        return {one["message_id"].decode(): one["times_delivered"] for one in found}

    async def replied(self, count: int) -> None:
        """So many replies are there, and nothing is pending."""
        await until(lambda: len(self.replies()) >= count, SOON_S, f"{count} replies")
        await until(lambda: not self.pending(), SOON_S, "nothing is pending")

    @contextlib.asynccontextmanager
    async def consumed(
        self, router: KeyedRouter, paces: RowSender | FixedPaces | None = None, name: str = "one"
    ) -> AsyncIterator[tuple[StreamIntake, asyncio.Task[None]]]:
        """A consumer that reads while the block runs, and is closed after it."""
        redis = connect(self.server.url, 1)
        consumer = GroupConsumer(redis, self.settings, name)
        intake = StreamIntake(consumer, self.settings, router, paces or FixedPaces())
        task = asyncio.create_task(intake.run())
        try:
            yield intake, task
            intake.close()
            await asyncio.wait({task}, timeout=SOON_S)
            assert task.done(), "the consumer ends"
            if not task.cancelled():
                task.result()
        finally:
            task.cancel()
            await asyncio.wait({task}, timeout=SOON_S)
            await redis.aclose()
