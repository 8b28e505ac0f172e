"""A running stack under interactive clients: windows of them, and what the engine's own counters say meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.batch_fill.figures import Counters, Window
from benchmarks.batch_fill.load import Planned, run
from benchmarks.common.arms import BenchmarkError
from benchmarks.common.scaling_stack import Stage

POLL_S = 0.25


@dataclass(frozen=True, slots=True)
class Watched:
    """A stack. Its methods raise BenchmarkError: the stack does not answer, or not in time."""

    stage: Stage

    async def window(self, planned: Sequence[Planned], tokens: int, ramp_s: float, window_s: float, *,
                     stream: bool) -> Window:  # fmt: skip
        """These requests for a ramp and a window; the answers to those who came in the window."""
        load = asyncio.create_task(run(self.stage, planned, tokens, stream=stream))
        await asyncio.sleep(ramp_s)
        before = await asyncio.to_thread(self._counters)
        await asyncio.sleep(window_s)
        after = await asyncio.to_thread(self._counters)
        answers = await load
        return Window([one for one in answers if one.at_s >= ramp_s], before, after)

    async def until_running(self, is_enough: Callable[[float], bool], bound_s: float, expected: str) -> None:
        """Wait for a number of sequences in the engine."""
        deadline = time.monotonic() + bound_s
        while not is_enough(running := await asyncio.to_thread(self._running)):
            if time.monotonic() > deadline:
                raise BenchmarkError(f"{expected}: not within {bound_s:g} s; {running:g} run")
            await asyncio.sleep(POLL_S)

    def metrics(self) -> str:
        answer = self.stage.get("/metrics")
        if answer.status_code != 200:
            raise BenchmarkError(f"/metrics: {answer.status_code} {answer.text[:200]}")
        return answer.text

    def _running(self) -> float:
        """Sequences of a step in the engine, over some steps."""
        first = self._counters()
        time.sleep(POLL_S)  # of some steps
        return self._counters().sequences_since(first)

    def _counters(self) -> Counters:
        return Counters.of(self.metrics(), time.monotonic())
