"""The tests read nothing private of other modules, and sleep for a reason. Each rule is shown to bite first."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import suite_rules as rules

TESTS = Path(__file__).resolve().parent


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    found = {file.relative_to(TESTS).as_posix(): file.read_text() for file in sorted(TESTS.rglob("*.py"))}
    assert len(found) > 100, "the tests have moved: nothing is read"
    return found


@pytest.mark.parametrize("source", ["queue._entries", "from serve_app.x import _helper", "a.b._c.d"])
def test_a_private_name_of_another_module_is_seen(source: str) -> None:
    assert len(rules.private_reads({"a.py": source})) == 1


@pytest.mark.parametrize(
    "source",
    ["class A:\n    def f(self):\n        self._x = 1\nA()._x", "pair._replace(a=1)", "os._exit(1)", "x.__class__"],
)
def test_names_of_its_own_and_named_ones_of_other_projects_are_accepted(source: str) -> None:
    assert rules.private_reads({"a.py": source}) == []


def test_a_sleep_without_a_comment_is_seen() -> None:
    assert rules.unexplained_sleeps({"a.py": "import time\ntime.sleep(1)"}) == ["a.py:2"]


@pytest.mark.parametrize(
    "source",
    ["time.sleep(1)  # bound: END_S", "# a slow client\nawait asyncio.sleep(wait_s)", "await asyncio.sleep(0)"],
)
def test_a_sleep_with_its_reason_is_accepted(source: str) -> None:
    assert rules.unexplained_sleeps({"a.py": source}) == []


@pytest.mark.parametrize("source", ["child.send_signal(signal.SIGINT)", "import os\nos.killpg(pid, signal.SIGINT)"])
def test_an_interrupt_of_what_may_ignore_it_is_seen(source: str) -> None:
    assert len(rules.uninterruptible({"a.py": source})) == 1
    started = f"from tests.interruptible import interruptible\n{source}"
    own = "os.kill(os.getpid(), signal.SIGINT)\nchild.send_signal(signal.SIGTERM)"
    assert rules.uninterruptible({"a.py": started, "b.py": own}) == []


def test_what_a_test_interrupts_does_not_ignore_it(texts: dict[str, str]) -> None:
    assert rules.uninterruptible(texts) == []


def test_no_test_reads_what_is_private_to_another_module(texts: dict[str, str]) -> None:
    assert rules.private_reads(texts) == []


def test_no_test_sleeps_without_saying_why_and_how_long(texts: dict[str, str]) -> None:
    assert rules.unexplained_sleeps(texts) == []
