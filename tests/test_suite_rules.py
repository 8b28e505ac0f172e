"""The tests read nothing private of other modules, enter rooms by doors, sleep for a reason, and wait by one clock.
Each rule can fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import house_debts as debts
from tests import suite_rules as rules
from tests.house_rules import House

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
LINE = """
class Line:
    def __init__(self):
        self.core = Core()
class Core:
    def __init__(self):
        self.in_flight = {}
        self.runs = []
"""
ROUTER = "class Router:\n    def __init__(self):\n        self.queue = Line()\n"


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


@pytest.fixture(scope="module")
def rooms() -> dict[str, set[str]]:
    return rules.room_names(House({"serve_app/core/queue/a.py": LINE, "serve_app/router/a.py": ROUTER}))


@pytest.mark.parametrize(
    "source",
    [
        "router.queue.core.in_flight",
        "world.routers[0].queue.core.in_flight.values()",
        "class World:\n    def __init__(self):\n        self.router = 1\nworld.router.queue.core.in_flight",
        "class World:\n    def rest(self):\n        return self.router.queue.core.runs",
    ],
)
@pytest.mark.parametrize("path", ["http/test_a.py", "fakes/a.py", "router/test_a.py"])
def test_a_reach_behind_another_room_is_seen(rooms: dict[str, set[str]], path: str, source: str) -> None:
    assert rules.deep_reaches({path: source}, rooms) == {path: 1}


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("http/test_a.py", "router.queue.core"),
        ("http/test_a.py", "queue.core.values()"),
        ("core/queue/test_a.py", "router.queue.core.in_flight"),  # the room's own tests
        ("http/test_a.py", "client.chat.completions.create()"),  # nothing of ours
        ("http/test_a.py", "from x import queue\nqueue.queue.core.in_flight"),
    ],
)
def test_a_door_and_what_is_behind_that_of_its_own_room_are_accepted(
    rooms: dict[str, set[str]], path: str, source: str
) -> None:
    assert rules.deep_reaches({path: source}, rooms) == {}


def test_a_sleep_without_a_comment_is_seen() -> None:
    assert rules.unexplained_sleeps({"a.py": "import time\ntime.sleep(1)"}) == ["a.py:2"]


@pytest.mark.parametrize(
    "source",
    ["time.sleep(1)  # bound: END_S", "# a slow client\nawait asyncio.sleep(wait_s)", "await asyncio.sleep(0)"],
)
def test_a_sleep_with_its_reason_is_accepted(source: str) -> None:
    assert rules.unexplained_sleeps({"a.py": source}) == []


@pytest.mark.parametrize(
    "source",
    [
        "while not done():\n    time.sleep(0.1)",
        "while time.monotonic() < deadline:\n    look()",
        "while not done():\n    assert time.monotonic() - began < BOUND_S",
        "for _ in looks:\n    time.sleep(0.1)\n    if quiet_time() > until:\n        break",
    ],
)
def test_a_wait_by_a_bound_of_its_own_is_seen(source: str) -> None:
    assert rules.own_waits({"a.py": source}) == ["a.py:1"]
    assert rules.own_waits({rules.WAITING: source}) == []


@pytest.mark.parametrize(
    "source",
    [
        "wait_until(done, BOUND_S, 'it is done')",
        "for _ in during(LOAD_S):\n    ask()\n    time.sleep(0.1)",
        "while not over.is_set():\n    ask()\n    ended.append(time.monotonic())",
        "for one in asked:\n    assert quiet_time() - began < BOUND_S",
        "while queue.next(time.monotonic()) is not None:\n    send()",
    ],
)
def test_a_wait_by_the_clock_of_all_and_a_load_are_accepted(source: str) -> None:
    assert rules.own_waits({"a.py": source}) == []


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


def test_tests_enter_other_rooms_by_their_doors(texts: dict[str, str]) -> None:
    """A file that reaches behind a door less often than the list says takes its new number there."""
    files = (file for folder in ("serve_app", "autoscaling") for file in sorted((ROOT / folder).rglob("*.py")))
    house = House({file.relative_to(ROOT).as_posix(): file.read_text() for file in files})
    found = rules.deep_reaches(texts, rules.room_names(house))
    known = debts.DEEP_REACHES
    assert {path: count for path, count in found.items() if count > known.get(path, 0)} == {}
    assert {path: found.get(path, 0) for path in known if found.get(path, 0) < known[path]} == {}, "fewer now"


def test_no_test_waits_by_a_bound_of_its_own(texts: dict[str, str]) -> None:
    assert rules.own_waits(texts) == []


def test_no_test_sleeps_without_saying_why_and_how_long(texts: dict[str, str]) -> None:
    assert rules.unexplained_sleeps(texts) == []
