"""One word a thing, in identifiers and public names; `word_rules` has the words. Each rule is shown to bite first."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.word_rules import faults

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("serve_app", "autoscaling", "benchmarks", "scripts", "tests")
# Names that must stay, with the reason. This list may only become shorter.
EXCEPTIONS = {
    "serve_app/core/limits/messages.py:ToldReservation": "a message: processes of 0.5.0 send it by this name",
    "serve_app/engine/deployment.py:open_wire": "routers of 0.5.0 call it at an engine of this release, at an upgrade",
}
ANYWHERE = "autoscaling/a.py"


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("told = 1", "told"),
        ("def is_told(): ...", "is_told"),
        ("class ToldReservations: ...", "ToldReservations"),
        ("self.last_heard = 1", "last_heard"),
        ("def f(berths): ...", "berths"),
        ("async def open_wire(): ...", "open_wire"),
        ("import a as outbox", "outbox"),
        ("class A(Enum):\n    TRICKLE = 1", "TRICKLE"),
        ("with a as shelf: ...", "shelf"),
        ("try: ...\nexcept Exception as said: ...", "said"),
        ("def test_a_client_is_told(): ...", "test_a_client_is_told"),
        ("for one in engines: ...", "one"),
        ("sorted(engines, key=lambda one: one.name)", "one"),
        ("[x for x in a if (there := x)]", "there"),
        ("class A:\n    what: str", "what"),
        ("def test_a_full_line_refuses(): ...", "test_a_full_line_refuses"),
        ("in_line = 1", "in_line"),
    ],
)
def test_a_name_with_a_word_that_is_gone_is_seen(source: str, name: str) -> None:
    assert list(faults({ANYWHERE: source})) == [f"{ANYWHERE}:{name}"]


@pytest.mark.parametrize(
    ("path", "source", "name"),
    [
        ("serve_app/quota/a.py", "line = 1", "line"),
        ("tests/core/queue/a.py", "def make_lines(): ...", "make_lines"),
        ("serve_app/http/keyed/a.py", "def f(session): ...", "session"),
        ("serve_app/core/limits/a.py", "def end_session(): ...", "end_session"),
        ("serve_app/core/limits/a.py", "QUOTAS = ()", "QUOTAS"),
        ("serve_app/core/roster.py", "", "roster"),
    ],
)
def test_a_word_that_means_something_else_in_a_room_is_seen_there(path: str, source: str, name: str) -> None:
    assert list(faults({path: source})) == [f"{path}:{name}"]


@pytest.mark.parametrize(
    ("path", "source"),
    [
        (ANYWHERE, "names = [one.name for one in engines]"),
        (ANYWHERE, "line = file.readline()"),
        (ANYWHERE, "headline = deadline = 1"),
        (ANYWHERE, "session = quota = 1"),
        (ANYWHERE, "text = 'told'  # and what there is"),
        (ANYWHERE, "from serve_app.core.limits import ToldReservation"),
        ("serve_app/http/keyed/a.py", "def f(router_session): ..."),
        ("serve_app/core/limits/a.py", "ALLOWANCES = ()"),
    ],
)
def test_a_name_of_the_field_is_accepted(path: str, source: str) -> None:
    assert faults({path: source}) == {}


def test_every_name_is_made_of_the_field_s_own_words() -> None:
    files = [file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*.py"))]
    found = faults({file.relative_to(ROOT).as_posix(): file.read_text() for file in files})
    assert len(files) > 100, "the code has moved: this test reads nothing"
    assert {name: wrong for name, wrong in found.items() if name not in EXCEPTIONS} == {}
    assert sorted(EXCEPTIONS.keys() - found.keys()) == [], "it has gone: take it from the list"
