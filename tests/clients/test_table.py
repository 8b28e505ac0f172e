"""The table of docs/clients.md has a row for every check of a real client, and no other."""

from __future__ import annotations

import re
from pathlib import Path

from tests.clients.python_clients import CHECKS

ROOT = Path(__file__).resolve().parents[2]
NODE = (ROOT / "tests/clients/node_clients.mjs").read_text()
ROW = re.compile(r"^\| (\S+(?: \(Node\))?) [\d.]+ \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)


def test_the_table_of_clients_has_the_checks_that_are_run() -> None:
    checks = {(client, check) for client, checks in CHECKS.items() for check in checks}
    checks |= {
        (f"{client} (Node)", check) for client, check in re.findall(r'^  \["(\w+)", "([^"]+)"', NODE, re.MULTILINE)
    }
    rows = ROW.findall((ROOT / "docs/clients.md").read_text())

    assert {(client, check) for client, check, _ in rows} == checks
    assert len(rows) == len(checks)
