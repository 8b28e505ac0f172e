"""One stack of three routers for the modules that look at one line, or at a lost process, from several of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.e2e import stack as stacks
from tests.e2e.observe import HTTP_PROCESSES, http_status, within
from tests.e2e.stack import BATCH_KEY, PEOPLE_KEY, Stack

MODEL, SLOTS, ROUTERS = "tiny-sim", 4, 3
WIDE, WIDE_STEP_S = "wide", 0.01
EMBED = "embed-sim"
SLO = {"ttft_slo_s": 60.0, "itl_slo_s": 10.0}  # kept by whatever is answered at all
CONFIG: dict[str, Any] = {
    "models": [
        {"name": MODEL, "engine": "simulated", "max_num_seqs": SLOTS, "simulated": {"decode_step_s": 0.005}},
        {
            "name": WIDE,
            "engine": "simulated",
            "max_num_seqs": 64,
            "replicas": {"min_replicas": 2, "max_replicas": 2},
            "simulated": {"decode_step_s": WIDE_STEP_S, "kv_cache_tokens": 65_536},
            "cpus_per_rank": 0.5,
        },
        {"name": EMBED, "engine": "simulated", "max_num_seqs": 8, "task": "embed", "cpus_per_rank": 0.5},
    ],
    "router": {"replicas": ROUTERS},
    "admission": {
        "max_queued": 1000,
        "min_share": 0.0,  # the minimum share lets lower classes pass on purpose
        "classes": {"normal": SLO, "critical": SLO | {"max_queued": 0}},  # who cannot run at once is refused
    },
    "auth": {
        "keys": [
            {"key": PEOPLE_KEY, "tenant": "people", "max_class": "critical", "admin": True},
            {"key": BATCH_KEY, "tenant": "batch", "max_class": "low", "default_class": "low"},
        ]
    },
}
RESTART_S = 60.0  # of a router, which takes some seconds


@contextmanager
def three(state_dir: Path) -> Iterator[Stack]:
    """The stack, once all routers are there."""
    with stacks.own(state_dir, CONFIG, "three") as started:
        all_routers(started)
        yield started


def routers(there: Stack) -> list[Stack]:
    """Each router by its own port, beside the endpoint."""
    assert there.cluster is not None
    ports = {one.port for one in there.cluster.listeners() if one.process.startswith(HTTP_PROCESSES[-1])}
    return [replace(there, base_url=f"http://127.0.0.1:{port}") for port in sorted(ports) if http_status(port) == 401]


def all_routers(there: Stack) -> list[Stack]:
    """The same once all of them are there."""
    within(RESTART_S, lambda: len(routers(there)), ROUTERS, "routers")
    return routers(there)
