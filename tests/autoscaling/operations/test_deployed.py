"""What a cluster has and what is declared to it, from the answers of Serve, Ray and the quota actor."""

from __future__ import annotations

from typing import Any

from autoscaling.operations import status

NODES = [
    {"NodeID": "a", "Alive": True, "Resources": {"CPU": 4.0, "GPU": 2.0}},
    {"NodeID": "b", "Alive": True, "Resources": {"CPU": 1.0}},
    {"NodeID": "gone", "Alive": False, "Resources": {}},
]
CANARY = {
    "name": "chat",
    "targets": [{"model": "old", "weight": 90.0}, {"model": "new", "weight": 10.0}],
    "fallbacks": ["spare"],
    "shadow": {"model": "next", "share": 0.05},
}
DEVICES = {"a/0": (80, 78), "a/1": (80, 78), "gone/0": (1, 1)}


def test_living_nodes_are_reported_with_what_leases_may_have_of_their_devices() -> None:
    found = status.deployed({"applications": {}}, NODES, DEVICES)
    assert found == {
        "nodes": [
            {"resources": {"CPU": 4.0, "GPU": 2.0}, "device_bytes": [78, 78]},
            {"resources": {"CPU": 1.0}, "device_bytes": []},
        ],
        "arguments": None,
        "replicas": {},
    }


def test_the_declaration_and_the_replicas_of_the_application_are_reported() -> None:
    application = {
        "deployed_app_config": {"args": {"models": []}},
        "deployments": {"engine-a": {"replicas": [{"replica_id": "r1"}, {"replica_id": "r2"}]}},
    }
    found = status.deployed({"applications": {"serve_app": application, "other": {}}}, [], {})
    assert found["arguments"] == {"models": []}
    assert found["replicas"] == {"engine-a": ["r1", "r2"]}


def test_an_application_without_a_declaration_has_no_arguments() -> None:
    application = {"deployed_app_config": None, "deployments": {}}
    assert status.deployed({"applications": {"serve_app": application}}, [], {})["arguments"] is None


def declared_with(arguments: Any) -> dict[str, Any]:
    application = {
        "status": "RUNNING",
        "message": "",
        "deployed_app_config": {"args": arguments},
        "deployments": {},
    }
    return {"proxies": {"n": {"status": "HEALTHY"}}, "applications": {"serve_app": application}}


def test_the_names_of_the_declaration_are_in_the_status_with_all_that_they_stand_for() -> None:
    found = status.describe(declared_with({"models": [], "routes": [CANARY]}), [])
    assert (found["state"], found["routes"]) == ("running", [CANARY])


def test_a_name_that_leaves_out_its_defaults_is_in_the_status_with_them() -> None:
    (alias,) = status.declared_routes(declared_with({"routes": [{"name": "chat", "targets": [{"model": "old"}]}]}))
    assert alias == {
        "name": "chat",
        "targets": [{"model": "old", "weight": 1.0}],
        "fallbacks": [],
        "shadow": None,
    }


def test_names_that_cannot_be_read_are_left_out_of_the_status() -> None:
    unreadable = ["chat", {"name": "chat"}, {"name": "chat", "targets": "old"}, {"targets": [{"model": "old"}]}]
    assert status.declared_routes(declared_with({"routes": [*unreadable, CANARY]})) == [CANARY]
    for arguments in (None, "routes", {"routes": None}, {}):
        assert status.declared_routes(declared_with(arguments)) == []
    assert status.declared_routes({"applications": {}}) == []
