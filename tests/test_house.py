"""The rooms: floors, doors, circles, sizes. Each rule is shown to bite on a small tree before it is held against ours.

What breaks a rule today is listed in `house_debts`; the lists may only become shorter.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple
from pathlib import Path

import pytest

from tests import house_debts as debts
from tests import house_rules as rules
from tests.house_lines import CodeLength, code_length
from tests.house_numbers import room_sizes
from tests.house_rules import House

ROOT = Path(__file__).resolve().parent.parent
SHIPPED = ("serve_app", "autoscaling", "benchmarks")
# Users import these, and entry points and configurations name them.
FOR_USERS = (
    "serve_app.connect",
    "serve_app.cli.main",
    "serve_app.client.Client",
    "serve_app.client.MapProgress",
    "serve_app.client.MapResult",
)


def sources(*folders: str) -> dict[str, str]:
    """Source texts of these folders by their path."""
    files: Iterator[Path] = (file for folder in folders for file in sorted((ROOT / folder).rglob("*.py")))
    return {file.relative_to(ROOT).as_posix(): file.read_text() for file in files}


@pytest.fixture(scope="module")
def house() -> House:
    texts = sources(*SHIPPED)
    assert len(texts) > 100, "the code has moved: these tests walk nothing"
    return House(texts)


ROUTER = {"serve_app/router/__init__.py": "from serve_app.router.grants import Grant\n__all__ = ['Grant']"}
GRANTS = {"serve_app/router/grants.py": "class Grant: ...\nclass Hidden: ..."}


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("serve_app/router/a.py", "from serve_app.http import b"),
        ("serve_app/router/a.py", "def late():\n    from serve_app import http"),
        ("serve_app/quota/a.py", "from serve_app.router import Grant"),
        ("serve_app/core/queue/a.py", "from serve_app.router import Grant"),
        ("serve_app/core/__init__.py", "import serve_app.router"),
        ("serve_app/types.py", "import typing\nif typing.TYPE_CHECKING:\n    from serve_app.router import Grant"),
    ],
)
def test_an_import_of_the_same_or_a_higher_floor_is_seen(path: str, source: str) -> None:
    http = {"serve_app/http/__init__.py": "", "serve_app/http/b.py": ""}
    assert len(rules.upward(House({**ROUTER, **GRANTS, **http, path: source}))) == 1


def test_an_import_of_a_lower_floor_is_accepted() -> None:
    tree = House({**ROUTER, **GRANTS, "serve_app/http/a.py": "from serve_app.router import Grant"})
    assert rules.upward(tree) == rules.past_the_door(tree) == rules.homeless(tree) == []


@pytest.mark.parametrize(
    "source",
    [
        "from serve_app.router.grants import Grant",
        "import serve_app.router.grants",
        "from serve_app.router import grants",
        "from serve_app.router import Hidden",
        "from ..router.grants import Grant",
    ],
)
def test_an_import_past_the_door_of_a_room_is_seen(source: str) -> None:
    assert len(rules.past_the_door(House({**ROUTER, **GRANTS, "serve_app/http/a.py": source}))) == 1


def test_a_module_that_imports_its_own_door_is_seen() -> None:
    tree = House({**ROUTER, **GRANTS, "serve_app/router/a.py": "from serve_app.router import Grant"})
    assert len(rules.past_the_door(tree)) == 1


def test_a_module_that_a_room_exports_is_accepted() -> None:
    door = {"serve_app/router/__init__.py": "from serve_app.router import grants\n__all__ = ['grants']"}
    tree = House({**GRANTS, **door, "serve_app/http/a.py": "from serve_app.router import grants"})
    assert rules.past_the_door(tree) == []


WING = {
    "serve_app/http/__init__.py": "",
    "serve_app/http/api/__init__.py": "from serve_app.http.api.files import Files\n__all__ = ['Files']",
    "serve_app/http/api/files.py": "class Files: ...\nclass Hidden: ...",
    "serve_app/http/app.py": "from serve_app.http.api import Files",
}


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("serve_app/http/call.py", "from serve_app.http.api.files import Files"),
        ("serve_app/http/call.py", "from serve_app.http.api import files"),
        ("serve_app/http/call.py", "from serve_app.http.api import Hidden"),
        ("serve_app/http/api/keys.py", "from serve_app.http.api import Files"),
    ],
)
def test_an_import_past_the_door_of_a_wing_is_seen(path: str, source: str) -> None:
    assert rules.past_the_door(House(WING)) == rules.unused_exports(House(WING), ()) == []
    assert len(rules.past_the_door(House({**WING, path: source}))) == 1


def test_another_room_enters_a_wing_that_its_room_exports() -> None:
    app = {"serve_app/app.py": "from serve_app.http.api import Files"}
    assert len(rules.past_the_door(House({**WING, **app}))) == 1
    door = {"serve_app/http/__init__.py": "__all__ = ['api']"}
    assert rules.past_the_door(House({**WING, **app, **door})) == []
    assert rules.unused_exports(House({**WING, **app, **door}), ()) == []
    assert rules.unused_exports(House({**WING, **door}), ()) == ["serve_app.http: api"]
    app = {"serve_app/app.py": "from serve_app.http.api.files import Files"}
    assert len(rules.past_the_door(House({**WING, **app, **door}))) == 1


def test_an_export_of_a_wing_that_nobody_uses_is_seen() -> None:
    alone = {path: text for path, text in WING.items() if path != "serve_app/http/app.py"}
    assert rules.unused_exports(House(alone), ()) == ["serve_app.http.api: Files"]


def test_an_export_that_nobody_uses_is_seen() -> None:
    tree = House({**ROUTER, **GRANTS})
    assert rules.unused_exports(tree, ()) == ["serve_app.router: Grant"]
    assert rules.unused_exports(tree, ("serve_app.router.Grant",)) == []


def test_a_circle_is_seen_for_type_checkers_too() -> None:
    tree = House({
        "serve_app/router/a.py": "from serve_app.router.b import B",
        "serve_app/router/b.py": "if TYPE_CHECKING:\n    from serve_app.router import c",
        "serve_app/router/c.py": "def late():\n    from .a import A",
        "serve_app/router/d.py": "from .a import A",
    })  # fmt: skip
    assert rules.circles(tree) == [("serve_app.router.a", "serve_app.router.b", "serve_app.router.c")]


def test_a_class_name_that_occurs_twice_is_seen() -> None:
    tree = House({"serve_app/router/a.py": "class A: ...\nclass B: ...", "autoscaling/b.py": "class A: ..."})
    assert rules.doubled_classes(tree) == {"A": ["serve_app.router.a", "autoscaling.b"]}


def test_a_module_without_a_room_is_seen() -> None:
    assert rules.homeless(House({"serve_app/core/stray.py": "", "serve_app/stray.py": ""})) == [
        "serve_app/core/stray.py",
        "serve_app/stray.py",
    ]


def test_what_is_too_long_is_seen() -> None:
    lengths = {
        "a.py": code_length("x = 1\n" * 401),
        "b.py": code_length("def f():\n" + "    x = 1\n" * 50),
        "c.py": code_length("def f():\n" + "    x = 1\n" * 49),
    }
    assert rules.long_files(lengths) == {"a.py": 401}
    assert rules.long_functions(lengths) == {"b.py:f": 51}


@pytest.mark.parametrize(
    "explanation",
    ["\n\n", "# why\n", "import os\n", "from os import (\n    path,\n    sep,\n)\n"],
)
def test_what_explains_code_is_no_code_line(explanation: str) -> None:
    text = f'"""What it decides.\n\nIn, out.\n"""\n{explanation}x = 1  # a number\n'
    assert code_length(text) == CodeLength(1, ())


def test_a_string_over_several_lines_is_code_and_a_docstring_is_not() -> None:
    text = 'def f():\n    """Says.\n\n    More."""\n    return """\n    a\n\n    # b\n    """\n'
    assert code_length(text) == CodeLength(5, (("f", 5),))


