"""One stack of three routers for the modules that look at one line, at replicas that follow the requests, or at a lost
process, from several of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.common.processes import titled
from serve_app.system import listening_ports
from tests.e2e import stack as stacks
from tests.e2e.observe import http_status
from tests.e2e.stack import BATCH_KEY, PEOPLE_KEY, Stack
from tests.waiting import slowness, wait_until

MODEL = "tiny-sim"
SLOTS = 4
ROUTERS = 3
WIDE = "wide"
WIDE_SLOTS = 64
WIDE_REPLICAS = 2
WIDE_STEP_S = 0.01
WIDE_KV_TOKENS = 262_144  # for endless requests in every slot: 40 s of the engine
EMBED = "embed-sim"
# whose replicas follow the requests, from none
QUICK = "org/quick"
SLOW = "slow"
HOLD_S = 20.0  # that a request is held while no replica runs: above what starting processes takes
SLOW_START_S = 26.0  # of an engine: longer than its requests are held
SLOW_IDLE_S = 4.0  # how long it is kept without requests; less than its start lacks when they are refused
LOOK_BACK_S = 1.5
INTERVAL_S = 0.5
SCALE = {
    "min_replicas": 0,
    "max_replicas": 3,
    "target_ongoing_requests": 4,
    "upscale_delay_s": 0.5,
    "downscale_delay_s": 1.0,
    "look_back_s": LOOK_BACK_S,
    "metrics_interval_s": INTERVAL_S,
}


def scaled(name: str, start_s: float, **replicas: Any) -> dict[str, Any]:
    rates = {"decode_step_s": 0.01, "start_s": start_s}
    engine = {"engine": "simulated", "max_num_seqs": 8, "simulated": rates, "cpus_per_rank": 0.5}
    return {"name": name, "replicas": SCALE | replicas, **engine}


SLO = {"ttft_slo_s": 60.0, "itl_slo_s": 10.0}  # kept by whatever is answered at all


def configured(tokens: dict[str, Any] | None = None) -> dict[str, Any]:
    """The configuration. How long a request is held and how long the slow model starts depend on the machine.

    Args:
        tokens: `auth.jwt`.
    """
    slow = slowness()
    return {
        "models": [
            {"name": MODEL, "engine": "simulated", "max_num_seqs": SLOTS, "simulated": {"decode_step_s": 0.005}},
            {
                "name": WIDE,
                "engine": "simulated",
                "max_num_seqs": WIDE_SLOTS,
                "replicas": {"min_replicas": WIDE_REPLICAS, "max_replicas": WIDE_REPLICAS},
                "simulated": {"decode_step_s": WIDE_STEP_S, "kv_cache_tokens": WIDE_KV_TOKENS},
                "cpus_per_rank": 0.5,
            },
            {"name": EMBED, "engine": "simulated", "max_num_seqs": 8, "task": "embed", "cpus_per_rank": 0.5},
            scaled(QUICK, 0.5, advise="slo"),
            scaled(SLOW, SLOW_START_S * slow, downscale_to_zero_delay_s=SLOW_IDLE_S),
        ],
        "router": {"replicas": ROUTERS},
        "scaling": {"record_decisions": True},
        "admission": {
            "max_queued": 1000,
            "no_replica_wait_s": HOLD_S * slow,
            "min_share": 0.0,  # the minimum share lets lower classes pass on purpose
            "classes": {"normal": SLO, "critical": SLO | {"max_queued": 0}},  # who cannot run at once is refused
        },
        "auth": {
            "keys": [
                {"key": PEOPLE_KEY, "tenant": "people", "max_class": "critical", "admin": True},
                {"key": BATCH_KEY, "tenant": "batch", "max_class": "low", "default_class": "low"},
            ],
            "jwt": tokens,
        },
    }


ROUTER = "ray::ServeReplica:serve_app:Router"  # how the titles of the routers' processes begin
RESTART_S = 60.0  # of a router, which takes some seconds


@contextmanager
def three(state_dir: Path, tokens: dict[str, Any]) -> Iterator[Stack]:
    """The stack, once all routers are there."""
    with stacks.own(state_dir, configured(tokens), "three") as started:
        all_routers(started)
        yield started


def processes(target: Stack, title: str) -> list[int]:
    """Of the stack, those whose titles begin so."""
    assert target.cluster is not None
    return titled(target.cluster.pids(), title)


def routers(target: Stack) -> list[Stack]:
    """Each router by its own port, beside the endpoint."""
    ports = {one.port for one in listening_ports(processes(target, ROUTER))}
    return [replace(target, base_url=f"http://127.0.0.1:{port}") for port in sorted(ports) if http_status(port) == 401]


def process(target: Stack, router: Stack) -> int:
    """The process of the router with this address."""
    port = int(router.base_url.rpartition(":")[2])
    (pid,) = {one.pid for one in listening_ports(processes(target, ROUTER)) if one.port == port}
    return pid


def all_routers(target: Stack) -> list[Stack]:
    """The same once all of them are there."""
    wait_until(lambda: len(routers(target)), RESTART_S, "routers", wanted=ROUTERS)
    return routers(target)
