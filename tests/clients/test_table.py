"""The list of docs/reference/clients.md has every check of each real client, and the pinned versions."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

from tests.clients.checks.common import COLUMNS
from tests.clients.run import CHECKS, listed

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = (ROOT / "docs/reference/clients.md").read_text()
NODE = " (Node)"
EXACT = re.compile(r"\d+(\.\d+)+")
CLIENT = re.compile(
    r"^- (\S+(?: \(Node\))?) (\d[\d.]*): works(?:; ((?:`[^`]+` \[\d+\](?:, )?)+))?(?:; has no ((?:`[^`]+`(?:, )?)+))?$",
    re.MULTILINE,
)


def documented() -> dict[tuple[str, str], dict[str, str]]:
    """Of each client and version its checks: `works`, or `works [n]` with the number of a note."""
    found = {}
    for name, version, noted, lacking in CLIENT.findall(DOCUMENT):
        notes = dict(re.findall(r"`([^`]+)` (\[\d+\])", noted))
        absent = re.findall(r"`([^`]+)`", lacking)
        assert {*notes, *absent} <= set(COLUMNS), (name, noted, lacking)
        assert not {*notes} & {*absent}, (name, noted, lacking)
        found[name, version] = {
            column: f"works {notes[column]}" if column in notes else "works"
            for column in COLUMNS
            if column not in absent
        }
    return found


def checks() -> dict[str, set[str]]:
    """The checks of each client, from the sources: the clients are not installed here."""
    found: dict[str, set[str]] = {}
    for file in CHECKS.glob("*.py"):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "CHECKS":
                assert isinstance(node.value, ast.Dict)
                for client, table in zip(node.value.keys, node.value.values, strict=True):
                    found[ast.literal_eval(client)] = {ast.literal_eval(name) for name in table.keys}
    client = ""
    for name, check in re.findall(r'^  (?:(\w+): \{|  "([^"]+)":)', (CHECKS / "node.mjs").read_text(), re.MULTILINE):
        client = f"{name}{NODE}" if name else client
        found.setdefault(client, set()).update({check} - {""})
    return found


def pinned() -> dict[str, str]:
    requirements = (ROOT / "tests/clients/requirements.txt").read_text()
    found = dict(re.findall(r"^([\w-]+)(?:\[\w+\])?==(\S+)$", requirements, re.MULTILINE))
    assert len(found) == sum(not line.startswith("#") for line in requirements.splitlines())
    packages = json.loads((ROOT / "tests/clients/package.json").read_text())["dependencies"]
    return found | {f"{name}{NODE}": version for name, version in packages.items()}


def test_the_list_has_the_checks_of_each_client() -> None:
    assert {client: set(works) for (client, _), works in documented().items()} == checks()


def test_every_check_is_explained_and_no_other() -> None:
    items = DOCUMENT.partition("\nWhat is checked:\n\n")[2].partition("\n\n")[0]
    heads = re.findall(r"^- ([^:]*): ", items, re.MULTILINE)
    assert sorted(name for head in heads for name in re.findall(r"`([^`]+)`", head)) == sorted(COLUMNS)


def test_each_note_is_there() -> None:
    notes = re.findall(r"^(\d+)\. ", DOCUMENT, re.MULTILINE)
    used = {number for works in documented().values() for cell in works.values() for number in re.findall(r"\d+", cell)}
    assert used == set(notes)


def test_the_list_has_the_pinned_versions() -> None:
    versions = pinned()
    assert all(EXACT.fullmatch(version) for version in versions.values())
    for client, version in documented():
        assert versions[client] == version, client


def test_equal_notes_have_one_number_and_a_failure_is_shown() -> None:
    first, second, third = COLUMNS[:3]
    found = [
        {"client": "a", "version": "1", "check": first, "note": "N.", "error": None},
        {"client": "b", "version": "2", "check": first, "note": "N.", "error": None},
        {"client": "b", "version": "2", "check": second, "note": "M.", "error": None},
        {"client": "b", "version": "2", "check": third, "note": None, "error": "boom"},
    ]
    item_a, item_b, empty, *notes = listed(found)
    assert item_a.startswith(f"- a 1: works; `{first}` [1]; has no `{second}`, `{third}`, ")
    assert item_b.startswith(f"- b 2: fails; `{third}`: boom; `{first}` [1], `{second}` [2]; has no ")
    assert (empty, notes) == ("", ["1. N.", "2. M."])
