"""What a line of a batch's input file must be, and the request that it is.

Invariant: whatever the bytes of a line are, `read_row` returns a request or raises `BadRow`, in time linear in the
bytes. Reading a file needs the memory of its longest line, and 8 bytes of each `custom_id` to see that it is unique.

Decided here: extra fields of a line are ignored. A line of spaces alone is no row. Half a surrogate pair, which no text
sent to a router can hold, is refused by its place. The bounds are those that protect a process; what a router refuses
beyond them is the result of the row.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from serve_app.core.batches.records import RowError
from serve_app.core.json_bounds import has_more_values, is_deeper, path_of

ENDPOINTS = (
    "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/messages",
    "/v2/embed", "/pooling", "/classify",
)  # fmt: skip

MAX_NAME_CHARS = 512  # of a `custom_id`, and of a model: each is in the store, in an index
MAX_LINE_BYTES = 32 * 2**20  # four times the default bound of a request's body
MAX_DEPTH = 513  # the largest `http.max_json_depth`, and the object of the line around its `body`
MAX_VALUES = 2_000_000  # parsing them takes 0.2 s; the default bound of a request is an eighth
SHOWN_CHARS = 64  # of a wrong value in a message: enough to see the mistake
SHOWN_PATH_CHARS = 256  # of its place, the last ones
BLANK_LINES = re.compile(rb"[ \t\r\n\v\f]*\n")  # passed at once: 200 MB of them, one by one, are minutes of a processor
# The text up to half a surrogate pair, written as an escape. Possessive: no byte is looked at twice.
HALF_PAIR = re.compile(rb"(?:[^\\]++|\\[^u]|\\u(?![dD][89a-fA-F])|\\u[dD][89abAB]..\\u[dD][c-fC-F])*+\\u", re.DOTALL)
SURROGATE = re.compile("[\ud800-\udfff]")
ID_DIGEST_BYTES = 8  # 50,000 ids: two of them collide with a probability of 1e-10, and the file is refused

# Prompts sort by their first bytes, compared in these steps: rows that share 1 KiB are together, among those that share
# 256 bytes of it, among those that share 64.
PREFIX_BYTES = (64, 256, 1024)
PREFIX_STEP_BITS = 21  # three steps are 63 bits: a signed number of 64 bits in the store
_PROMPT_FIELDS = (
    "system",
    "instructions",
    "messages",
    "input",
    "prompt",
    "texts",
)  # in the order in which a model sees them
_MESSAGE_FIELDS = ("role", "content", "text")  # of a message, or of a part of its content

_TYPE_NAMES: dict[type, str] = {
    dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class RowRequest:
    """The request of a row. `prefix`: rows whose prompts begin with the same KiB have the same one, and in its order
    those with less in common are near each other; it is the same in every process."""

    custom_id: str
    method: str
    url: str
    body: dict[str, Any]
    model: str
    prefix: int


class BadRow(Exception):
    """A line is no row: `error` says which line, where in it, and why."""

    def __init__(self, error: RowError) -> None:
        super().__init__(error)
        self.error = error


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a file. `number` counts from 1, and empty lines too; `data` is without the end of the line."""

    number: int
    offset: int
    data: bytes


