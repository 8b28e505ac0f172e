"""What the local node is given, and what is told of the application on it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from ray.dashboard.modules.reporter import reporter_consts

from autoscaling.operations.status import describe, longest_drain_s, reason, replicas_on
from serve_app.cluster.local import node
from serve_app.cluster.local.ports import reserved_block
from serve_app.names import APPLICATION
from tests.requires import requires

requires("linux")


def details(status: str, engine: str, proxy: str = "HEALTHY", message: str = "") -> dict[str, Any]:
    deployment = {"message": message, "target_num_replicas": 2, "replicas": [{"replica_id": "r1", "state": "STARTING"}]}
    return {
        "proxies": {"n": {"status": proxy}},
        "applications": {
            APPLICATION: {
                "status": status,
                "message": "",
                "deployments": {
                    "engine-a--b": deployment | {"name": "engine-a--b", "status": engine},
                    "Router": deployment | {"name": "Router", "status": "HEALTHY", "message": ""},
                },
            }
        },
    }


def test_the_state_of_an_application_is_reported_in_our_words() -> None:
    seen = describe(details("RUNNING", "HEALTHY"), ["a--b"])
    assert seen["state"] == "running"
    replica = {"id": "r1", "state": "STARTING", "node": "", "address": ""}
    assert seen["models"] == [
        {
            "name": "a--b",  # as configured, where the deployment's name could spell a/b too
            "deployment": "engine-a--b",
            "state": "healthy",
            "message": "",
            "cause": "",
            "replicas": [replica],
            "target": 2,
            "ongoing": None,
            "waiting": None,
            "why": "a fixed number",
            "advised": None,
            "advice": "",
            "signals": "",
        }
    ]
    assert seen["routers"] == [replica]
    advised = {"policy": "ongoing", "reason": "5 wanted", "advised": 4, "advice": "4 are enough"}
    (shown,) = describe(details("RUNNING", "HEALTHY"), ["a--b"], {}, {"engine-a--b": advised})["models"]
    assert (shown["advised"], shown["advice"], shown["why"]) == (4, "4 are enough", "a fixed number")
    (decided,) = describe(
        details("RUNNING", "HEALTHY"), ["a--b"], {}, {"engine-a--b": {"policy": "slo", "reason": "3 wanted"}}
    )["models"]
    assert decided["why"] == "3 wanted", "the policy has seen more than the present numbers"
    assert describe(details("RUNNING", "HEALTHY"), [])["models"][0]["name"] == "a/b"
    assert describe(details("RUNNING", "HEALTHY", proxy="STARTING"), [])["state"] == "starting"
    assert describe(details("DEPLOYING", "UPDATING"), [])["state"] == "starting"
    assert describe({"applications": {}, "proxies": {}}, [])["state"] == "absent"


def test_a_failure_is_reported_without_its_traceback() -> None:
    trace = "Failed to start.\nTraceback (most recent call last):\n  File x\nValueError: the weights are missing\n"
    seen = describe(details("DEPLOY_FAILED", "DEPLOY_FAILED", message=trace), ["a/b"])
    assert seen["state"] == "failed"
    assert seen["message"] == "engine-a--b: ValueError: the weights are missing"
    assert reason("Waiting for 1 CPU.") == "Waiting for 1 CPU."
    assert reason("") == ""


def test_a_users_own_ray_settings_do_not_reach_our_node() -> None:
    given = {
        "RAY_ADDRESS": "1.2.3.4:6379",
        "RAY_AUTH_TOKEN": "theirs",
        "RAY_SERVE_X": "x",
        "PATH": "/bin",
        "HOME": "/h",
    }
    assert node.usable_environment(given) == {"PATH": "/bin", "HOME": "/h"}


def test_a_driver_gets_no_setting_that_breaks_synchronous_calls() -> None:
    environment = node.driver_environment("127.0.0.1:1", "t", "m")
    assert not [name for name in environment if name.startswith("RAY_SERVE_")]
    assert environment["RAY_AUTH_TOKEN"] == "t"


def test_a_nodes_replicas_are_found_and_the_longest_drain_of_its_models() -> None:
    def deployment(name: str, drain_s: float, *nodes: str) -> dict[str, Any]:
        replicas = [{"node_id": node} for node in nodes]
        return {"name": name, "replicas": replicas, "deployment_config": {"graceful_shutdown_timeout_s": drain_s}}

    deployments = [
        deployment("Router", 3600.0, "a", "b"),
        deployment("engine-m", 600.0, "a", "a", "c"),
        deployment("engine-n", 900.0, "c"),
    ]
    found = {"applications": {"serve_app": {"deployments": {one["name"]: one for one in deployments}}}}
    assert replicas_on(found, "a") == ["Router", "engine-m", "engine-m"]
    assert [longest_drain_s(found, node) for node in "abcd"] == [600.0, 0.0, 900.0, 0.0]


@pytest.mark.parametrize("dashboard", [True, False])
def test_what_ray_gathers_for_its_dashboard_alone_it_gathers_only_with_the_dashboard(
    dashboard: bool, tmp_path: Path
) -> None:
    with reserved_block("127.0.0.1") as block:
        given = node.node_environment("m", "t", tmp_path, block, dashboard=dashboard)
    assert ("RAY_task_events_report_interval_ms" in given) is not dashboard
    assert ("REPORTER_UPDATE_INTERVAL_MS" in given) is not dashboard
    assert int(os.environ.get("REPORTER_UPDATE_INTERVAL_MS", "5000")) == reporter_consts.REPORTER_UPDATE_INTERVAL_MS