@pytest.mark.parametrize(
    "source",
    [
        "a, b = x, y",
        "(a, b) = [x, y]",
        "self.a, self.b = a, b",
        "first, last = found[0], found[1]",
        "count, total = count + 1, total + x",  # each reads what it sets itself
        "before, self.x, self.y = self.x, x, y",  # self.y comes along
    ],
)
def test_a_binding_of_unrelated_values_is_seen(source: str) -> None:
    assert rules.files_with_unrelated_bindings({"a.py": f"def f():\n    {source}\n"}) == {"a.py": 1}


@pytest.mark.parametrize(
    "source",
    [
        "a, b = b, a",
        "before, self.x = self.x, []",
        "gap_s, last = max(gap_s, now - last), now",
        "a, b = found",
        "a, *b = x, y",
        "MARKS = OPEN, CLOSE = '<', '>'",  # the pair has a name, too
        "(a,) = (x,)",
    ],
)
def test_a_binding_of_values_that_belong_together_is_accepted(source: str) -> None:
    assert rules.files_with_unrelated_bindings({"a.py": source}) == {}


def test_the_size_of_a_room_is_the_sum_of_its_files() -> None:
    texts = {
        "serve_app/router/__init__.py": '"""Decides."""\n',
        "serve_app/router/a.py": "a, b = x, y\n\nc = 1\n",
        "serve_app/types.py": "d = 1\n",
    }
    sizes = {room: astuple(size) for room, size in room_sizes(texts).items()}
    assert sizes == {"serve_app.router": (2, 2, 1), "serve_app.types": (1, 1, 0), "all": (3, 3, 1)}


