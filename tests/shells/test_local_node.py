"""What the local node is given, and what is told of the application on it."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from serve_app.local import node, ports
from serve_app.local.view import describe, reason
from serve_app.names import APPLICATION
from tests.requires import requires

requires("linux")

WRAPPED = """frontend prometheus
    bind :{metrics}
    mode http
frontend http_frontend
    bind 127.0.0.1:8000
listen stats
  bind *:{stats}
  stats enable
"""


@pytest.fixture
def wrapper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The HAProxy wrapper around a program that prints its arguments."""
    binary = tmp_path / "a haproxy"
    binary.write_text('#!/bin/sh\necho "$0 $$ $@"\n')
    binary.chmod(0o700)
    monkeypatch.setattr(node, "haproxy_binary", lambda: binary)
    return node.write_haproxy_wrapper(tmp_path, ports.PortBlock(20_000))


def test_haproxy_opens_no_statistics_to_the_network(wrapper: Path, tmp_path: Path) -> None:
    block = ports.PortBlock(20_000)
    config = tmp_path / "haproxy.cfg"
    config.write_text(WRAPPED.format(metrics=block.haproxy_metrics, stats=block.haproxy_stats))
    process = subprocess.Popen([wrapper, "-db", "-f", str(config), "-sf", "1 2"], stdout=subprocess.PIPE, text=True)
    output = process.communicate()[0]
    # HAProxy itself runs under the process id Serve knows, with Serve's arguments
    assert output.split() == [
        *str(tmp_path / "a haproxy").split(),
        str(process.pid),
        "-db",
        "-f",
        str(config),
        "-sf",
        "1",
        "2",
    ]
    binds = [line.strip() for line in config.read_text().splitlines() if "bind" in line]
    assert binds == [
        f"bind unix@{tmp_path}/m.sock mode 600",
        "bind 127.0.0.1:8000",
        f"bind unix@{tmp_path}/s.sock mode 600",
    ]


def test_haproxy_does_not_run_with_statistics_it_could_not_close(wrapper: Path, tmp_path: Path) -> None:
    config = tmp_path / "haproxy.cfg"
    config.write_text(f"listen stats\n  bind *:{ports.PortBlock(20_000).haproxy_stats} ssl\n")
    done = subprocess.run([wrapper, "-f", str(config)], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "open to all" in done.stderr


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


def test_the_state_of_an_application_is_told_in_our_words() -> None:
    seen = describe(details("RUNNING", "HEALTHY"), ["a--b"])
    assert seen["state"] == "running"
    replica = {"id": "r1", "state": "STARTING", "node": ""}
    assert seen["models"] == [
        {
            "name": "a--b",  # as configured, where the deployment's name could spell a/b too
            "deployment": "engine-a--b",
            "state": "healthy",
            "message": "",
            "replicas": [replica],
            "target": 2,
        }
    ]
    assert seen["routers"] == [replica]
    assert describe(details("RUNNING", "HEALTHY"), [])["models"][0]["name"] == "a/b"
    assert describe(details("RUNNING", "HEALTHY", proxy="STARTING"), [])["state"] == "starting"
    assert describe(details("DEPLOYING", "UPDATING"), [])["state"] == "starting"
    assert describe({"applications": {}, "proxies": {}}, [])["state"] == "absent"


def test_a_failure_is_told_without_its_traceback() -> None:
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
