"""Engines that share GPUs start on the node and device that the ledger has chosen, whatever Ray would have.

Real Ray and Serve on several nodes of one machine, GPUs that are only counted, the simulated engine; our policy in
Serve's controller, as `serve-app up` puts it there.
"""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from typing import Any

import pytest

from autoscaling.placement_hook import NODE_LABEL
from serve_app.names import deployment_of
from tests.cluster.placement_lab import Lab
from tests.requires import requires

requires("linux")

BUNDLE = {"CPU": 0.1, "GPU": 0.1}
# of a device's 78 GB: none of these fit on one together
FULL_GB = 70
PART_GB = 45
SCALED = {
    "min_replicas": 1,
    "max_replicas": 4,
    "target_ongoing_requests": 1,
    "upscale_delay_s": 0.5,
    "look_back_s": 2.0,
}
CLIENTS = 6  # of a model that is to have one request a replica


def share(name: str, memory_gb: float, **more: Any) -> dict[str, Any]:
    return {
        "name": name,
        "engine": "simulated",
        "memory_gb": memory_gb,
        "gpus_per_rank": BUNDLE["GPU"],
        "cpus_per_rank": BUNDLE["CPU"],
        "simulated": {"decode_step_s": 0.005},
        **more,
    }


def wait_running(nodes: Lab, name: str, replicas: int = 1) -> None:
    running = ["RUNNING"] * replicas
    nodes.until(lambda: nodes.states(name) == running, f"{name} runs", lambda: (nodes.status(name), nodes.ask("quota")))


def places(nodes: Lab, name: str) -> list[str]:
    return sorted(device for grant in nodes.grants(name) for device in grant)


class Load:
    """Requests to a model for as long as the block runs."""

    def __init__(self, nodes: Lab, model: str) -> None:
        self.seen: Counter[int] = Counter()
        self._nodes = nodes
        self._model = model
        self._over = threading.Event()
        self._clients = [threading.Thread(target=self._ask, daemon=True) for _ in range(CLIENTS)]

    def _ask(self) -> None:
        while not self._over.wait(0.02):  # pace: two cores have other work to do
            self.seen[self._nodes.complete(self._model, tokens=100).status_code] += 1

    def __enter__(self) -> Load:
        for client in self._clients:
            client.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        for client in self._clients:
            client.join()


@pytest.mark.long
def test_shares_start_where_the_ledger_has_room_and_no_more_of_them_than_it_has_room_for(nodes: Lab) -> None:
    nodes.add("a", 1, 8)
    full = share("full", FULL_GB)
    nodes.declare_ours([full, share("bare", 1, gpus_per_rank=0, cpus_per_rank=0)])  # no bundles to tie to a node
    wait_running(nodes, "full")
    wait_running(nodes, "bare")
    nodes.add("b", 2, 1)
    nodes.until(lambda: "b" in {one["device"][0] for one in nodes.ask("quota")["devices"]}, "b in the ledger")
    assert nodes.ask("would_place", bundle=BUNDLE) == "a"

    nodes.declare_ours([full, share("part", PART_GB, replicas=SCALED)])
    kept = nodes.until(lambda: nodes.ask("quota")["kept"], "a place is kept", lambda: nodes.status("part"))
    wait_running(nodes, "part")
    assert places(nodes, "part") == [kept[0]["device"]]
    assert kept[0]["device"].startswith("b/")

    with Load(nodes, "part") as load:
        wait_running(nodes, "part", 2)
        assert places(nodes, "part") == ["b/0", "b/1"]
        why = nodes.until(lambda: _short(nodes), "what is missing", lambda: nodes.status("part"))
        assert nodes.status("part")["target"] == 2
    assert why.endswith("memory: at least 45.00 GB needed on one device, 33.00 GB free")
    assert nodes.ask("quota")["waiting"] == []
    assert set(load.seen) == {200}