def test_every_module_is_in_a_room(house: House) -> None:
    assert rules.homeless(house) == []


def test_every_room_is_there(house: House) -> None:
    assert [room for room in rules.FLOOR_OF if room not in house.paths] == []


def test_no_arrow_runs_up(house: House) -> None:
    assert rules.upward(house) == []


def test_rooms_are_entered_by_their_doors(house: House) -> None:
    assert rules.past_the_door(house) == []


def test_rooms_export_nothing_that_nobody_uses(house: House) -> None:
    from serve_app import agents

    assert rules.unused_exports(house, (*FOR_USERS, *(f"serve_app.agents.{name}" for name in agents.__all__))) == []


def test_modules_import_each_other_in_no_circle(house: House) -> None:
    assert rules.circles(house) == [tuple(circle) for circle in debts.CIRCLES]


def test_floors_are_counted_by_the_longest_way_down() -> None:
    texts = {
        "serve_app/types.py": "",
        "serve_app/core/queue/__init__.py": "import serve_app.types",
        "serve_app/core/memory/__init__.py": "import serve_app.core.queue",
        "serve_app/router/__init__.py": "import serve_app.types\nimport serve_app.core.memory",
    }
    assert rules.floors(House(texts)) == 3


def test_the_rooms_stand_on_ten_floors_at_most(house: House) -> None:
    assert rules.floors(house) <= rules.MAX_FLOORS


def test_the_top_of_the_package_stays_small() -> None:
    entries = [entry.name for entry in (ROOT / "serve_app").iterdir() if entry.name != "__pycache__"]
    assert len(entries) <= rules.MAX_TOP_ENTRIES, sorted(entries)


def test_two_classes_never_share_a_name(house: House) -> None:
    """A name that no longer occurs twice has to leave the list."""
    assert sorted(rules.doubled_classes(house)) == sorted(debts.DOUBLED_CLASSES)


@pytest.fixture(scope="module")
def everything() -> dict[str, str]:
    return sources(*SHIPPED, "scripts", "tests")


def test_files_and_functions_stay_short(everything: dict[str, str]) -> None:
    """What is too long today may become shorter, and leaves the list when it is short enough."""
    lengths = {path: code_length(text) for path, text in everything.items()}
    found = rules.long_files(lengths) | rules.long_functions(lengths)
    known = debts.LONG_FILES | debts.LONG_FUNCTIONS
    assert {name: lines for name, lines in found.items() if lines > known.get(name, 0)} == {}
    assert sorted(set(known) - set(found)) == [], "short enough now: take it from the list"


def test_unrelated_values_are_bound_in_statements_of_their_own(everything: dict[str, str]) -> None:
    """A file that has fewer than the list says takes its new number there, and leaves the list with the last one."""
    found = rules.files_with_unrelated_bindings(everything)
    known = debts.UNRELATED_BINDINGS
    assert {path: count for path, count in found.items() if count > known.get(path, 0)} == {}
    assert {path: found.get(path, 0) for path in known if found.get(path, 0) < known[path]} == {}, "fewer now"
