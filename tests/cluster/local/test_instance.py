"""Processes, ports and state of a local instance: what is found, what is ended, what is kept."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from serve_app.cluster.local import ports
from serve_app.cluster.local.state import Instance, InstanceState, state_root, write_private
from serve_app.errors import ConfigError, Unavailable
from serve_app.names import MARK
from serve_app.system import processes
from tests.requires import requires
from tests.waiting import patient, wait_until

requires("linux")

APPEAR_S = 20.0  # for a Python process to come or go: idle it takes 50 ms
SLEEPER = "import time; print('up', flush=True); time.sleep(600)"
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"


@pytest.fixture
def mark() -> str:
    return f"test-{os.getpid()}-{time.monotonic_ns()}"


@pytest.fixture
def start() -> Iterator[object]:
    started: list[subprocess.Popen[str]] = []

    def run(code: str, mark: str | None, *arguments: str) -> subprocess.Popen[str]:
        environment = {**os.environ, **({MARK: mark} if mark else {})}
        process = subprocess.Popen(
            [sys.executable, "-c", code, *arguments], env=environment, stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline()  # it runs its code, and so has its environment
        return process

    yield run
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def test_only_processes_with_exactly_this_mark_are_found(start, mark: str) -> None:
    ours = start(SLEEPER, mark)
    longer = start(SLEEPER, mark + "0")
    none = start(SLEEPER, None)
    assert processes.marked(mark) == [ours.pid]
    assert processes.marked(mark + "0") == [longer.pid]
    assert processes.marked(mark, spare=(ours.pid,)) == []
    assert none.pid not in [*processes.marked(mark), *processes.marked(mark + "0")]


def test_ending_leaves_others_alone_and_does_not_wait_for_a_deaf_process(start, mark: str) -> None:
    ours = start(SLEEPER, mark)
    deaf = start(DEAF, mark)
    other = start(SLEEPER, mark + "0")
    processes.end_marked(mark, grace_s=0.3)
    assert ours.wait(patient(APPEAR_S)) == -signal.SIGTERM
    assert deaf.wait(patient(APPEAR_S)) == -signal.SIGKILL
    assert other.poll() is None
    assert processes.marked(mark) == []
    processes.end_marked(mark, grace_s=0.3)  # once more is harmless


def test_a_child_in_a_session_of_its_own_is_found_by_the_inherited_mark(start, mark: str) -> None:
    code = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {SLEEPER!r}], start_new_session=True, stdout=subprocess.PIPE, text=True)
child.stdout.readline()
print(child.pid, flush=True)
"""
    parent = start(code, mark)
    parent.wait(patient(APPEAR_S))
    assert len(processes.marked(mark)) == 1
    processes.end_marked(mark, grace_s=0.0)
    assert processes.marked(mark) == []


def test_a_process_is_named_for_good_by_pid_and_start(start) -> None:
    process = start(SLEEPER, None)
    ticks = processes.start_ticks(process.pid)
    assert ticks is not None
    assert ticks >= (processes.start_ticks(os.getpid()) or 0)
    process.kill()
    # until the kernel has ended it; it stays a zombie, not reaped yet
    wait_until(lambda: processes.start_ticks(process.pid), APPEAR_S, "it is gone", wanted=None)


def addresses() -> list[tuple[str, bool]]:
    """Addresses to listen on, and whether they are loopback; a container may have no IPv6."""
    known = [("127.0.0.1", True), ("0.0.0.0", False), ("::1", True), ("::", False)]
    return known if has_ipv6() else known[:2]


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.parametrize(("bound", "loopback"), addresses())
def test_listening_sockets_are_listed_with_their_owner(bound: str, loopback: bool) -> None:
    family = socket.AF_INET6 if ":" in bound else socket.AF_INET
    with socket.socket(family) as server, socket.socket(family) as silent:
        server.bind((bound, 0))
        silent.bind((bound, 0))  # bound, not listening
        server.listen()
        port = server.getsockname()[1]
        found = [one for one in processes.listening_ports([os.getpid()]) if one.port == port]
        assert [(one.address, one.pid, one.is_loopback) for one in found] == [(bound, os.getpid(), loopback)]
        quiet = silent.getsockname()[1]
        assert not [one for one in processes.listening_ports([os.getpid()]) if one.port == quiet]


def test_listeners_of_descendants_are_listed_and_those_of_strangers_are_not(start) -> None:
    code = "import socket, time; s = socket.create_server(('127.0.0.1', 0)); print(s, flush=True); time.sleep(600)"
    child = start(code, None)
    own = [one for one in processes.listening_ports([os.getpid()]) if one.pid == child.pid]
    assert [one.address for one in own] == ["127.0.0.1"]
    assert processes.listening_ports([child.pid]) == own
    stranger = start(SLEEPER, None)
    assert processes.listening_ports([stranger.pid]) == []


