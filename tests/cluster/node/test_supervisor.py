"""A machine's node under its keeper: started, ended, crashed, started again. Real processes, no Ray."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from benchmarks.common.arms import free_port
from serve_app.cluster.node import commands
from serve_app.cluster.node.node_record import NodeFolder, NodeRecord
from serve_app.errors import ConfigError, Unavailable
from serve_app.system import environment, haproxy, marked, start_ticks
from tests.fakes import ray_start
from tests.requires import requires
from tests.waiting import patient, wait_until

requires("linux")

STATE_S = 30.0  # a keeper starts Python twice
HEAD = ["ray", "start", "--head", "--node-ip-address=127.0.0.1"]
WORKER = ["ray", "start", "--address=127.0.0.1:6379", "--node-ip-address", "127.0.0.1"]


class Machine:
    """This machine, with a state folder, a run folder and a Ray of the test's own."""

    def __init__(self, folder: Path) -> None:
        self.starts = folder / "starts"
        self.folder = NodeFolder()

    @property
    def node(self) -> NodeRecord:
        node = self.folder.node()
        assert node is not None
        return node

    def pid(self, program: str) -> int:
        (found,) = (pid for pid in marked(self.node.mark) if program in arguments(pid))
        return found

    def wait(self, goal: str, fulfilled: Callable[[], bool]) -> None:
        """Bounded by STATE_S: processes start and end within a second or two of their cause."""
        wait_until(fulfilled, STATE_S, goal, seen=self.folder.log.read_text)


def is_supervised(node: NodeRecord) -> bool:
    """Whether its supervisor lives."""
    return node.keeper_ticks is not None and start_ticks(node.keeper_pid) == node.keeper_ticks


