"""A batched engine in made-up time, for the tests beside this file."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

from serve_app.core.batching import BatchPolicy
from serve_app.engine.batch_figures import SAMPLE_S, BatchFigures
from serve_app.engine.batched_engine import BatchedEngine
from serve_app.transport import EngineLoad, Frame, Submit
from tests.fakes.timed_engine import TimedEngine
from tests.fakes.virtual_time import run_in_virtual_time

BOUND_S = 1000.0  # of virtual time: scenarios take under a hundred seconds


class Replica(BatchedEngine):
    """With the engine's load, as a replica has it."""

    def __init__(self, inner: TimedEngine, policy: BatchPolicy | None) -> None:
        self._inner, self._now, self._seen = inner, asyncio.get_running_loop().time, BatchFigures()
        super().__init__(inner, policy, self._now, self._seen)

    def load(self) -> EngineLoad:
        waiting = self.waiting
        forms_batches = self.forms_batches
        return self._seen.add_to(self._inner.load(), self._now(), waiting=waiting, forms_batches=forms_batches)

    async def look(self) -> None:
        while True:
            self._seen.sample(self._inner.load, self._now())
            await asyncio.sleep(SAMPLE_S)  # made up


Scenario = Callable[[Replica, TimedEngine], Awaitable[Any]]


def run(policy: BatchPolicy | None, scenario: Scenario) -> Any:
    """Run a scenario on an engine with this policy; then nothing may wait or run."""

    async def started() -> Any:
        inner = TimedEngine()
        engine = Replica(inner, policy)
        looks = asyncio.create_task(engine.look())
        await asyncio.sleep(0)  # the first look
        result = await scenario(engine, inner)
        assert (engine.load().waiting, inner.runs) == (0, set())
        looks.cancel()
        return result

    return run_in_virtual_time(started(), BOUND_S)


async def answer(engine: BatchedEngine, asked: Submit) -> list[Frame]:
    """As the replica runs it."""
    async with contextlib.aclosing(engine.run(asked)) as frames:
        return [frame async for frame in frames]


def ask(engine: BatchedEngine, *requests: Submit) -> list[asyncio.Task[list[Frame]]]:
    return [asyncio.create_task(answer(engine, one)) for one in requests]