def test_an_ipv4_address_mapped_into_ipv6_is_listed_as_ipv4() -> None:
    if not has_ipv6():
        pytest.skip("this machine has no IPv6")
    with socket.socket(socket.AF_INET6) as server:
        server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        server.bind(("::ffff:127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        (found,) = [one for one in processes.listening_ports([os.getpid()]) if one.port == port]
        assert (found.address, found.is_loopback) == ("127.0.0.1", True)


def test_a_taken_port_is_refused_with_the_name_of_its_holder() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port {port} is taken by .+ \(process {os.getpid()}\)") as caught:
            ports.require_free("127.0.0.1", port)
        assert caught.value.param == "port"
    ports.require_free("127.0.0.1", port)


def test_blocks_reserved_at_once_share_no_port() -> None:
    with ports.reserved_block("127.0.0.1", seed=1) as first, ports.reserved_block("127.0.0.1", seed=1) as second:
        assert set(range(first.base, first.base + ports.BLOCK_PORTS)).isdisjoint(
            range(second.base, second.base + ports.BLOCK_PORTS)
        )
        assert {first.http, *first.ingress} <= set(range(first.base, first.base + ports.BLOCK_PORTS))
        assert len(set(first.probed)) == len(first.probed)
        between = first.base
    with ports.reserved_block("127.0.0.1", seed=1) as again:
        assert again.base == between  # given back when its context ended


def test_a_block_with_a_port_in_use_is_stepped_over() -> None:
    with ports.reserved_block("127.0.0.1", seed=2) as block:
        taken = block.ingress[0]
        with socket.create_server(("127.0.0.1", taken)):
            pass
    with socket.create_server(("127.0.0.1", taken)), ports.reserved_block("127.0.0.1", seed=2) as other:
        assert taken not in other.ingress


def instance(name: str = "one", **fields: object) -> Instance:
    return Instance(name, f"{name}-1234", "/nowhere", "127.0.0.1", 8000, **fields)  # type: ignore[arg-type]


def test_what_is_recorded_is_read_back_and_private(tmp_path: Path) -> None:
    state = InstanceState("one", tmp_path)
    assert state.read() is None
    state.create()
    written = instance(address="127.0.0.1:1", url="http://127.0.0.1:8000", models=("a", "b/c"), supervisor_pid=7)
    state.write(written)
    token = state.new_token()
    assert state.read() == written
    assert state.token_file.read_text() == token
    assert len(bytes.fromhex(token)) == 32
    assert stat.S_IMODE(state.folder.stat().st_mode) == 0o700
    for file in ("instance.json", "token"):
        assert stat.S_IMODE((state.folder / file).stat().st_mode) == 0o600
    state.clear()
    assert state.read() is None
    assert not state.token_file.exists()


def test_a_new_token_each_time_but_files_are_replaced_whole(tmp_path: Path) -> None:
    state = InstanceState("one", tmp_path)
    state.create()
    assert state.new_token() != state.new_token()
    target = tmp_path / "file"
    target.write_text("old")
    target.chmod(0o644)
    write_private(target, "new")
    assert (target.read_text(), stat.S_IMODE(target.stat().st_mode)) == ("new", 0o600)
    assert [entry.name for entry in tmp_path.iterdir() if entry.name.startswith(".")] == []


@pytest.mark.parametrize("text", ["", "{", "[]", '{"name": "one"}', "null"])
def test_a_record_of_another_shape_counts_as_none(tmp_path: Path, text: str) -> None:
    state = InstanceState("one", tmp_path)
    state.create()
    (state.folder / "instance.json").write_text(text)
    assert state.read() is None


def test_unknown_fields_of_a_later_version_are_passed_over(tmp_path: Path) -> None:
    state = InstanceState("one", tmp_path)
    state.create()
    state.write(instance())
    data = json.loads((state.folder / "instance.json").read_text())
    (state.folder / "instance.json").write_text(json.dumps({**data, "colour": "blue"}))
    assert state.read() == instance()


def test_one_owner_at_a_time_and_the_refusal_names_the_url(tmp_path: Path) -> None:
    owner = InstanceState("one", tmp_path)
    other = InstanceState("one", tmp_path)
    owner.create()
    owner.acquire()
    owner.write(instance(url="http://127.0.0.1:8000"))
    assert not owner.owned_elsewhere()
    assert other.owned_elsewhere()
    with pytest.raises(Unavailable, match=r"'one' is already running at http://127\.0\.0\.1:8000") as caught:
        other.acquire()
    assert caught.value.code == "already_running"
    owner.release()
    other.require_unowned()
    other.acquire()
    other.release()


def test_the_lock_ends_with_its_owner_however_it_ends(start, tmp_path: Path) -> None:
    code = """
import sys, time
from serve_app.cluster.local.state import InstanceState
state = InstanceState("one", sys.argv[1]); state.create(); state.acquire()
print("up", flush=True); time.sleep(600)
"""
    owner = start(code, None, str(tmp_path))
    state = InstanceState("one", tmp_path)
    assert state.owned_elsewhere()
    owner.kill()
    owner.wait()
    assert not state.owned_elsewhere()


def test_a_home_that_cannot_be_written_is_reported_with_what_to_set(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("SERVE_APP_STATE", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HOME", str(tmp_path / "file"))  # root may write everywhere, but not below a file
    with pytest.raises(ConfigError, match=r"cannot be written.*SERVE_APP_STATE.*--state-dir"):
        InstanceState("one").create()
    monkeypatch.delenv("HOME")
    with pytest.raises(ConfigError, match="HOME is not set"):
        InstanceState("one")


def test_the_state_folder_is_chosen_in_this_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", "/h")
    monkeypatch.delenv("SERVE_APP_STATE", raising=False)
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    assert state_root() == Path("/h/.local/state/serve-app")
    monkeypatch.setenv("XDG_STATE_HOME", "/x")
    assert state_root() == Path("/x/serve-app")
    monkeypatch.setenv("SERVE_APP_STATE", "/s")
    assert state_root() == Path("/s")
    assert state_root(tmp_path) == tmp_path


@pytest.mark.parametrize("name", ["", "../x", "a/b", "a b", "-a", "x" * 60, "a\n"])
def test_a_name_that_is_no_folder_name_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="instance"):
        InstanceState(name, tmp_path)
