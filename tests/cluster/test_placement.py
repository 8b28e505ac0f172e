"""Placement across nodes: tensor-parallel groups are never split, pipelines span nodes, a lost node's replicas move.

Real Ray and Serve on several nodes of one machine (`ray.cluster_utils.Cluster`), with GPUs that are only counted, and
the simulated engine. Each test begins with the head alone, which has no GPU and carries the router and the endpoint.
"""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from serve_app.names import deployment_of
from tests.cluster.placement_lab import Lab
from tests.requires import requires
from tests.waiting import patient, slowness

requires("linux")

pytestmark = pytest.mark.long  # four nodes' starts; tests/core and tests/quota have each decision

STREAMS = 6  # as many as two replicas have slots for
STREAM_TOKENS = 600  # 3 s at the simulated engine's pace: all begin meanwhile, on a quiet machine
STREAM_S = 60.0  # for those 3 s
STARTED_S = 20.0  # for all streams to show their first token
NOTICED_S = 30.0  # a silent node is found dead in about 5 s here, and its replicas with it


def model(name: str, tensor: int, pipeline: int = 1, replicas: int = 1) -> dict[str, Any]:
    return {
        "name": name,
        "engine": "simulated",
        "tensor_parallel_size": tensor,
        "pipeline_parallel_size": pipeline,
        "gpus_per_rank": 1,
        "replicas": {"min_replicas": replicas, "max_replicas": replicas},
        "simulated": {"decode_step_s": 0.005},
    }


def test_two_groups_of_four_take_a_node_of_four_each_and_each_rank_a_device_of_its_own(nodes: Lab) -> None:
    nodes.add("a", 4)
    nodes.add("b", 4)
    nodes.deploy([model("tp4", 4, replicas=2)])
    assert nodes.placed("tp4", 2) == [["a"] * 4, ["b"] * 4]
    assert nodes.ask("free_gpus") == 0
    assert nodes.complete("tp4").status_code == 200
    grants = sorted(sorted(one) for one in nodes.grants("tp4"))
    assert grants == [[f"{name}/{index}" for index in range(4)] for name in "ab"]


def test_two_groups_of_four_share_a_node_of_eight(nodes: Lab) -> None:
    nodes.add("a", 8)
    nodes.deploy([model("tp4", 4, replicas=2)])
    assert nodes.placed("tp4", 2) == [["a"] * 4] * 2
    assert nodes.complete("tp4").status_code == 200


def test_shares_of_a_gpu_are_on_the_devices_that_the_ledger_chose(nodes: Lab) -> None:
    """Ray packs two quarters onto one GPU; the ledger knows that their bytes do not fit there together."""
    nodes.add("a", 2)
    nodes.deploy([model("part", 1, replicas=2) | {"gpus_per_rank": 0.25, "memory_gb": 50, "cpus_per_rank": 0.5}])
    nodes.until(lambda: nodes.states("part") == ["RUNNING"] * 2, "two quarters", lambda: nodes.status("part"))
    grants = nodes.grants("part")
    assert sorted(device for one in grants for device in one) == ["a/0", "a/1"]
    assert {size for one in grants for size in one.values()} == {50 * 10**9}


def test_a_group_that_fits_on_no_node_waits_says_why_and_takes_its_place_when_there_is_one(nodes: Lab) -> None:
    nodes.add("a", 3)
    nodes.add("b", 3)
    nodes.deploy([model("tp4", 4)])
    reported = nodes.until(lambda: nodes.status("tp4")["message"], "a reason")
    assert reported.startswith("1 replica waits since ")
    assert reported.endswith(
        "for 4 GPUs and 4 CPUs on one node, and no node has that; the largest has 3 GPUs and 3 CPUs"
    )
    (group,) = nodes.groups("tp4")
    assert (group["state"], group["nodes"]) == ("PENDING", [""] * 4)
    assert nodes.ask("demand") == [
        {"strategy": "STRICT_PACK", "bundles": [{"bundle": {"CPU": 1.0, "GPU": 1.0}, "count": 4}]}
    ]
    assert nodes.ask("free_gpus") == 6
    nodes.add("c", 4)
    assert nodes.placed("tp4", 1) == [["c"] * 4]
    assert nodes.status("tp4")["message"] == ""
    assert nodes.complete("tp4").status_code == 200


