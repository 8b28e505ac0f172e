"""Checks the lines of a batch's input file while it is uploaded.

Invariant: a file that passes has at least one row and `max_rows` at most, none longer than a request's body may be; the
first line that is wrong is refused with its number. Of the file one unfinished line is held.
"""

from __future__ import annotations

from serve_app.core.batches import BadRow, RowCheck
from serve_app.errors import BadRequest


class LineCheck:
    """Checks one file, given in pieces.

    Args:
        max_line_bytes: of one line.
    """

    def __init__(self, max_rows: int, max_line_bytes: int) -> None:
        self._max_rows, self._max_line_bytes = max_rows, max_line_bytes
        self._rows = RowCheck()
        self._line: list[bytes] = []  # of the line that is not complete
        self._number = 1  # of that line
        self.pending = 0  # bytes of that line

    def feed(self, piece: bytes) -> None:
        """Check the lines that end in this piece. Raises BadRequest: one of them is wrong."""
        *ended, rest = piece.split(b"\n")
        for end in ended:
            self._extend(end)
            self._check_line()
        self._extend(rest)

    def end(self) -> None:
        """Check the last line, if no newline ends it. Raises BadRequest: it is wrong, or there was no line."""
        if self.pending:
            self._check_line()
        if self._number == 1:
            raise BadRequest("`file` has no line: each line is a request as JSON", param="file", code="empty_file")

    def _extend(self, part: bytes) -> None:
        self.pending += len(part)
        if self.pending > self._max_line_bytes:
            raise self._bad("too_long", f"it has more than {self._max_line_bytes} bytes (http.max_body_bytes)")
        if part:
            self._line.append(part)

    def _check_line(self) -> None:
        line = self._line[0] if len(self._line) == 1 else b"".join(self._line)
        if self._number > self._max_rows:
            raise self._bad("too_many_rows", f"a batch has {self._max_rows} rows at most (batch.max_rows)")
        try:
            self._rows.feed(line, self._number)
        except BadRow as bad:
            raise self._bad(bad.error.code, bad.error.message) from None
        self._line, self.pending = [], 0
        self._number += 1

    def _bad(self, code: str, message: str) -> BadRequest:
        return BadRequest(f"`file`, line {self._number}: {message}", param="file", code=code)
