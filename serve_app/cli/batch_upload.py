"""A file on its way to an endpoint: its form is checked before a byte is sent, then it is read as it is sent.

Invariant: a `FormUpload` yields as many bytes as its length says, and holds one chunk of them at a time.
"""

from __future__ import annotations

import secrets
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from serve_app.cli.progress import ByteProgress
from serve_app.core.batches import BadRow, RowCheck, RowError
from serve_app.errors import BadRequest

CHUNK_BYTES = 256 * 1024
MAX_LINE_BYTES = 64 * 2**20  # more than a router takes as a request; bounds what a file without a newline costs
SHOWN_LINES = 3  # bad ones: enough to see whether they are wrong in the same way


@dataclass(frozen=True, slots=True)
class CheckedFile:
    """A file whose lines are all right. `route`: what its rows are for."""

    size: int
    rows: int
    route: str


def checked(path: Path, route: str | None, errors: Console) -> CheckedFile:
    """Check each line of a file, as the endpoint will.

    Args:
        route: that the rows have to be for; None: the first row's.
        errors: for the progress.

    Raises:
        BadRequest: it cannot be read, has no line, or lines that are wrong; the first of them are named.
    """
    lines = _LineCheck(route)
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise BadRequest(f"{path} is no file that can be read twice")
        with path.open("rb") as file, ByteProgress(errors, f"checking {path.name}", found.st_size) as progress:
            while len(lines.bad) < SHOWN_LINES and (line := file.readline(MAX_LINE_BYTES)):
                lines.feed(line)
                progress.advance(len(line))
            size = file.tell()
    except OSError as error:
        raise BadRequest(f"{path}: {error.strerror}") from None
    if lines.bad:
        raise BadRequest(f"{path}: {'; '.join(lines.bad)}; nothing was sent")
    if lines.route is None or not lines.number:
        raise BadRequest(f"{path} has no line; each line is a request as JSON, see docs/batches.md")
    return CheckedFile(size, lines.number, lines.route)


class _LineCheck:
    """`bad`: what is wrong with the first lines that are. `number`: lines read. `route`: what the rows are for."""

    def __init__(self, route: str | None) -> None:
        self.route, self.number = route, 0
        self.bad: list[str] = []
        self._rows = RowCheck()

    def feed(self, line: bytes) -> None:
        self.number += 1
        try:
            if len(line) == MAX_LINE_BYTES:
                raise BadRow(RowError("too_long", f"it has more than {MAX_LINE_BYTES:,} bytes"))
            row = self._rows.feed(line.removesuffix(b"\n"), self.number)
        except BadRow as bad:
            self.bad.append(f"line {self.number}: {bad.error.message}")
            return
        self.route = self.route or row.url
        if row.url != self.route:
            self.bad.append(f"line {self.number}: its url is {row.url}, the batch is for {self.route}")


class FormUpload:
    """The body `multipart/form-data` of some fields and one file, for `requests`, which sends what has a length and can
    be iterated piece by piece.

    Args:
        size: of the file, in bytes; so many are sent.
        fields: come before the file.
        advance: is called with the number of bytes of each piece that was sent.
    """

    def __init__(self, path: Path, size: int, fields: Mapping[str, str], advance: Callable[[int], None]) -> None:
        boundary = secrets.token_hex(16)
        self.content_type = f"multipart/form-data; boundary={boundary}"
        self.sent = 0
        self._path, self._size, self._advance = path, size, advance
        parts = [
            f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'
            for name, value in fields.items()
        ]
        parts.append(
            f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="{_quoted(path.name)}"\r\n'
            "Content-Type: application/jsonl\r\n\r\n"
        )
        self._head = "".join(parts).encode("utf-8", "replace")
        self._tail = f"\r\n--{boundary}--\r\n".encode()

    def __len__(self) -> int:
        return len(self._head) + self._size + len(self._tail)

    def __iter__(self) -> Iterator[bytes]:
        for piece in self._pieces():
            yield piece
            self.sent += len(piece)
            self._advance(len(piece))

    def _pieces(self) -> Iterator[bytes]:
        yield self._head
        left = self._size
        try:
            with self._path.open("rb") as file:
                while left and (piece := file.read(min(left, CHUNK_BYTES))):
                    left -= len(piece)
                    yield piece
        except OSError as error:  # `requests` would take it for one of the network
            raise BadRequest(f"{self._path}: {error.strerror}; nothing was submitted") from None
        if left:
            raise BadRequest(f"{self._path} has become shorter while it was sent; nothing was submitted")
        yield self._tail


def _quoted(name: str) -> str:
    """A file's name between quotes, as browsers write it into a form."""
    return name.replace('"', "%22").replace("\r", "%0D").replace("\n", "%0A")