def test_a_pipeline_spans_two_nodes_a_stage_on_each(nodes: Lab) -> None:
    nodes.add("a", 2)
    nodes.add("b", 2)
    nodes.deploy([model("pp", 2, pipeline=2)])
    ((first, second),) = nodes.placed("pp", 1)
    assert {first, second} == {"a", "b"}
    assert nodes.ask("free_gpus") == 0
    assert nodes.complete("pp").status_code == 200


def test_stages_are_not_split_where_all_ranks_would_fit_but_one_stage_does_not(nodes: Lab) -> None:
    # bundles of one rank would be packed 3 + 3 + 2, with two of the groups split
    for name, gpus in (("a", 3), ("b", 3), ("c", 3)):
        nodes.add(name, gpus)
    nodes.deploy([model("pp", 2, pipeline=2, replicas=2)])
    nodes.until(lambda: nodes.states("pp") == ["RUNNING", "STARTING"], "one of the two", lambda: nodes.groups("pp"))
    reported = nodes.until(lambda: nodes.status("pp")["message"], "a reason")
    assert "for 2 times 2 GPUs and 2 CPUs on one node, which are not free: 3 of 3 GPUs and " in reported
    placed, waiting = sorted(nodes.groups("pp"), key=lambda group: group["state"])
    assert placed["state"] == "CREATED"
    assert len(set(placed["nodes"])) == 2
    assert (waiting["state"], waiting["nodes"]) == ("PENDING", ["", ""])
    assert waiting["bundles"] == [{"CPU": 2.0, "GPU": 2.0}] * 2
    assert nodes.ask("free_gpus") == 5


def test_replicas_of_a_lost_node_are_placed_anew_and_requests_do_not_fail_meanwhile(nodes: Lab) -> None:
    nodes.add("a", 4)
    nodes.add("b", 4)
    nodes.deploy([model("tp4", 4, replicas=2)])
    assert nodes.placed("tp4", 2) == [["a"] * 4, ["b"] * 4]
    with Traffic(nodes, "tp4") as traffic:
        nodes.kill("b")
        nodes.until(lambda: "b" not in nodes.ask("alive"), "the death of b noticed", within_s=NOTICED_S)
        nodes.add("spare", 4)
        assert nodes.placed("tp4", 2) == [["a"] * 4, ["spare"] * 4]
    print(f"{sum(traffic.seen.values())} requests while a node was lost and replaced: {dict(traffic.seen)}")
    assert set(traffic.seen) == {200}
    assert nodes.ask("free_gpus") == 0


def test_a_model_whose_only_node_is_lost_keeps_its_requests_until_there_is_another(nodes: Lab) -> None:
    nodes.add("a", 4)
    nodes.deploy([model("tp4", 4)])
    nodes.placed("tp4", 1)
    with Traffic(nodes, "tp4") as traffic:
        nodes.kill("a")
        nodes.until(lambda: nodes.status("tp4")["message"], "a reason", within_s=NOTICED_S)
        nodes.add("spare", 4)
        assert nodes.placed("tp4", 1) == [["spare"] * 4]
        nodes.until(lambda: traffic.answered_anew(), "an answer of the new replica")
    assert set(traffic.seen) == {200}


def test_a_pipeline_that_lost_a_stage_is_placed_anew_as_a_whole(nodes: Lab) -> None:
    nodes.add("a", 2)
    nodes.add("b", 2)
    nodes.deploy([model("pp", 2, pipeline=2)])
    ((first, second),) = nodes.placed("pp", 1)
    before = nodes.ask("pids", deployment=deployment_of("pp"))
    nodes.kill(second)  # not the node of the replica: its process lives, with half an engine
    nodes.until(lambda: second not in nodes.ask("alive"), "the death of the node noticed", within_s=NOTICED_S)
    nodes.add("spare", 2)

    def moved() -> bool:
        (nodes_now,) = nodes.placed("pp", 1)
        return nodes.ask("pids", deployment=deployment_of("pp")) != before and set(nodes_now) == {first, "spare"}

    nodes.until(moved, "another replica", lambda: (nodes.status("pp"), nodes.groups("pp")))
    assert nodes.ask("free_gpus") == 0
    assert nodes.complete("pp").status_code == 200


