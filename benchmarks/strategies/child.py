"""The engine in a process of its own, without Ray: `python -m benchmarks.strategies.child`, orders on its input.

The first line is a model's settings. Each further line is an order, run before the next one is read. Answers are lines
on the output as it was at the start; what vLLM prints goes to the error output.

Invariant: one engine serves all orders; an order begins when nothing of the one before is left in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import os
import sys
import time
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
import psutil
import uvloop

from benchmarks.common.arms import BenchmarkError
from benchmarks.common.processes import machine_busy_s
from benchmarks.strategies.orders import Ended, OpenRun, Ran, Row, Started
from benchmarks.strategies.workload import prompt_ids
from serve_app.engine import batch_figures, batched_engine, deployment
from serve_app.errors import ServeAppError
from serve_app.settings import ModelSettings
from serve_app.transport import EngineBackend, Frame, Submit
from serve_app.types import Operation

REFUSALS = (429, 503)
IDLE_POLL_S = 0.002  # between looks whether the engine is idle, before a run
IDLE_POLLS = 500  # vLLM tells its load with its steps: one that was cancelled in the last step is seen for ever


class Recorder:
    """The engine with a row for each request: when it was handed in, its first and its last frame."""

    def __init__(self, backend: EngineBackend) -> None:
        self._backend = backend
        self.rows: dict[int, Row] = {}
        self.began = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    async def run(self, submit: Submit) -> AsyncGenerator[Frame, None]:
        row = self.rows[submit.number]
        row.started_s = time.monotonic() - self.began
        async with contextlib.aclosing(self._backend.run(submit)) as frames:
            async for frame in frames:
                if row.first_s < 0.0:
                    row.first_s = time.monotonic() - self.began
                if frame.usage is not None:
                    row.ended_s = time.monotonic() - self.began
                yield frame


class Driver:
    """Runs orders against one started engine."""

    def __init__(self, backend: EngineBackend, settings: ModelSettings) -> None:
        self._recorder = Recorder(backend)
        self._settings = settings
        self._engine = batched_engine.BatchedEngine(self._recorder, None, time.monotonic, batch_figures.BatchFigures())
        self._runs = itertools.count()

    async def run(self, order: OpenRun) -> Ran:
        """One order to the end of its last request."""
        await self._idle()
        submits = self._submits(order)
        gc.collect()
        self._engine.set_policy(order.strategy.policy)
        self._recorder.rows = {}
        steps = self._recorder.load().steps
        cpu_s = cpu_seconds()
        busy_s = machine_busy_s()
        self._recorder.began = time.monotonic()
        await self._open(order, submits)
        wall_s = time.monotonic() - self._recorder.began
        rows = sorted(self._recorder.rows.values(), key=lambda row: row.number)
        cpu_s = cpu_seconds() - cpu_s
        busy_s = machine_busy_s() - busy_s
        return Ran(rows, wall_s, self._recorder.load().steps - steps, cpu_s, max(0.0, busy_s - cpu_s))

    def _submits(self, order: OpenRun) -> list[Submit]:
        """Made before the clock starts."""
        found = []
        run = next(self._runs)
        for ask in order.asks:
            body: dict[str, Any] = {"model": self._settings.name, "prompt": prompt_ids(ask, order.seed)}
            body |= {"max_tokens": ask.output, "ignore_eos": True, "temperature": 0, "stream": True}
            name = f"{run}-{ask.number}"
            prompt, output = order.strategy.lengths(ask)
            found.append(
                Submit(ask.number, name, Operation.COMPLETION, body, prompt_tokens=prompt, output_tokens=output)
            )
        return found

    async def _open(self, order: OpenRun, submits: list[Submit]) -> None:
        began = self._recorder.began
        async with asyncio.TaskGroup() as group:
            for ask, submit in zip(order.asks, submits, strict=True):
                left_s = began + ask.at_s - time.monotonic()
                if left_s > 0.0:
                    await asyncio.sleep(left_s)
                row = Row(ask.number, ask.prompt, ask.output, ask.at_s)
                group.create_task(self._request(row, submit, order.deadline_s))
            await asyncio.sleep(0)  # a turn: the last requests have arrived
            self._engine.set_policy(None)  # no more will: a batch that waits to be filled starts

    async def _request(self, row: Row, submit: Submit, deadline_s: float | None) -> None:
        self._recorder.rows[row.number] = row
        try:
            async with asyncio.timeout(deadline_s), contextlib.aclosing(self._engine.run(submit)) as frames:
                async for frame in frames:
                    if frame.status >= 400:
                        if frame.status not in REFUSALS:
                            raise BenchmarkError(f"status {frame.status}: {frame.body[:500]!r}")
                        row.outcome = Ended.REFUSED
                    elif frame.usage is not None:
                        row.outcome = Ended.DONE
        except TimeoutError:
            row.outcome = Ended.LATE
        except ServeAppError as error:
            if error.status not in REFUSALS:
                raise
            row.outcome = Ended.REFUSED
        finally:
            if row.ended_s < 0.0 <= row.started_s:
                row.ended_s = time.monotonic() - self._recorder.began

    async def _idle(self) -> None:
        """Return when the engine has ended what was cancelled in it."""
        for _ in range(IDLE_POLLS):
            if not self._recorder.load().running:
                return
            await asyncio.sleep(IDLE_POLL_S)


def cpu_seconds() -> float:
    """Of this process and of the engine's."""
    own = psutil.Process()
    return float(sum(sum(one.cpu_times()[:2]) for one in [own, *own.children(recursive=True)]))


async def serve(given: bytes, write: Any) -> None:
    """Start the engine and answer orders until the input ends."""
    settings = ModelSettings.model_validate(msgspec.json.decode(given))
    began = time.monotonic()
    backend = deployment.make_backend(settings)
    try:
        info = await backend.start()
        write(Started(time.monotonic() - began, info.slots, info.max_model_len, info.kv_cache_tokens))
        driver = Driver(backend, settings)
        decoder = msgspec.json.Decoder(OpenRun)
        while line := await asyncio.to_thread(sys.stdin.buffer.readline):
            write(await driver.run(decoder.decode(line)))
    finally:
        await backend.shutdown()


def main() -> int:
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)

    def write(answer: msgspec.Struct) -> None:
        data = memoryview(msgspec.json.encode(answer) + b"\n")
        while data:
            data = data[answers.write(data) :]

    sys.setswitchinterval(deployment.THREAD_SWITCH_S)
    uvloop.run(serve(sys.stdin.buffer.readline(), write))
    return 0


if __name__ == "__main__":
    sys.exit(main())
