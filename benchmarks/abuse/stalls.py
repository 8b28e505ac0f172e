"""Does one tenant's costly request hold up the others: `python -m benchmarks.abuse --stalls [--quick] [--arms NAME]`.

The whole stack with one real engine of the built-in model. In each arm (`stall_bodies.arms`) twenty clients of one
tenant send the same request again and again for 12 s, and another tenant sends a trivial chat of the same model every
0.25 s. Before the first arm one large request starts the helper process of the engine. Between two arms the other
tenant is to be answered fast again.

What must hold: the other tenant's requests are all answered, each within `BAR_S`. What an abuser gets is shown and not
judged. Prints conditions, a table, and as its last line one JSON object.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.abuse.stall_bodies import LARGE, TRIVIAL, Asked, arms, encoded
from benchmarks.abuse.stall_clients import Address, exchange, flood, probe, until_fast
from benchmarks.common.arms import BenchmarkError
from benchmarks.common.conditions import here
from benchmarks.common.output import write_json
from benchmarks.common.run import figures_or_exit
from benchmarks.common.scaling_stack import MODEL, stack
from benchmarks.common.workload import post

BAR_S = 1.0  # the longest wait of another tenant, on two quiet cores
ABUSERS = 20
ABUSER = "abuser"
OTHER = "other"
SPAN_S = 12.0
QUICK_SPAN_S = 4.0
EVERY_S = 0.25
TIMEOUT_S = 60.0  # of one request: twice the longest wait ever seen
WARM = 10  # trivial requests before the large one: imports, connections and caches are there then
# an arm begins when three requests in a row were so fast, or after this time
FAST_S = 0.5
BACK_S = 30.0


def configuration() -> dict[str, Any]:
    """Defaults, but for the length, which decides the bounds of a request."""
    replicas = {"min_replicas": 1, "max_replicas": 1}
    model = {"name": MODEL, "path": "tiny", "dtype": "float32", "tool_parser": "hermes", "replicas": replicas}
    return {"models": [model | {"max_model_len": 2048, "kv_cache_gb": 0.5}]}


def figures(waits: Sequence[tuple[str, float]], statuses: Mapping[str, int]) -> dict[str, Any]:
    """Of one arm.

    Args:
        waits: status and seconds of each request of the other tenant.
        statuses: how many of the abusers' requests ended so.
    """
    seconds = [wait_s for _, wait_s in waits]
    return {
        "wait_s_max": round(max(seconds), 3),
        "wait_s_p50": round(median(seconds), 3),
        "requests": len(waits),
        "failed": sum(status != "200" for status, _ in waits),
        "statuses": dict(sorted(statuses.items())),
    }


def met(stalls: Mapping[str, Mapping[str, Any]]) -> dict[str, bool]:
    """Whether each arm kept the bar; a request of the other tenant that failed breaks it, too."""
    return {arm: not found["failed"] and found["wait_s_max"] <= BAR_S for arm, found in stalls.items()}


@dataclass(frozen=True, slots=True)
class Tenants:
    """The two keys, and where they send to."""

    address: Address
    keys: Mapping[str, str]

    def request(self, tenant: str, asked: Asked) -> bytes:
        """As it goes over the connection."""
        body, headers = encoded(asked, MODEL)
        where = f"{self.address[0]}:{self.address[1]}"
        return post(where, asked.path, self.keys[tenant], body, connection="close", **headers)


async def warm_up(tenants: Tenants) -> float:
    """Seconds of the first large request, which starts the helper process.

    Raises:
        BenchmarkError: a request failed.
    """
    for asked in (*[TRIVIAL] * WARM, LARGE):
        status, wait_s = await exchange(tenants.address, tenants.request(OTHER, asked), TIMEOUT_S)
        if status != "200":
            raise BenchmarkError(f"a request of the warm-up ended with {status}: {str(asked)[:200]}")
    return round(wait_s, 3)


async def attack(
    tenants: Tenants, span_s: float, names: Collection[str], console: Console
) -> dict[str, dict[str, Any]]:
    """The figures of each of these arms."""
    trivial = tenants.request(OTHER, TRIVIAL)
    found = dict[str, dict[str, Any]]()
    loop = asyncio.get_running_loop()
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        await loop.run_in_executor(pool, int)  # the process starts before it counts
        for name, asked in arms().items():
            if name not in names:
                continue
            abuse: asyncio.Future[dict[str, int]] | None = None
            if asked is not None:
                request = tenants.request(ABUSER, asked)
                abuse = loop.run_in_executor(pool, flood, tenants.address, request, ABUSERS, span_s, TIMEOUT_S)
            waits = await probe(tenants.address, trivial, span_s, EVERY_S, TIMEOUT_S)
            found[name] = figures(waits, {} if abuse is None else await abuse)
            found[name]["back_s"] = await until_fast(tenants.address, trivial, FAST_S, BACK_S)
            console.print(f"  {name}: {found[name]}", highlight=False)
    return found


def show(console: Console, stalls: Mapping[str, Mapping[str, Any]]) -> None:
    """A table of the arms."""
    kept = met(stalls)
    table = Table(
        "arm", "p50 s", "longest s", "failed", "abusers got", "bar", title=f"longest wait: {BAR_S:g} s at most"
    )
    for arm, found in stalls.items():
        got = ", ".join(f"{status}: {count}" for status, count in found["statuses"].items())
        failed = f"{found['failed']} of {found['requests']}"
        verdict = "met" if kept[arm] else "MISSED"
        table.add_row(arm, f"{found['wait_s_p50']:.3f}", f"{found['wait_s_max']:.3f}", failed, got, verdict)
    console.print(table)


def run(*, quick: bool, names: Collection[str] | None) -> int:
    """0 when these arms, or all, ran, whatever they showed; 1 when the stack did not come up, or its warm-up failed."""
    console = Console(stderr=True, width=140)
    span_s = QUICK_SPAN_S if quick else SPAN_S
    conditions = here(abusers=ABUSERS, span_s=span_s, every_s=EVERY_S)
    console.print(conditions)
    keys = {tenant: f"sk-{secrets.token_hex(16)}" for tenant in (ABUSER, OTHER)}
    with (
        figures_or_exit(console),
        stack(configuration(), [{"key": key, "tenant": tenant} for tenant, key in keys.items()]) as stage,
    ):
        instance = stage.cluster.instance
        tenants = Tenants((instance.host, instance.http_port), keys)
        first_large_s = asyncio.run(warm_up(tenants))
        console.print(f"  first large request: {first_large_s} s", highlight=False)
        stalls = asyncio.run(attack(tenants, span_s, names or arms(), console))
    show(console, stalls)
    verdict = {"stalls": stalls, "bar_s": BAR_S, "met": met(stalls)}
    write_json({**verdict, "first_large_s": first_large_s, "conditions": conditions})
    return 0