def test_a_killed_replica_leaves_no_group_behind_and_its_gpus_go_to_the_next(nodes: Lab) -> None:
    nodes.add("a", 4)
    nodes.deploy([model("pp", 2, pipeline=2)])
    nodes.placed("pp", 1)
    (before,) = nodes.groups("pp")
    (pid,) = nodes.ask("pids", deployment=deployment_of("pp"))
    os.kill(pid, signal.SIGKILL)

    def replaced() -> bool:
        return nodes.placed("pp", 1) == [["a", "a"]] and nodes.groups("pp")[0]["of"] != before["of"]

    nodes.until(replaced, "another replica with a group of its own")
    assert nodes.complete("pp").status_code == 200
    nodes.deploy([])
    nodes.until(lambda: nodes.ask("free_gpus") == 4 and not nodes.ask("groups"), "all of it given back")


def test_a_group_that_an_operators_own_strategy_splits_is_refused_with_the_reason(nodes: Lab) -> None:
    nodes.add("a", 3)
    nodes.add("b", 3)
    nodes.declare([model("tp4", 4)], {"name": deployment_of("tp4"), "placement_group_strategy": "PACK"})
    nodes.until(lambda: nodes.status("tp4")["state"] == "deploy_failed", "refused", lambda: nodes.status("tp4"))
    assert (
        "tp4 is split over 2 nodes: its placement_group_strategy has to be STRICT_PACK"
        in nodes.status("tp4")["message"]
    )
    nodes.until(lambda: not nodes.groups("tp4"), "its bundles given back")


def test_streams_on_a_lost_node_end_with_an_error_and_all_others_as_they_should(nodes: Lab) -> None:
    nodes.add("a", 4)
    nodes.add("b", 4)
    nodes.deploy([model("tp4", 4, replicas=2) | {"max_num_seqs": STREAMS // 2}])
    nodes.placed("tp4", 2)
    with ThreadPoolExecutor(STREAMS) as clients:
        started = threading.Barrier(STREAMS + 1)
        streams = [clients.submit(_stream, nodes, started) for _ in range(STREAMS)]
        started.wait(patient(STARTED_S))
        nodes.kill("b")
        ends = Counter(stream.result(patient(STREAM_S)) for stream in streams)
    assert ends == {"done": STREAMS // 2, "error": STREAMS // 2}


def test_a_drained_nodes_streams_end_as_they_should_and_its_replica_moves(nodes: Lab) -> None:
    nodes.add("a", 4)
    nodes.add("b", 4)
    nodes.deploy([model("tp4", 4, replicas=2) | {"max_num_seqs": STREAMS // 2}])
    nodes.placed("tp4", 2)
    nodes.add("spare", 4)
    with ThreadPoolExecutor(STREAMS) as clients:
        started = threading.Barrier(STREAMS + 1)
        streams = [clients.submit(_stream, nodes, started) for _ in range(STREAMS)]
        started.wait(patient(STARTED_S))
        nodes.ask("drain", name="b")
        assert Counter(stream.result(patient(STREAM_S)) for stream in streams) == {"done": STREAMS}
    assert nodes.placed("tp4", 2) == [["a"] * 4, ["spare"] * 4]


def _stream(nodes: Lab, started: threading.Barrier) -> str:
    """How a stream of a few seconds ends; all of them are under way when the barrier falls."""
    events: list[str] = []
    with nodes.complete("tp4", tokens=int(STREAM_TOKENS * slowness()), stream=True) as answer:
        for line in filter(None, answer.iter_lines(decode_unicode=True)):
            if not events:
                started.wait(patient(STARTED_S))
            events.append(line)
    if events[-1] != "data: [DONE]":
        return f"cut after {events[-1]}"
    return "error" if '"error"' in events[-2] else "done"


class Traffic:
    """Requests one after the other from two clients, for as long as the block runs; `seen` counts their statuses."""

    def __init__(self, nodes: Lab, model: str) -> None:
        self.seen: Counter[int] = Counter()
        self._nodes = nodes
        self._model = model
        self._over = threading.Event()
        self._clients = [threading.Thread(target=self._ask) for _ in range(2)]

    def answered_anew(self) -> bool:
        """Whether a request that begins now is answered."""
        return self._nodes.complete(self._model).status_code == 200

    def _ask(self) -> None:
        while not self._over.is_set():
            self.seen[self._nodes.complete(self._model).status_code] += 1
            self._over.wait(0.02)  # so that two clients do not fill a machine that has other work to do

    def __enter__(self) -> Traffic:
        for client in self._clients:
            client.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        for client in self._clients:
            client.join()