class LineSplitter:
    """Splits a file that comes in chunks. Lines end with LF or CR LF, the last one with either or with nothing; lines
    of spaces alone are left out. Of the file one unfinished line is held."""

    def __init__(self, max_line_bytes: int = MAX_LINE_BYTES) -> None:
        self.pending = 0  # bytes of the unfinished line
        self._max_line_bytes = max_line_bytes
        self._parts: list[bytes] = []  # of the unfinished line
        self._number = 1
        self._offset = 0

    def feed(self, chunk: bytes) -> Iterator[Line]:
        """The lines that end in this chunk; the caller takes all of them. Raises BadRow: a line is too long."""
        start = 0
        while (end := chunk.find(b"\n", start)) >= 0:
            if not self.pending and (blank := BLANK_LINES.match(chunk, start)) is not None:
                self._number += chunk.count(b"\n", start, blank.end())
                self._offset += blank.end() - start
                start = blank.end()
                continue
            self._extend(chunk[start:end])
            line = self._take(end_bytes=1)
            if line is not None:
                yield line
            start = end + 1
        self._extend(chunk[start:])

    def end(self) -> Iterator[Line]:
        """The last line, if no end of line ended it."""
        line = self._take(end_bytes=0)
        if line is not None:
            yield line

    def _extend(self, part: bytes) -> None:
        self.pending += len(part)
        if self.pending > self._max_line_bytes:
            message = f"The line is longer than {self._max_line_bytes} bytes."
            raise BadRow(RowError("line_too_long", message, self._number))
        if part:
            self._parts.append(part)

    def _take(self, end_bytes: int) -> Line | None:
        """The line that is complete now; None: it is empty."""
        data = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        line = Line(self._number, self._offset, data.removesuffix(b"\r"))
        self._number += 1
        self._offset += self.pending + end_bytes
        self._parts = []
        self.pending = 0
        return line if data.strip() else None


class RowCheck:
    """Reads the rows of one file. Raises what `read_row` does, and for a `custom_id` of an earlier row."""

    def __init__(self) -> None:
        self._ids: set[bytes] = set()

    def feed(self, line: bytes, number: int) -> RowRequest:
        row = read_row(line, number)
        digest = hashlib.blake2b(row.custom_id.encode(), digest_size=ID_DIGEST_BYTES).digest()
        if digest in self._ids:
            shown = _shown(row.custom_id)
            message = f"The custom_id {shown} is that of an earlier row: each row needs one of its own."
            raise BadRow(RowError("duplicate_custom_id", message, number, "custom_id"))
        self._ids.add(digest)
        return row


def read_row(line: bytes, number: int) -> RowRequest:
    """The request of a line; `number` is named where it is wrong.

    Raises:
        BadRow: not JSON in UTF-8, too long or too deep, a field missing or wrong.
    """
    try:
        return _row(read_object(line))
    except BadRow as bad:
        raise BadRow(replace(bad.error, line=number)) from None