@pytest.mark.long
def test_a_drained_engine_restarts_where_that_was_planned(nodes: Lab) -> None:
    nodes.add("d", 1, 1)
    stays, filler, moves, big = (share(*one) for one in (("stays", 40), ("filler", 25), ("moves", 20), ("big", 60)))
    nodes.declare_ours([stays, filler])
    wait_running(nodes, "filler")
    nodes.add("c", 1, 8)
    nodes.until(lambda: "c/0" in {one["device"] for one in nodes.ask("quota")["devices"]}, "c in the ledger")
    nodes.declare_ours([stays, filler, moves])
    wait_running(nodes, "moves")
    assert places(nodes, "moves") == ["c/0"]

    nodes.declare_ours([stays, moves, big])
    (waits,) = nodes.until(lambda: nodes.ask("quota")["waiting"], "the big one waits", lambda: nodes.ask("quota"))
    assert waits["model"] == "big"
    assert nodes.ask("would_place", bundle=BUNDLE) == "c"
    plan = nodes.ask("defrag")
    assert [step["model"] for step in plan["steps"]] == ["moves"]
    wait_running(nodes, "big")
    wait_running(nodes, "moves")
    assert (places(nodes, "big"), places(nodes, "moves")) == (["c/0"], ["d/0"])


@pytest.mark.long
def test_a_controller_that_has_come_back_goes_on_by_the_ledger(nodes: Lab) -> None:
    nodes.add("b", 2, 1)
    nodes.declare_ours([share("part", PART_GB, replicas=SCALED)])
    wait_running(nodes, "part")
    pid = nodes.ask("controller_pid")
    os.kill(pid, signal.SIGKILL)
    nodes.until(lambda: nodes.ask("controller_pid") != pid, "another controller")
    wait_running(nodes, "part")
    with Load(nodes, "part") as load:
        wait_running(nodes, "part", 2)
        nodes.until(lambda: _short(nodes), "what is missing", lambda: nodes.status("part"))
        assert nodes.status("part")["target"] == 2
    assert places(nodes, "part") == ["b/0", "b/1"]
    assert set(load.seen) == {200}


@pytest.mark.long
def test_where_ray_has_no_room_the_pending_bundle_asks_the_cluster_autoscaler_for_a_node(nodes: Lab) -> None:
    nodes.add("a", 1, 1)
    nodes.declare_ours([share("most", PART_GB, gpus_per_rank=0.9, replicas=SCALED | {"max_replicas": 2})])
    wait_running(nodes, "most")
    with Load(nodes, "most"):
        wanted = nodes.until(lambda: nodes.ask("demand"), "a bundle that is pending", lambda: nodes.status("most"))
        assert [bundle["bundle"] for bundle in wanted[0]["bundles"]] == [{"CPU": 0.1, "GPU": 0.9}]
        nodes.add("b", 1, 1)
        wait_running(nodes, "most", 2)
    assert places(nodes, "most") == ["a/0", "b/0"]


@pytest.mark.long
def test_a_start_that_is_tied_to_a_node_that_is_gone_is_given_up_and_another_is_made(nodes: Lab) -> None:
    nodes.add("a", 1, 1)
    gone = {"placement_group_bundles": [BUNDLE], "placement_group_bundle_label_selector": [{NODE_LABEL: "0" * 56}]}
    strategy = {"name": deployment_of("tied"), "placement_group_strategy": "STRICT_PACK"}
    nodes.declare([share("tied", PART_GB, drain_s=1)], strategy | gone)  # no node: it never answers Serve's goodbye
    first = nodes.until(lambda: nodes.status("tied")["replicas"], "a replica")[0]["id"]
    nodes.until(lambda: nodes.groups("tied"), "its bundle")
    nodes.ask("give_up_bundles", replica=first)
    nodes.until(lambda: first not in {one["id"] for one in nodes.status("tied")["replicas"]}, "another replica")


def _short(nodes: Lab) -> str | None:
    why: str = nodes.status("part")["why"]
    return why if "memory:" in why else None
