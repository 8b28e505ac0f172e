"""The table of docs/reference/clients.md has a cell for every check of a real client, and the pinned versions."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

from tests.clients.checks.common import COLUMNS
from tests.clients.run import CHECKS, table

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = (ROOT / "docs/reference/clients.md").read_text()
NODE = " (Node)"
EXACT = re.compile(r"\d+(\.\d+)+")
NOTED = re.compile(r"works( \[(\d+)\])?")


def documented() -> dict[tuple[str, str], dict[str, str]]:
    """The cells of the table by column, by client and version."""
    heads = f"| client | {' | '.join(COLUMNS)} |"
    rows = DOCUMENT.partition(f"{heads}\n")[2].partition("\n\n")[0].splitlines()[1:]
    found = {}
    for row in rows:
        client, *cells = row.strip("| ").split(" | ")
        name, _, version = client.rpartition(" ")
        found[name, version] = dict(zip(COLUMNS, cells, strict=True))
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


def test_the_table_has_a_cell_for_each_check() -> None:
    rows = {client: cells for (client, _), cells in documented().items()}
    assert {client: {name for name, cell in cells.items() if cell != "-"} for client, cells in rows.items()} == checks()


def test_each_cell_works_and_its_note_is_there() -> None:
    notes = re.findall(r"^(\d+)\. ", DOCUMENT, re.MULTILINE)
    used = set()
    for client, cells in documented().items():
        for column, cell in cells.items():
            match = NOTED.fullmatch(cell)
            assert cell == "-" or match, (client, column, cell)
            used |= {match[2]} if match else set()
    assert used - {None} == set(notes)


def test_the_table_has_the_pinned_versions() -> None:
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
    heads, _, row_a, row_b, empty, *notes = table(found)
    assert heads.startswith(f"| client | {first} |")
    assert row_a.startswith("| a 1 | works [1] | - |")
    assert row_b.startswith("| b 2 | works [1] | works [2] | boom |")
    assert (empty, notes) == ("", ["1. N.", "2. M."])
