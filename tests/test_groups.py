"""How the tests are shared out to the processes of `make test`."""

from __future__ import annotations

import pytest

from tests.conftest import STACKS, group_of, next_group

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
    while waiting:
        last = next_group(waiting, last)
        waiting.remove(last)
        order.append(last)
    return order


def test_what_starts_processes_goes_first_and_a_file_between_two_stacks() -> None:
    a = "tests/http/test_a.py"
    b = "tests/http/test_b.py"
    assert taken(None) == ["stack", a, "cluster", "three", b, "tests/e2e/test_chaos.py"]
    assert taken("three")[:2] == [a, "stack"]


def test_beside_a_stack_a_process_takes_files() -> None:
    assert next_group(QUEUE, None, other_has_stack=True) == "tests/http/test_a.py"
    assert next_group(["three"], None, other_has_stack=True) == "three"


def test_without_a_file_left_the_next_stack_is_taken_all_the_same() -> None:
    assert next_group(["three"], "stack") == "three"
    assert next_group(["tests/http/test_a.py"], "cluster") == "tests/http/test_a.py"
