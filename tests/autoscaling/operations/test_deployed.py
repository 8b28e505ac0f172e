"""What a cluster has and what is declared to it, from the answers of Serve, Ray and the quota actor."""

from __future__ import annotations

from autoscaling.operations import status

NODES = [
    {"NodeID": "a", "Alive": True, "Resources": {"CPU": 4.0, "GPU": 2.0}},
    {"NodeID": "b", "Alive": True, "Resources": {"CPU": 1.0}},
    {"NodeID": "gone", "Alive": False, "Resources": {}},
]
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
