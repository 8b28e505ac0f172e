"""What a name of `serve-app drain` stands for, and what is said of a wrong one."""

from __future__ import annotations

from typing import Any

import pytest

from autoscaling.operations.drain_target import HEAD_RESOURCE, DrainTarget, find
from serve_app.errors import BadRequest, NotFound
from serve_app.names import APPLICATION, ROUTER


def node(node_id: str, address: str, host: str, *, head: bool = False, alive: bool = True) -> dict[str, Any]:
    resources = {HEAD_RESOURCE: 1.0} if head else {}
    names = {"NodeID": node_id, "NodeManagerAddress": address, "NodeManagerHostname": host}
    return names | {"Alive": alive, "Resources": resources}


NODES = [
    node("aa11", "10.0.0.1", "head", head=True),
    node("bb22", "10.0.0.2", "gpu-2"),
    node("bb33", "10.0.0.3", "gpu-3"),
    node("cc44", "10.0.0.4", "gpu-4", alive=False),
]
DEPLOYMENTS = {"engine-m": ["x7k2m9qp", "x7pppppp", "b0000000"], ROUTER: ["r0000001"]}
DETAILS: dict[str, Any] = {
    "applications": {
        APPLICATION: {
            "deployments": {
                name: {"replicas": [{"replica_id": one} for one in replicas]} for name, replicas in DEPLOYMENTS.items()
            }
        }
    }
}


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("x7k2m9qp", DrainTarget("x7k2m9qp", is_node=False)),
        ("x7k", DrainTarget("x7k2m9qp", is_node=False)),
        ("10.0.0.2", DrainTarget("bb22", is_node=True)),
        ("gpu-3", DrainTarget("bb33", is_node=True)),
        ("bb3", DrainTarget("bb33", is_node=True)),
    ],
)
def test_a_replica_and_a_node_are_found_by_what_status_shows_of_them(name: str, target: DrainTarget) -> None:
    assert find(name, DETAILS, NODES) == target


@pytest.mark.parametrize(
    ("name", "reported"),
    [
        ("x7", "several are called so: x7k2m9qp, x7pppppp"),
        ("b", "several are called so: b0000000, bb22, bb33"),
        ("head", "the head cannot be drained"),
        ("r0000001", "only engines drain"),
    ],
)
def test_what_stands_for_several_or_cannot_drain_is_refused(name: str, reported: str) -> None:
    with pytest.raises(BadRequest, match=reported):
        find(name, DETAILS, NODES)


@pytest.mark.parametrize(
    ("name", "near"), [("x7k2m9q0", "x7k2m9qp"), ("gpu-4", "gpu-3, gpu-2"), ("10.0.0.9", "10.0.0")]
)
def test_a_name_that_nothing_has_is_refused_with_those_that_are_near(name: str, near: str) -> None:
    with pytest.raises(NotFound, match=near):
        find(name, DETAILS, NODES)


def test_a_cluster_where_nothing_can_drain_says_so() -> None:
    with pytest.raises(NotFound, match="there are none"):
        find("x", {"applications": {}}, NODES[:1])
