"""What the serving layer adds to a request, in CPU time: `python -m benchmarks.request_cost [--quick]`.

One router, the quota actor's queue and two simulated engines in one process, so the time has all of their work, and the
client's and the engines' share of it, which two trees have in common: compare the figures of two trees in turns. Two
loads of streamed completions of eight tokens: as many clients at once as half of the slots, whose requests begin on the
router's credit, and twice as many as there are slots, whose requests wait at the actor.

Prints conditions, a table, and as its last line one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import statistics
import time

import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks.common.conditions import here
from benchmarks.common.output import write_json
from tests.fakes.asgi_client import COMPLETIONS, Client, ask, started
from tests.fakes.engines import FakeCluster, model, run

REPLICAS = ("r1", "r2")
SLOTS = 16  # of each replica
TOKENS = 8  # of each answer
STEP_S = 0.0005
LOADS = {"on credit": len(REPLICAS) * SLOTS // 2, "waiting": len(REPLICAS) * SLOTS * 2}  # clients at once
REQUESTS = 5_000  # of each round
QUICK_REQUESTS = 1_000
WARM_UP = 500  # requests, before the first round: estimates are learned from as many
ROUNDS = 5
BOUND_S = 1_200.0


async def ask_all(client: Client, requests: int, clients: int) -> None:
    """Answer so many requests, from so many clients at once."""
    numbers = iter(range(requests))

    async def ask_next() -> None:
        for number in numbers:
            reply = await client.post(ask(f"prompt {number} about the river", TOKENS), COMPLETIONS)
            if reply.status != 200:
                raise RuntimeError(reply.body.decode())

    async with asyncio.TaskGroup() as asking:
        for _ in range(clients):
            asking.create_task(ask_next())


async def measure(cluster: FakeCluster, requests: int) -> dict[str, list[float]]:
    """CPU microseconds a request of each round, by load; the loads take turns."""
    client = await started(cluster, *REPLICAS)
    await ask_all(client, WARM_UP, max(LOADS.values()))
    found: dict[str, list[float]] = {name: [] for name in LOADS}
    for _ in range(ROUNDS):
        for name, clients in LOADS.items():
            gc.collect()
            began = time.process_time()
            await ask_all(client, requests, clients)
            found[name].append((time.process_time() - began) / requests * 1e6)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_REQUESTS:,} requests a round")
    requests = QUICK_REQUESTS if parser.parse_args().quick else REQUESTS
    console = Console(stderr=True)
    conditions = here(requests=requests, rounds=ROUNDS, clients=LOADS)
    console.print(conditions)
    settings = model(slots=SLOTS, step_s=STEP_S)
    found = run(lambda cluster: measure(cluster, requests), settings, loop=uvloop.new_event_loop, bound_s=BOUND_S)
    table = Table("load", "median", "least", "greatest", title="CPU us a request")
    result = {}
    for name, rounds in found.items():
        figures = statistics.median(rounds), min(rounds), max(rounds)
        table.add_row(name, *(f"{figure:.0f}" for figure in figures))
        result[name] = dict(zip(("median", "least", "greatest"), (round(figure, 1) for figure in figures), strict=True))
    console.print(table)
    write_json({"cpu_us_per_request": result, "conditions": conditions})


if __name__ == "__main__":
    main()
