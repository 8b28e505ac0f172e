"""What traces add to a request, in CPU time: `python -m benchmarks.trace_cost [--quick] [--rounds N]`.

One router, the quota actor's queue and two simulated engines in one process, as in `request_cost`; the collector is
another process, and is not counted. Each round answers the same requests once without traces and once with each ratio,
in an order that turns with the rounds. The ratio of a round is its CPU time over that of its round without traces.

The time has the share of the client and the engines, too: the ratio of the router alone is above the one printed. The
figure beside it, in microseconds a request, is the router's own.

Prints conditions, a table, and as its last line one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import multiprocessing
import statistics
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks.common.conditions import here
from benchmarks.common.output import write_json
from benchmarks.request_cost import REPLICAS, SLOTS, STEP_S, WARM_UP, ask_all
from tests.fakes.asgi_client import Client, started
from tests.fakes.engines import FakeCluster, model, run
from tests.fakes.otlp_receiver import otlp_receiver

RATIOS = (0.01, 1.0)
CLIENTS = len(REPLICAS) * SLOTS // 2  # at once; no request waits
REQUESTS = 4_000  # of each round and ratio
QUICK_REQUESTS = 500
ROUNDS = 10
START_S = 60.0  # of the collector's process
SETTLE_S = 1.0  # in which the exporter sends what waits
BOUND_S = 1_800.0
# An interval with this part of the rounds on each side: of ten rounds without the largest and the smallest.
OUTSIDE = 0.1


def _collect(ready: Connection) -> None:
    """The collector: tells its address, and takes spans until the other side closes."""
    with otlp_receiver() as receiver:
        ready.send(receiver.url)
        with contextlib.suppress(EOFError):
            ready.recv()
        before = -1
        while before < len(receiver.spans):  # the last ones are on their way
            before = len(receiver.spans)
            time.sleep(SETTLE_S)
        ready.send(len(receiver.spans))


@contextlib.contextmanager
def collector() -> Iterator[tuple[str, Connection]]:
    """A collector in a process of its own, for the block."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_collect, args=(theirs,), daemon=True)
    process.start()
    try:
        if not ours.poll(START_S):
            raise RuntimeError(f"the collector has not started within {START_S:.0f} s")
        yield ours.recv(), ours
    finally:
        process.terminate()
        process.join()


async def measure(
    cluster: FakeCluster, url: str, requests: int, rounds: int
) -> tuple[dict[float | None, list[float]], int]:
    """CPU microseconds a request of each round, by the ratio (None: traces are off); and the dropped spans."""
    client = await started(cluster, *REPLICAS)
    await ask_all(client, WARM_UP, CLIENTS)
    ways: tuple[float | None, ...] = (None, *RATIOS)
    found: dict[float | None, list[float]] = {way: [] for way in ways}
    for number in range(rounds):
        turn = number % len(ways)
        for way in (*ways[turn:], *ways[:turn]):
            _trace(client, url, way)
            gc.collect()
            began = time.process_time()
            await ask_all(client, requests, CLIENTS)
            found[way].append((time.process_time() - began) / requests * 1e6)
    _trace(client, url, None)
    dropped = sum(client.figures("serve_app_trace_spans_dropped_total", "reason").values())
    return found, round(dropped)


def _trace(client: Client, url: str, ratio: float | None) -> None:
    """Turn traces on with this ratio, or off."""
    given: dict[str, Any] = {} if ratio is None else {"endpoint": url, "sample_ratio": ratio}
    settings = client.edge.settings.model_dump() | {"traces": given}
    client.edge.configure(client.edge.settings.model_validate(settings))


def ratios(found: dict[float | None, list[float]]) -> dict[str, dict[str, Any]]:
    """By the sampling ratio: the median of the rounds' ratios, their interval, and the microseconds a request."""
    result = {}
    for way in RATIOS:
        each = sorted(on / off for on, off in zip(found[way], found[None], strict=True))
        outside = int(len(each) * OUTSIDE)
        added = statistics.median(on - off for on, off in zip(found[way], found[None], strict=True))
        result[f"{way:g}"] = {
            "cpu_ratio": round(statistics.median(each), 4),
            "interval": [round(each[outside], 4), round(each[len(each) - 1 - outside], 4)],
            "added_us": round(added, 1),
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_REQUESTS:,} requests a round")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"by default {ROUNDS}")
    asked = parser.parse_args()
    requests = QUICK_REQUESTS if asked.quick else REQUESTS
    console = Console(stderr=True)
    conditions = here(requests=requests, rounds=asked.rounds, clients=CLIENTS)
    console.print(conditions)
    settings = model(slots=SLOTS, step_s=STEP_S)
    with collector() as (url, connection):
        scenario = lambda cluster: measure(cluster, url, requests, asked.rounds)  # noqa: E731
        found, dropped = run(scenario, settings, loop=uvloop.new_event_loop, bound_s=BOUND_S)
        connection.send(None)
        spans = connection.recv() if connection.poll(START_S) else None
    result = ratios(found)
    off_us = statistics.median(found[None])
    table = Table(
        "sample ratio", "CPU over off", "interval", "us a request more", title=f"off: {off_us:.0f} us a request"
    )
    for way, figures in result.items():
        low, high = figures["interval"]
        table.add_row(way, f"{figures['cpu_ratio']:.3f}", f"{low:.3f} to {high:.3f}", f"{figures['added_us']:.1f}")
    console.print(table)
    write_json(
        {
            "by_sample_ratio": result,
            "off_us_per_request": round(off_us, 1),
            "spans": spans,
            "dropped": dropped,
            "conditions": conditions,
        }
    )


if __name__ == "__main__":
    main()
