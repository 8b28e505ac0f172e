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
from serve_app.core.batches import BadRow, Line, LineSplitter, RowCheck
from serve_app.errors import BadRequest

CHUNK_BYTES = 256 * 1024
ROW = (
    '{"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", '
    '"body": {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]}}'
)
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
    check = _FileCheck(route)
    size = 0
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise BadRequest(f"{path} is no regular file")
        with path.open("rb") as file, ByteProgress(errors, f"checking {path.name}", found.st_size) as progress:
            while not check.has_enough and (chunk := file.read(CHUNK_BYTES)):
                check.feed(chunk)
                size += len(chunk)
                progress.advance(len(chunk))
    except OSError as error:
        raise BadRequest(f"{path}: {error.strerror}") from None
    check.end()
    if check.bad:
        raise BadRequest(f"{path}: {' '.join(check.bad)} Nothing was sent.")
    if check.route is None or not check.rows:
        raise BadRequest(f"{path} has no row; each line is one request, such as {ROW}")
    return CheckedFile(size, check.rows, check.route)


class _FileCheck:
    """`bad`: what is wrong with the first lines that are. `has_enough`: no more of it has to be read. `route`: what
    the rows are for."""

    def __init__(self, route: str | None) -> None:
        self.route = route
        self.rows = 0
        self.bad: list[str] = []
        self.has_enough = False
        self._lines = LineSplitter()
        self._check = RowCheck()

    def feed(self, chunk: bytes) -> None:
        try:
            for line in self._lines.feed(chunk):
                self._row(line)
        except BadRow as bad:  # a line without an end: what follows it is unknown
            self._wrong(bad.error.line, bad.error.message)
            self.has_enough = True

    def end(self) -> None:
        if not self.has_enough:
            for line in self._lines.end():
                self._row(line)

    def _row(self, line: Line) -> None:
        try:
            row = self._check.feed(line.data, line.number)
        except BadRow as bad:
            self._wrong(line.number, bad.error.message)
            return
        self.rows += 1
        self.route = self.route or row.url
        if row.url != self.route:
            self._wrong(line.number, f"The url is {row.url}, the batch is for {self.route}.")

    def _wrong(self, number: int | None, message: str) -> None:
        self.bad += [f"line {number}: {message}"] if len(self.bad) < SHOWN_LINES else []
        self.has_enough = len(self.bad) == SHOWN_LINES


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
        self._path = path
        self._size = size
        self._advance = advance
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
