"""Checks the lines of a batch's input file while it is uploaded.

Invariant: a file that passes has at least one row and `max_rows` at most; the first line that is wrong is refused with
its number. Of the file one unfinished line is held.
"""

from __future__ import annotations

from collections.abc import Iterable

from serve_app.core.batches import BadRow, Line, LineSplitter, RowCheck
from serve_app.errors import BadRequest


class LineCheck:
    """Checks one file, given in pieces. Each method raises BadRequest for the first line that is wrong."""

    def __init__(self, max_rows: int) -> None:
        self._max_rows = max_rows
        self._lines = LineSplitter()
        self._check = RowCheck()
        self._rows = 0

    @property
    def pending(self) -> int:
        """Bytes of the unfinished line."""
        return self._lines.pending

    def feed(self, piece: bytes) -> None:
        """Check the lines that end in this piece."""
        self._check_lines(self._lines.feed(piece))

    def end(self) -> None:
        """Check the last line. Raises BadRequest also if no line was a row."""
        self._check_lines(self._lines.end())
        if not self._rows:
            raise BadRequest("`file` has no row: each line is a request as JSON", param="file", code="empty_file")

    def _check_lines(self, lines: Iterable[Line]) -> None:
        try:
            for line in lines:
                self._rows += 1
                if self._rows > self._max_rows:
                    message = f"a batch has {self._max_rows} rows at most (batch.max_rows)"
                    raise BadRequest(f"`file`, line {line.number}: {message}", param="file", code="too_many_rows")
                self._check.feed(line.data, line.number)
        except BadRow as bad:
            error = bad.error
            raise BadRequest(f"`file`, line {error.line}: {error.message}", param="file", code=error.code) from None
