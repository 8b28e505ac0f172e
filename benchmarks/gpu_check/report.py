"""The report of a run: Markdown for a file, a table for the terminal, one JSON object. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from benchmarks.gpu_check.checks import PASSED, Outcome, Result, exit_status

STYLES = {Outcome.PASS: "green", Outcome.FAIL: "bold red", Outcome.NOT_APPLICABLE: "dim"}


def verdict(results: Sequence[Result]) -> str:
    counts = {outcome: sum(one.outcome is outcome for one in results) for outcome in Outcome}
    parts = ", ".join(f"{count} {outcome.value}" for outcome, count in counts.items())
    return f"{'pass' if exit_status(results) == PASSED else 'FAIL'} ({parts})"


def table(results: Sequence[Result]) -> Table:
    """What the terminal shows."""
    made = Table("check", "ranks", "result", "seen")
    for result in results:
        made.add_row(
            result.check, result.part, Text(result.outcome.value, style=STYLES[result.outcome]), Text(result.seen)
        )
    return made


def markdown(results: Sequence[Result], command: str, conditions: Mapping[str, Any]) -> str:
    """The report's text: the verdict, all checks in one table, then the figures of each."""
    lines = ["# GPU check", "", f"**{verdict(results)}**", "", f"`{command}`", ""]
    lines += _records([{"check": r.check, "ranks": r.part, "result": r.outcome.value, "seen": r.seen} for r in results])
    for result in results:
        if result.figures:
            lines += [
                "",
                f"## {' '.join(filter(None, (result.check, result.part)))}: {result.outcome.value}",
                "",
                result.seen,
                "",
            ]
            lines += _figures(result.figures)
    lines += ["", "## Conditions", "", *_code(json.dumps(conditions, indent=1, default=str))]
    return "\n".join(lines) + "\n"


def as_json(results: Sequence[Result], conditions: Mapping[str, Any], file: str) -> dict[str, Any]:
    return {
        "verdict": "pass" if exit_status(results) == PASSED else "fail",
        "checks": [one.as_json() for one in results],
        "report": file,
        "conditions": dict(conditions),
    }


def _figures(figures: Mapping[str, Any]) -> list[str]:
    """A list of the plain ones, and a table or a block for each of the others."""
    lines = []
    long = list[str]()
    for name, value in figures.items():
        if isinstance(value, list) and value and isinstance(value[0], Mapping):
            long += ["", f"{name}:", "", *_records(value)]
        elif isinstance(value, str) and "\n" in value:
            long += ["", f"{name}:", "", *_code(value)]
        elif isinstance(value, Mapping):
            lines.append(f"- {name}: " + ", ".join(f"{key} {_shown(one)}" for key, one in value.items()))
        else:
            lines.append(f"- {name}: {_shown(value)}")
    return lines + long


def _records(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A Markdown table."""
    head = list(rows[0]) if rows else []
    cells = [[_shown(row[name]).replace("|", "\\|").replace("\n", " ") for name in head] for row in rows]
    return [f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *cells)]


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _code(text: str) -> list[str]:
    return ["```", *text.strip("\n").splitlines(), "```"]
