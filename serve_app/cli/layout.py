"""The form of everything that the commands list: aligned columns on a terminal, tab-separated lines in a pipe.

Piped, a record is one line: its kind, then its columns, always the same ones (`-` where there is no value). On a
terminal a record takes one line where that fits, else several, indented ones.

Invariant: no line is wider than the terminal, unless one word is, and no name is ever cut or broken.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

GAP = "  "
INDENT = "  "
NOTHING = "-"


def show_unrecorded(found: Mapping[str, Any], console: Console) -> None:
    """Print why the audit record lacks what was done, if it does."""
    if reason := found.get("unrecorded"):
        Listing(console).say(reason, ("unrecorded", reason), style="yellow")


class Listing:
    """Prints records and sentences to a console."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._piped = not console.is_terminal

    def say(self, text: str, record: Sequence[str] | None = None, *, style: str = "", indent: int = 0) -> None:
        """Print sentences, broken between words. In a pipe: the `record` instead, if there is one; an empty one is
        nothing, for what other records say."""
        if record is None and self._piped:
            self._out(INDENT * indent + _one_line(text))
        else:
            self._print(text.split(), record or (), style, indent, gap=" ")

    def flow(self, parts: Sequence[str], record: Sequence[str], *, style: str = "", indent: int = 0) -> None:
        """Print the parts, none of them broken; in a pipe the `record`."""
        self._print(parts, record, style, indent, GAP)

    def _print(self, parts: Sequence[str], record: Sequence[str], style: str, indent: int, gap: str) -> None:
        if not self._piped:
            for line in fill(parts, self._console.width, indent, gap):
                self._out(line, style)
        elif record:
            self._out("\t".join(map(_cell, record)))

    def table(
        self,
        kind: str,
        columns: Sequence[str],
        rows: Iterable[Sequence[str]],
        *,
        under: Sequence[str] = (),
        headed: bool = True,
        indent: int = 0,
        styles: Sequence[str] = (),
    ) -> None:
        """Print a row for each record.

        Args:
            kind: of the records, their first column in a pipe.
            under: the next columns in a pipe, which on a terminal the line above shows.
            headed: whether a terminal shows the columns' names.
            styles: of each row, on a terminal.
        """
        cells = [[_cell(cell) for cell in row] for row in rows]
        if self._piped:
            for row in cells:
                self._out("\t".join([kind, *map(_cell, under), *row]))
            return
        if not headed:  # then an empty value needs no sign
            cells = [["" if cell == NOTHING else cell for cell in row] for row in cells]
        shown = [list(columns), *cells] if headed and cells else cells
        widths = [max(map(cell_len, column)) for column in zip(*shown, strict=True)]
        whole = len(INDENT) * indent + sum(widths) + len(GAP) * (len(widths) - 1)
        if whole <= self._console.width:
            for number, row in enumerate(shown):
                padded = (cell + " " * (width - cell_len(cell)) for cell, width in zip(row, widths, strict=True))
                line = (INDENT * indent + GAP.join(padded)).rstrip()
                self._out(line, "bold" if headed and not number else self._style(styles, number - headed))
            return
        room = self._console.width - len(INDENT) * (indent + 1)
        for number, row in enumerate(cells):
            parts = [row[0]]
            for name, cell in zip(columns[1:], row[1:], strict=True):
                if headed and cell_len(f"{name} {cell}") <= room:
                    parts.append(f"{name} {cell}")
                else:
                    parts += [name, cell] if headed else filter(None, [cell])
            for line in fill(parts, self._console.width, indent):
                self._out(line, self._style(styles, number))

    @staticmethod
    def _style(styles: Sequence[str], number: int) -> str:
        return styles[number] if styles else ""

    def _out(self, line: str, style: str = "") -> None:
        if self._piped:
            self._console.file.write(line + "\n")  # rich would turn tabs into spaces
        else:
            self._console.print(Text(line, style=style), soft_wrap=True)


def say(console: Console, text: str | Text, style: str = "") -> None:
    """Print a line as it is: no markup, no colours by its words, no breaks of ours."""
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def fill(parts: Sequence[str], width: int, indent: int = 0, gap: str = GAP) -> list[str]:
    """The parts, none of them broken, in lines of at most `width` columns; all but the first are indented once more."""
    first = INDENT * indent
    others = INDENT * (indent + 1)
    lines = []
    line = first
    for part in parts:
        if line in (first, others) and not line.strip():
            line += part
        elif cell_len(line) + len(gap) + cell_len(part) <= width:
            line += gap + part
        else:
            lines.append(line)
            line = others + part
    return [*lines, line]


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _cell(text: str) -> str:
    return _one_line(text) or NOTHING
