"""A simulated engine in made-up time, for the tests beside this file."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from serve_app.engine.simulated import SimulatedEngine
from serve_app.settings import ModelSettings, SimulatedSettings
from serve_app.transport import EngineInfo, Frame, Submit
from serve_app.types import Operation

CREATED = 1_700_000_000
HELLO = {"messages": [{"role": "user", "content": "Hello there"}]}


class MadeUpTime:
    """A clock that only `sleep` moves."""

    def __init__(self) -> None:
        self.now = 0.0
        self.flows = asyncio.Event()
        self.flows.set()

    async def sleep(self, delay_s: float) -> None:
        if delay_s > 0.0:
            await self.flows.wait()
        self.now += delay_s
        await asyncio.sleep(0)


def run(
    test: Callable[[SimulatedEngine, MadeUpTime, EngineInfo], Awaitable[Any]],
    *,
    simulated: dict[str, Any] | None = None,
    **changes: Any,
) -> Any:
    """Run `test` against a started engine."""
    given = ModelSettings(
        name="sim", engine="simulated", simulated=SimulatedSettings.model_validate(simulated or {}), **changes
    )

    async def started() -> Any:
        time = MadeUpTime()
        engine = SimulatedEngine(given, clock=lambda: time.now, wall_clock=lambda: CREATED, sleep=time.sleep)
        info = await engine.start()
        try:
            return await test(engine, time, info)
        finally:
            await engine.shutdown()

    return asyncio.run(started())


def submit(operation: Operation, body: dict[str, Any], number: int = 0, priority: int = 0) -> Submit:
    return Submit(number, f"id-{number}", operation, body, priority)


def pieces(operation: Operation, body: dict[str, Any], **changes: Any) -> list[Frame]:
    """Every piece of one request on an engine of its own."""

    async def collect(engine: SimulatedEngine, time: MadeUpTime, info: EngineInfo) -> list[Frame]:
        return [piece async for piece in engine.run(submit(operation, body))]

    reported: list[Frame] = run(collect, **changes)
    assert reported[0].status
    assert all(piece.status == 0 for piece in reported[1:])
    assert [piece.usage is not None for piece in reported] == [False] * (len(reported) - 1) + [True]
    return reported


def document(operation: Operation, body: dict[str, Any], **changes: Any) -> dict[str, Any]:
    (piece,) = pieces(operation, body, **changes)
    assert (piece.status, piece.media) == (200, "json")
    return dict(json.loads(piece.body))


def events(reported: list[Frame]) -> list[dict[str, Any]]:
    """The JSON of every SSE event, the closing `[DONE]` checked and left out."""
    assert (reported[0].status, reported[0].media) == (200, "sse")
    lines = b"".join(piece.body for piece in reported).split(b"\n\n")
    assert lines[-2:] == [b"data: [DONE]", b""]
    return [json.loads(line.removeprefix(b"data: ")) for line in lines[:-2]]
