"""How the tests are shared out to the processes of `make test`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import BETWEEN, STACKS, collects, group_of, next_group
from tests.requires import ROOT
from tests.waiting import patient

RUN_S = 120.0  # bound of a pytest of its own: some ten seconds on an idle machine

QUEUE = ["stack", "tests/http/test_a.py", "cluster", "three", "tests/http/test_b.py", "tests/e2e/test_chaos.py"]


@pytest.mark.parametrize(
    ("nodeid", "group"),
    [
        ("tests/http/test_a.py::test_it[x]", "tests/http/test_a.py"),
        ("tests/test_words.py::test_it", "tests/test_house.py"),
        ("tests/cluster/local/test_node.py::test_it", "cluster"),
        ("tests/e2e/test_keys.py::test_it", "three"),
        ("tests/e2e/test_chaos.py::test_it", "tests/e2e/test_chaos.py"),
        ("tests/e2e/test_not_named.py::test_it", "stack"),
    ],
)
def test_tests_that_share_a_stack_are_a_group_and_others_a_file(nodeid: str, group: str) -> None:
    assert group_of(nodeid) == group


def test_a_module_has_one_stack() -> None:
    named = [module for modules in STACKS.values() for module in modules]
    assert len(named) == len(set(named))


def taken(last: str | None) -> list[str]:
    """All of the queue, by one process."""
    order = []
    waiting = list(QUEUE)
    while (group := next_group(waiting, last)) is not None:
        last = group
        waiting.remove(group)
        order.append(group)
    return order


def test_what_starts_processes_goes_first_and_a_file_between_two_stacks() -> None:
    a = "tests/http/test_a.py"
    b = "tests/http/test_b.py"
    assert taken(None) == ["stack", a, "cluster", "three", b, "tests/e2e/test_chaos.py"]
    assert taken("three")[:2] == [a, "stack"]


def test_without_a_file_left_the_next_stack_is_taken_all_the_same() -> None:
    assert next_group(["three"], "stack") == "three"
    assert next_group(["tests/http/test_a.py"], "cluster") == "tests/http/test_a.py"


def test_a_process_for_files_takes_a_stack_when_there_are_none_left() -> None:
    assert next_group(QUEUE, None, files_first=True) == "tests/http/test_a.py"
    assert next_group(["cluster"], "tests/http/test_a.py", files_first=True) == "cluster"


@pytest.mark.parametrize(
    ("path", "collecting"),
    [
        ("tests/e2e/test_keys.py", [0]),
        ("tests/e2e/test_chaos.py", [0, 1]),
        ("tests/e2e/test_preemption.py", [0, 1]),
        ("tests/cluster/test_drain.py", [0, 1]),
        ("tests/http/test_a.py", [1, 2, 3]),
    ],
)
def test_every_file_is_collected_where_it_may_run(path: str, collecting: list[int]) -> None:
    for processes in (1, 2):
        assert all(collects(process, processes, path) for process in range(processes))
    for processes in (3, 4):
        found = [process for process in range(processes) if collects(process, processes, path)]
        assert found == [process for process in collecting if process < processes]


def test_the_first_of_three_processes_has_files_to_take_between_two_stacks() -> None:
    assert collects(0, 3, f"{BETWEEN}test_channel.py")
    assert len(list(Path(BETWEEN).glob("test_*.py"))) >= len(STACKS)


def test_three_processes_run_every_test_once_and_the_first_has_the_stacks(tmp_path: Path) -> None:
    for path in ("e2e/test_chaos.py", "e2e/test_keys.py", "transport/test_a.py", "http/test_b.py", "http/test_c.py"):
        file = tmp_path / "tests" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(
            "def test_1(worker_id, record_property): record_property('summary', f'RAN {__name__} {worker_id}')"
        )
    processes = ("-n", "3", "--dist", "loadscope", "--max-worker-restart=0")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "tests.conftest",
        *processes,
        "-c",
        os.devnull,
        "--rootdir",
        str(tmp_path),
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=patient(RUN_S), check=False
    )
    ran = dict(line.split()[1:] for line in done.stdout.splitlines() if line.startswith("RAN"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "5 passed" in done.stdout
    assert sorted(ran) == ["test_a", "test_b", "test_c", "test_chaos", "test_keys"]
    assert ran["test_keys"] == "gw0"
    assert {ran["test_b"], ran["test_c"]} <= {"gw1", "gw2"}
