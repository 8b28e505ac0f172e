"""How often routers call the quota actor, by its own count."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

from benchmarks.common.arms import BenchmarkError
from benchmarks.common.scaling_stack import MODEL, Stage
from benchmarks.limits.clients import Crowd
from benchmarks.limits.load import SMALL

FAR_PER_S = 40.0  # requests: 4% of `FAR`, and enough to tell 0.1 messages each from what routers say anyway
SETTLE_S = 2.0  # for credit and reports of the load before


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