def arguments(pid: int) -> list[str]:
    try:
        return psutil.Process(pid).cmdline()
    except psutil.NoSuchProcess:
        return []


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    ray_start.install(tmp_path / "fake")
    token = tmp_path / "token"
    token.write_text("t" * 64)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'fake'}:{Path(commands.__file__).parents[3]}")
    monkeypatch.setenv("SERVE_APP_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
    monkeypatch.setenv("FAKE_RAY_LOG", str(tmp_path / "starts"))
    monkeypatch.setattr(environment, "RUN_DIR", tmp_path / "run")
    machine = Machine(tmp_path)
    yield machine
    with machine.folder.locked():
        commands.end(machine.folder)


def test_a_started_node_is_kept_and_its_end_leaves_nothing(machine: Machine) -> None:
    commands.start(WORKER)
    node = machine.node
    assert node.state == "up"
    assert is_supervised(node)
    assert {program for pid in marked(node.mark) for program in ("raylet", "agent") if program in arguments(pid)} == {
        "raylet",
        "agent",
    }
    assert commands.stop() == 0
    assert marked(node.mark) == []
    assert machine.folder.node() is None
    assert not environment.RUN_DIR.exists()


def test_the_token_is_for_its_owner_alone_and_in_no_ones_environment(machine: Machine) -> None:
    token = commands.token_file()
    token.chmod(0o644)  # as Ray's own generator leaves it
    commands.start(WORKER)
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    given = psutil.Process(machine.pid("raylet")).environ()
    assert given["RAY_AUTH_TOKEN_PATH"] == str(token)
    assert token.read_text() not in "\n".join(given.values())


def test_a_second_start_takes_the_place_of_the_first(machine: Machine) -> None:
    commands.start(WORKER)
    first = machine.node
    commands.start(WORKER)
    assert machine.node.mark != first.mark
    assert marked(first.mark) == []
    assert not is_supervised(first)


def test_a_worker_that_crashed_is_cleaned_up_and_left_to_the_autoscaler(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_RAY", "stubborn")
    commands.start(WORKER)
    node = machine.node
    os.kill(machine.pid("raylet"), signal.SIGABRT)  # what a raylet does that finds itself declared dead
    machine.wait("its end", lambda: not is_supervised(node))
    assert marked(node.mark) == []
    assert machine.folder.node() is None
    assert len(machine.starts.read_text().splitlines()) == 1


def test_a_head_that_crashed_starts_again_after_everything_of_it_has_ended(machine: Machine, tmp_path: Path) -> None:
    commands.start(HEAD)
    machine.folder.remember_application(tmp_path / "models.yaml")
    first = machine.pid("gcs_server")
    os.kill(first, signal.SIGKILL)
    machine.wait("its restart", lambda: machine.node.state == "up" and machine.node.restarts == 1)
    assert machine.pid("gcs_server") != first
    before = [line.split()[0] for line in machine.starts.read_text().splitlines()]
    assert before == ["0", "0"], "a process of the crashed node met its successor"
    machine.wait("the application", lambda: f"deploys {tmp_path / 'models.yaml'}" in machine.folder.log.read_text())


def test_what_else_ends_on_a_machine_is_not_the_nodes_crash(machine: Machine) -> None:
    commands.start(HEAD)
    raylet = machine.pid("raylet")
    for program in ("bystander", "agent"):  # as the launcher's SSH connections are, which end with status 255
        pid = machine.pid(program)
        os.kill(pid, signal.SIGKILL)
        machine.wait("its end, which the keeper has seen", lambda pid=pid: not psutil.pid_exists(pid))
    # had the first one counted, the raylet would have been ended before the keeper saw the second one
    assert machine.pid("raylet") == raylet
    assert machine.node.restarts == 0


def test_a_head_that_was_stopped_by_ray_stop_stays_down(machine: Machine) -> None:
    commands.start(HEAD)
    node = machine.node
    os.kill(machine.pid("raylet"), signal.SIGTERM)
    machine.wait("its end", lambda: not is_supervised(node))
    assert marked(node.mark) == []
    assert len(machine.starts.read_text().splitlines()) == 1


def test_what_a_killed_keeper_left_is_ended_too(machine: Machine) -> None:
    commands.start(WORKER)
    node = machine.node
    os.kill(node.keeper_pid, signal.SIGKILL)
    machine.wait("the keeper's end", lambda: start_ticks(node.keeper_pid) is None)
    assert marked(node.mark)
    assert commands.stop() == 0
    assert marked(node.mark) == []
    assert machine.folder.node() is None


def test_a_ray_that_does_not_start_is_reported_and_leaves_nothing(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_RAY", "refuse")
    with pytest.raises(Unavailable, match="the disk is full"):
        commands.start(HEAD)
    assert not environment.RUN_DIR.exists()
    node = machine.node
    assert node.state == "failed"
    assert marked(node.mark) == []
    monkeypatch.setenv("FAKE_RAY", "run")
    commands.start(HEAD)  # the failure is in nobody's way
    assert machine.node.state == "up"


def test_a_ray_that_exceeds_its_own_time_is_started_again_after_its_processes_have_ended(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_RAY", "late")
    commands.start(WORKER)
    assert machine.node.state == "up"
    before = [line.split()[0] for line in machine.starts.read_text().splitlines()]
    assert before == ["0", "0", "0"], "a process of the node that did not start met its successor"


def test_a_ray_that_never_gets_up_is_given_up(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_RAY", "silent")
    monkeypatch.setattr(commands, "NODE_START_S", 3.0)  # above a keeper's start
    with pytest.raises(Unavailable, match="did not start within 3 s"):
        commands.start(WORKER)
    assert machine.folder.node() is None


def test_without_a_token_nothing_starts(machine: Machine) -> None:
    commands.token_file().unlink()
    with pytest.raises(ConfigError, match="no token"):
        commands.start(WORKER)
    assert not machine.starts.exists()


def test_any_command_of_rays_gets_the_clusters_address_and_no_tuning_of_the_node(
    machine: Machine, capfd: pytest.CaptureFixture[str]
) -> None:
    commands.start(WORKER)
    assert commands.ray(["status"]) == 0
    assert "ray status 127.0.0.1:6379 None" in capfd.readouterr().out


def test_ray_stop_of_a_machine_with_our_node_ends_that_node(machine: Machine) -> None:
    commands.start(WORKER)
    mark = machine.node.mark
    assert commands.ray(["stop"]) == 0
    assert marked(mark) == []


def test_the_keeper_stands_in_for_a_haproxy_that_is_gone(machine: Machine) -> None:
    """There is no manager of Serve's here, only what its HAProxy would have left: a configuration, and a process id."""
    commands.start(WORKER)
    run_dir = Path(machine.node.run_dir)
    port = free_port()
    (run_dir / haproxy.FRONT).write_text("4194305\n")  # above the largest process id there is
    (run_dir / haproxy.LAST).write_text(
        f"defaults\n    mode http\n    timeout connect 5s\n    timeout client 5s\n    timeout server 5s\n"
        f"frontend f\n    bind 127.0.0.1:{port}\n    http-request return status 200\n"
    )

    def answers() -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), patient(STATE_S)):
            return True
        return False

    machine.wait("the stand-in listens", answers)
    commands.stop()
    assert not answers()


@pytest.fixture
def handlers() -> Iterator[None]:
    """The signals' handlers, as they were."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("order", [HEAD, WORKER], ids=["head", "worker"])
def test_a_start_that_stays_ends_its_node_at_sigterm(
    machine: Machine, order: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    marks: list[str] = []

    def terminate() -> None:
        machine.wait("the node", lambda: machine.folder.running_node() is not None)
        marks.append(machine.node.mark)
        os.kill(os.getpid(), signal.SIGTERM)

    with ThreadPoolExecutor(1) as other:
        reported = other.submit(terminate)
        assert commands.start([*order, "--block"]) == 0
        reported.result()
    assert marked(marks[0]) == []
    assert machine.folder.node() is None
    # this Ray cannot be asked to drain, which is told and keeps nothing from ending
    assert ("not drained: no answer" in capsys.readouterr().out) == (order is WORKER)


@pytest.mark.usefixtures("handlers")
def test_a_start_that_stays_ends_with_a_crashed_worker_and_shows_its_log(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    def crash() -> None:
        machine.wait("the node", lambda: machine.folder.running_node() is not None)
        os.kill(machine.pid("raylet"), signal.SIGKILL)

    with ThreadPoolExecutor(1) as other:
        reported = other.submit(crash)
        assert commands.start([*WORKER, "--block"]) == 1
        reported.result()
    assert "ended with status -9" in capsys.readouterr().out