def read_object(line: bytes, noun: str = "line") -> dict[str, Any]:
    """The JSON object of a line, or of another text called `noun`. Raises as `read_row`."""
    if len(line) > MAX_LINE_BYTES:
        _refuse("line_too_long", f"The {noun} is longer than {MAX_LINE_BYTES} bytes.")
    if has_more_values(line, MAX_VALUES):
        _refuse("invalid_json_line", f"The {noun} has more than {MAX_VALUES} values.")
    too_deep = f"The {noun} is nested deeper than {MAX_DEPTH} levels."
    unreadable = f"This {noun} is not parseable as valid JSON"
    try:
        value = json.loads(line.decode(), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        _refuse("invalid_json_line", f"This {noun} is not valid UTF-8 at byte {error.start}.")
    except json.JSONDecodeError as error:
        _refuse("invalid_json_line", f"{unreadable}: {error.msg} at character {error.pos}.")
    except ValueError:
        _refuse("invalid_json_line", f"{unreadable}: a number has too many digits.")
    except RecursionError:
        _refuse("invalid_json_line", too_deep)
    if type(value) is not dict:
        _refuse("invalid_json_line", f"This {noun} must be a JSON object, it is {_type_of(value)}.")
    if is_deeper(line, value, MAX_DEPTH):
        _refuse("invalid_json_line", too_deep)
    if HALF_PAIR.match(line) is not None:
        _refuse_half_pair(value, noun)
    return value


def _refuse_half_pair(value: dict[str, Any], noun: str) -> NoReturn:
    path = path_of(value, lambda part: type(part) is str and SURROGATE.search(part) is not None)
    if path is None:
        _refuse("invalid_value", f"This {noun} has a name with half a surrogate pair.")
    shown = ascii(path if noun == "line" else f"{noun}.{path}")[1:-1][-SHOWN_PATH_CHARS:]
    _refuse("invalid_value", f"The {shown} has half a surrogate pair.", shown)


def _row(fields: Mapping[str, Any]) -> RowRequest:
    custom_id = _name(fields, "custom_id")
    method = _field(fields, "method")
    url = _field(fields, "url")
    body = _field(fields, "body")
    if method != "POST":
        _refuse("invalid_method", f"The method must be POST, it is {_shown(method)}.", "method")
    if url not in ENDPOINTS:
        _refuse("invalid_url", f"The url must be one of {', '.join(ENDPOINTS)}, it is {_shown(url)}.", "url")
    if type(body) is not dict:
        _refuse("invalid_type", f"The body must be an object, it is {_type_of(body)}.", "body")
    return RowRequest(custom_id, method, url, body, model_of(body), _prefix(body))


def model_of(body: Mapping[str, Any]) -> str:
    """The model of a request's body. Raises BadRow: it names none, or the answer would be streamed."""
    model = _name(body, "model", "body.")
    if body.get("stream") not in (None, False):
        _refuse("invalid_value", "The request of a batch cannot be streamed.", "body.stream")
    return model


def _field(fields: Mapping[str, Any], name: str, above: str = "") -> Any:
    if name not in fields:
        _refuse("missing_required_parameter", f"Missing required parameter: '{above}{name}'.", above + name)
    return fields[name]


def _name(fields: Mapping[str, Any], name: str, above: str = "") -> str:
    """A text that databases can keep."""
    value = _field(fields, name, above)
    param = above + name
    if type(value) is not str:
        _refuse("invalid_type", f"The {param} must be a string, it is {_type_of(value)}.", param)
    if not 1 <= len(value) <= MAX_NAME_CHARS:
        message = f"The {param} must have 1 to {MAX_NAME_CHARS} characters, it has {len(value)}."
        _refuse("invalid_value", message, param)
    if "\0" in value:
        _refuse("invalid_value", f"The {param} has a NUL.", param)
    return value


def _prefix(body: Mapping[str, Any]) -> int:
    data = _beginning(body)
    number = 0
    for size in PREFIX_BYTES:
        digest = hashlib.blake2b(data[:size], digest_size=8).digest()
        number = number << PREFIX_STEP_BITS | int.from_bytes(digest) >> (64 - PREFIX_STEP_BITS)
    return number


def _beginning(body: Mapping[str, Any]) -> bytes:
    """The first bytes of what the model sees, whatever the form of the contents of messages is."""
    most = PREFIX_BYTES[-1]
    found: list[str] = []
    size = 0
    pending: list[Iterator[Any]] = [iter([body.get(field) for field in _PROMPT_FIELDS])]
    while pending and size < most:
        value = next(pending[-1], pending)  # the list itself marks the end: no value of JSON is it
        if value is pending:
            pending.pop()
        elif type(value) is dict:
            pending.append(iter([value.get(field) for field in _MESSAGE_FIELDS]))
        elif type(value) is list:
            pending.append(iter(value))
        elif type(value) in (str, int):  # integers are token ids
            found.append(str(value)[:most])
            size += len(found[-1]) + 1
    return "\x1e".join(found).encode("utf-8", "surrogatepass")[:most]


def _refuse(code: str, message: str, param: str | None = None) -> NoReturn:
    raise BadRow(RowError(code, message, param=param))


def _refuse_constant(name: str) -> NoReturn:
    _refuse("invalid_json_line", f"Not parseable as valid JSON: {name} is no number of JSON.")


def _type_of(value: Any) -> str:
    return _TYPE_NAMES.get(type(value), "a number")


def _shown(value: Any) -> str:
    """A value for a message, in ASCII."""
    if type(value) is not str:
        return _type_of(value)
    return ascii(value[:SHOWN_CHARS]) + ("..." if len(value) > SHOWN_CHARS else "")
