"""What the engine, the routers and the quota actor count by themselves while loads run."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.common.arms import BenchmarkError
from benchmarks.common.scaling_stack import MODEL, Stage
from benchmarks.limits.clients import Crowd
from benchmarks.limits.load import SMALL

LOOK_S = 0.5  # between looks at what the engine runs; one costs a router and the engine some milliseconds
FAR_PER_S = 40.0  # requests: 4% of `FAR`, and enough to tell 0.1 messages each from what routers say anyway
SETTLE_S = 2.0  # for credit and reports of the load before
RUNNING = "serve_app_engine_running_sequences"
TOKENS = ("serve_app_engine_prompt_tokens_total", "serve_app_engine_generated_tokens_total")


@dataclass(slots=True)
class EngineSide:
    """`tokens`: of prompts and answers, since the engine's start. `running`: the most seen at once."""

    tokens: float = 0.0
    running: float = 0.0
    by_router: dict[str, float] = field(default_factory=dict)  # requests ended

    def look(self, stage: Stage) -> None:
        figures: dict[str, float] = {}
        self.by_router.clear()
        for family in text_string_to_metric_families(stage.get("/metrics").text):
            for sample in family.samples:
                if sample.name in (RUNNING, *TOKENS):
                    figures[sample.name] = figures.get(sample.name, 0.0) + sample.value
                elif sample.name == "serve_app_requests_total":
                    router = sample.labels["router"]
                    self.by_router[router] = self.by_router.get(router, 0.0) + sample.value
        self.tokens = sum(figures[name] for name in TOKENS)
        self.running = max(self.running, figures[RUNNING])


@asynccontextmanager
async def watched(stage: Stage) -> AsyncIterator[EngineSide]:
    """The engine's tokens of the block, and the most that it ran at once, by looks at it."""
    seen = EngineSide()
    before = EngineSide()
    await asyncio.to_thread(before.look, stage)

    async def watch() -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            await asyncio.to_thread(seen.look, stage)

    task = asyncio.create_task(watch())
    try:
        yield seen
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await asyncio.to_thread(seen.look, stage)
    seen.tokens -= before.tokens


def router_calls(stage: Stage) -> int:
    """Calls of all routers to the quota actor so far: messages, and long polls for later decisions."""
    answer = stage.get("/admin/quota")
    if answer.status_code != 200:
        raise BenchmarkError(f"/admin/quota: {answer.status_code} {answer.text[:200]}")
    return sum(answer.json()["router_calls"].values())


async def calls_per_request(stage: Stage, keys: dict[str, str], seed: int, span_s: float, rounds: int) -> Any:
    """Calls to the actor per request at a few percent of the limits, by key in turn (A B A B)."""
    found: dict[str, list[float]] = {name: [] for name in keys}
    for number in range(rounds):
        for name, key in keys.items():
            crowd = Crowd(stage.cluster.url, key, MODEL, random.Random(f"{seed} {number} {name}"))
            await asyncio.sleep(SETTLE_S)
            before = await asyncio.to_thread(router_calls, stage)
            began = time.monotonic()
            await crowd.open_loop(FAR_PER_S, SMALL, began + span_s)
            after = await asyncio.to_thread(router_calls, stage)
            wrong = [ask for ask in crowd.asks if not ask.tokens]
            if wrong:
                raise BenchmarkError(f"{len(wrong)} requests far from the limit were not answered: {wrong[0]}")
            found[name].append((after - before) / len(crowd.asks))
    return {name: [round(value, 4) for value in values] for name, values in found.items()}
