"""`serve-app status` says what a replica without a place waits for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from autoscaling.operations import status
from serve_app.engine.start.engine_args import placement
from serve_app.names import APPLICATION
from serve_app.settings.settings import ModelSettings

NOW = 1_700_000_000.0


def group(name: str = "r1", **model: Any) -> dict[str, Any]:
    """Ray's entry of the placement group of a replica of this model."""
    options = placement(ModelSettings.model_validate({"name": "m"} | model), "gpu")
    bundles = dict(enumerate(options["placement_group_bundles"]))
    return {"name": name, "bundles": bundles, "strategy": options["placement_group_strategy"], "state": "PENDING"}


def node(gpus: int, cpus: int = 8, alive: bool = True, free_cpus: float = 0.0) -> dict[str, Any]:
    resources = {"CPU": float(cpus), "memory": 1e9} | ({"GPU": float(gpus)} if gpus else {})
    return {"Alive": alive, "Resources": resources, "Free": {"CPU": free_cpus}, "NodeManagerAddress": f"10.0.0.{cpus}"}


def details(
    replicas: Sequence[tuple[str, str | None]], status: str = "UPDATING", state: str = "STARTING"
) -> dict[str, Any]:
    made = [
        {"actor_name": name, "node_id": node_id, "state": state, "start_time_s": NOW - 10 * number}
        for number, (name, node_id) in enumerate(replicas, 1)
    ]
    return {"applications": {APPLICATION: {"deployments": {"engine-m": {"status": status, "replicas": made}}}}}


def reasons(seen: dict[str, Any], groups: list[dict[str, Any]]) -> dict[str, str]:
    return status.placement_waits(status.unplaced(seen), groups, [node(1)], NOW)


@pytest.mark.parametrize(
    ("model", "nodes", "reason"),
    [
        (
            {"tensor_parallel_size": 4},
            [node(0), node(2), node(2)],
            "4 GPUs and 4 CPUs on one node, and no node has that; the largest has 2 GPUs and 8 CPUs",
        ),
        (
            {"tensor_parallel_size": 4},
            [node(4), node(8, alive=False)],
            "4 GPUs and 4 CPUs on one node, which are not free: 0 of 4 GPUs and 0 of 8 CPUs on 10.0.0.8",
        ),
        (
            {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
            [node(1)],
            "2 times 2 GPUs and 2 CPUs on one node, and no node has that; the largest has 1 GPU and 8 CPUs",
        ),
        (
            {"accelerator_type": "H200"},
            [node(4)],
            "1 GPU and 1 CPU (H200) on one node, and no node has that; the largest has 4 GPUs and 8 CPUs",
        ),
        (
            {"engine": "simulated", "cpus_per_rank": 9},
            [node(4)],
            "9 CPUs on one node, and no node has that; the largest has 4 GPUs and 8 CPUs",
        ),
        ({}, [], "1 GPU and 1 CPU on one node, and no node has that; the largest has 0 GPUs"),
    ],
)
def test_what_is_needed_is_reported_with_what_there_is(
    model: dict[str, Any], nodes: list[dict[str, Any]], reason: str
) -> None:
    assert status.wait_reason(group(**model), nodes) == reason


def test_a_deployment_says_how_many_of_its_replicas_wait() -> None:
    waiting = details([("r1", None), ("r2", "node")])
    assert [replica["actor_name"] for replica in status.unplaced(waiting)["engine-m"]] == ["r1"]
    found = reasons(waiting, [group("r1"), group("r2"), group("other")])
    free = "0 of 1 GPUs and 0 of 8 CPUs on 10.0.0.8"
    assert found == {
        "engine-m": f"1 replica waits since 10 s for 1 GPU and 1 CPU on one node, which are not free: {free}"
    }
    two = details([("r1", None), ("r2", None)])
    found = reasons(two, [group("r1"), group("r2")])
    assert found["engine-m"].startswith("2 replicas wait since 20 s for 1 GPU")


def test_what_is_free_is_reported_for_the_nodes_that_have_the_most() -> None:
    nodes = [node(0, cpus=number, free_cpus=float(number % 5)) for number in (8, 10, 12, 13, 14, 4)]
    waits_for = status.wait_reason(group(engine="simulated", cpus_per_rank=5), nodes)
    best = "4 of 14 CPUs on 10.0.0.14, 3 of 8 CPUs on 10.0.0.8, 3 of 13 CPUs on 10.0.0.13"
    assert waits_for == f"5 CPUs on one node, which are not free: {best} and no more on 2 others"


def test_nobody_waits_who_has_a_node_or_failed_or_is_not_there() -> None:
    assert status.unplaced(details([("r1", "node")])) == {}
    assert status.unplaced(details([("r1", None)], state="STOPPING")) == {}
    assert status.unplaced(details([("r1", None)], status="DEPLOY_FAILED")) == {}
    other = {"another application": details([("r1", None)])["applications"][APPLICATION]}
    assert status.unplaced({"applications": other}) == {}


def test_a_replica_without_bundles_leaves_serves_own_message() -> None:
    assert reasons(details([("r1", None)]), []) == {}


def test_a_replica_that_has_its_place_and_no_process_yet_does_not_wait_for_one() -> None:
    assert reasons(details([("r1", None)]), [group("r1") | {"state": "CREATED"}]) == {}


FAILED = """The deployment failed to start 3 times in a row. Error:
ray::ServeReplica:serve_app:engine-m.initialize_and_get_metadata() (pid=7)
  File "deployment.py", line 1, in __init__
    raise start_failure(model, error) from error
{}
"""


@pytest.mark.parametrize(
    ("last", "shown"),
    [
        ("serve_app.errors.EngineFailed: m did not start: x; log: /y", "m did not start: x; log: /y"),
        ("ValueError: no", "ValueError: no"),
        ("some.package.OddFailure: no", "some.package.OddFailure: no"),
    ],
)
def test_a_failed_start_is_shown_as_the_error_at_the_end_of_its_traceback(last: str, shown: str) -> None:
    assert status.reason(FAILED.format(last)) == shown
    assert status.reason("one line: of words") == "one line: of words"
