"""The states of both ends of the queue's protocol, as `docs/explanation/architecture.md` shows them.

`python -m tests.states_table` writes them there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from serve_app.core.shared_queue.states import TABLES, PeerEvent, StateTable

DOCUMENT = Path(__file__).parent.parent / "docs/explanation/architecture.md"
BEGIN = "<!-- states: written by `python -m tests.states_table` -->\n"
END = "<!-- end of states -->\n"


def tables() -> str:
    """All tables, each below its title."""
    return "\n".join(_table(one) for one in TABLES)


def _table(table: StateTable[Any]) -> str:
    lines = [f"**{table.title}.** " + " ".join(f"{state.name}: {state.value}." for state in table.states), ""]
    lines += ["| state | event | then |", "| --- | --- | --- |"]
    for row in table.rows:
        states = "any" if len(row.states) == len(table.states) else _names(row.states)
        events = "; ".join(event.value for event in row.events)
        then = "" if row.then is None else f"**{row.then.name}**"
        lines.append(f"| {states} | {events} | {': '.join(filter(None, (then, row.effect)))} |")
    return "\n".join([*lines, "", f"Illegal: {_illegal(table)}.", ""])


def _illegal(table: StateTable[Any]) -> str:
    """The messages that only a faulty peer sends, by the states in which they are."""
    found: dict[str, list[str]] = {}
    for event in table.events:
        if isinstance(event, PeerEvent):
            states = [state for state in table.states if table.is_illegal(state, event)]
            names = found.setdefault(_names(states), [])
            names += [name for name in re.findall("`[A-Z][a-z]\\w+`", event.value) if name not in names]
    return "; ".join(f"while {states}: {', '.join(names)}" for states, names in found.items() if states and names)


def _names(states: Iterable[Any]) -> str:
    return ", ".join(state.name for state in states)


def written(text: str) -> str:
    """The document with these tables."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{tables()}\n{END}{after}"


if __name__ == "__main__":
    DOCUMENT.write_text(written(DOCUMENT.read_text()))
