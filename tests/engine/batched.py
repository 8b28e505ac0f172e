"""A batched engine in made-up time, for the tests beside this file."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

from serve_app.core.batching import BatchPolicy
from serve_app.engine.batched_engine import BatchedEngine
from serve_app.transport import Frame, Submit
from tests.fakes.timed_engine import TimedEngine
from tests.fakes.virtual_time import run_in_virtual_time

BOUND_S = 1000.0  # of virtual time: scenarios take under a hundred seconds

Scenario = Callable[[BatchedEngine, TimedEngine], Awaitable[Any]]


def run(policy: BatchPolicy | None, scenario: Scenario) -> Any:
    """Run a scenario on an engine with this policy; then nothing may wait or run."""

    async def started() -> Any:
        inner = TimedEngine()
        engine = BatchedEngine(inner, policy, asyncio.get_running_loop().time)
        await engine.start()
        result = await scenario(engine, inner)
        assert (engine.load().waiting, inner.runs) == (0, set())
        await engine.shutdown()
        return result

    return run_in_virtual_time(started(), BOUND_S)


async def answer(engine: BatchedEngine, asked: Submit) -> list[Frame]:
    """As the replica runs it."""
    async with contextlib.aclosing(engine.run(asked)) as frames:
        return [frame async for frame in frames]


def ask(engine: BatchedEngine, *requests: Submit) -> list[asyncio.Task[list[Frame]]]:
    return [asyncio.create_task(answer(engine, one)) for one in requests]
