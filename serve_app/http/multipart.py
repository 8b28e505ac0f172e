"""A form with a file (multipart/form-data, RFC 7578), read as it arrives: the file is never in memory as a whole.

Invariant: what is held of a form is one message of its body, the headers of one part, and text of at most
`MAX_TEXT_BYTES`. A form is refused as soon as it is known to be too large, too slow or malformed; `param` names the
field.

Decided here: a part with a `filename` is a file, any other is text. Parts come in any order. What is behind the last
boundary is read and dropped.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header

from serve_app.errors import BadRequest, BodyTooLarge, BodyTooSlow, UnsupportedContent
from serve_app.http.body import ARRIVAL_BYTES_PER_S, ARRIVAL_S, SHOWN_HEADER_CHARS, Receive, content_length
from serve_app.http.fields import SHOWN_NAME_CHARS

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

FORM_BYTES = 65_536  # beside the file: boundaries, headers and the other fields of a form
MAX_TEXT_BYTES = 1024  # of a field that is no file: OpenAI's are words and numbers
MAX_PARTS = 16  # a form of OpenAI's has four
# of a part; a client sends two or three short ones
MAX_PART_HEADERS = 8
MAX_HEADER_BYTES = 4096
MAX_NAME_CHARS = 255  # of a file, as file systems have it
SLICE_BYTES = 2**16  # parsed in one step, so that a long message of a body does not hold the event loop
_PLAIN_ENCODINGS = (b"", b"binary", b"8bit", b"7bit")  # of a part: its bytes are the content


@dataclass(frozen=True, slots=True)
class FormPart:
    """The beginning of a part. `filename`: None, if it is text."""

    name: str
    filename: str | None


class FormReader:
    """Reads the parts of one form, one after the other.

    Args:
        headers: of the request, names in lower case.
        receive: ASGI's.
        max_file_bytes: of the file in the form; `setting`: where this is set.

    Raises:
        UnsupportedContent: not a form in parts, or a compressed one. BadRequest: no boundary, or a Content-Length that
        is not a number. BodyTooLarge: by its Content-Length.
    """

    def __init__(
        self,
        headers: Mapping[bytes, bytes],
        receive: Receive,
        max_file_bytes: int,
        setting: str = "batch.max_file_bytes",
    ) -> None:
        self._receive = receive
        self._max_file_bytes = max_file_bytes
        self._setting = setting
        boundary = _boundary(headers)
        self._check_size(content_length(headers))
        callbacks: MultipartCallbacks = {
            "on_part_begin": self._begin_part,
            "on_header_field": lambda data, start, end: self._header_name.extend(data[start:end]),
            "on_header_value": lambda data, start, end: self._header_value.extend(data[start:end]),
            "on_header_end": self._end_header,
            "on_headers_finished": self._end_headers,
            "on_part_data": lambda data, start, end: self._found.append(data[start:end]),
            "on_part_end": lambda: self._found.append(None),
            "on_end": self._end_form,
        }
        try:
            self._parser = MultipartParser(
                boundary, callbacks, max_header_count=MAX_PART_HEADERS, max_header_size=MAX_HEADER_BYTES
            )
        except FormParserError as error:
            raise BadRequest(f"the boundary of the form is not valid: {error}", param="Content-Type") from None
        self._header_name = bytearray()
        self._header_value = bytearray()
        self._part_headers: dict[bytes, bytes] = {}
        self._found: deque[FormPart | bytes | None] = deque()  # not read yet; None: the end of a part
        self._in_part = self._is_complete = self._has_ended = False
        self._size = 0
        self._parts = 0
        self._waited_s = 0.0  # for the client

    async def next_part(self) -> FormPart | None:
        """The next part; None: the form is complete. What was not read of the part before it is dropped.

        Raises:
            BadRequest: malformed, cut off, or too many parts. BodyTooLarge. BodyTooSlow.
            CancelledError: the client has disconnected.
        """
        while (found := await self._next()) is not None or self._in_part:
            if isinstance(found, FormPart):
                self._in_part = True
                return found
            self._in_part = found is not None
        return None

    async def file(self) -> AsyncIterator[bytes]:
        """The content of the part, as it arrives. Raises as `next_part`; BodyTooLarge: more than a file may have."""
        size = 0
        while isinstance(found := await self._next(), bytes):
            size += len(found)
            if size > self._max_file_bytes:
                raise _too_large(self._max_file_bytes, self._setting)
            yield found
        self._in_part = False

    async def text(self, name: str) -> str:
        """The content of the part of this name. Raises as `next_part`, and BadRequest: too long, or not UTF-8."""
        content = bytearray()
        while isinstance(found := await self._next(), bytes):
            content += found
            if len(content) > MAX_TEXT_BYTES:
                raise BadRequest(f"`{name}` may have {MAX_TEXT_BYTES} bytes at most", param=name)
        self._in_part = False
        try:
            return content.decode()
        except UnicodeDecodeError:
            raise BadRequest(f"`{name}` is not valid UTF-8", param=name) from None

    async def _next(self) -> FormPart | bytes | None:
        """What the parser finds next; None: the end of the part, or of the form."""
        while not self._found:
            if self._has_ended:
                return None
            await self._read()
        return self._found.popleft()

    async def _read(self) -> None:
        """Parse the next message of the body."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        left_s = ARRIVAL_S + self._size / ARRIVAL_BYTES_PER_S - self._waited_s
        try:
            async with asyncio.timeout(left_s):
                message = await self._receive()
        except TimeoutError:
            raise BodyTooSlow(f"the form did not arrive in time: {self._size} bytes of it did", param="body") from None
        self._waited_s += loop.time() - began
        if message["type"] == "http.disconnect":
            raise asyncio.CancelledError
        chunk: bytes = message.get("body", b"")
        self._size += len(chunk)
        self._check_size(self._size)
        try:
            for start in range(0, len(chunk), SLICE_BYTES):
                if start:
                    await asyncio.sleep(0)
                self._parser.write(chunk if len(chunk) <= SLICE_BYTES else chunk[start : start + SLICE_BYTES])
        except FormParserError as error:
            raise BadRequest(f"the form is malformed: {error}", param="body") from None
        if not message.get("more_body", False):
            self._has_ended = True
            if not self._is_complete:
                raise BadRequest("the form ends before its last boundary", param="body")

    def _check_size(self, size: int) -> None:
        if size > self._max_file_bytes + FORM_BYTES:
            raise _too_large(self._max_file_bytes, self._setting)

    def _begin_part(self) -> None:
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise BadRequest(f"the form has more than {MAX_PARTS} parts", param="body")
        self._part_headers = {}

    def _end_header(self) -> None:
        self._part_headers[bytes(self._header_name).lower()] = bytes(self._header_value)
        self._header_name.clear()
        self._header_value.clear()

    def _end_headers(self) -> None:
        self._found.append(_part(self._part_headers))

    def _end_form(self) -> None:
        self._is_complete = True


def _boundary(headers: Mapping[bytes, bytes]) -> bytes:
    """The boundary that the headers of a request name."""
    kind = headers.get(b"content-type", b"")
    media, options = parse_options_header(kind)
    if media != b"multipart/form-data":
        shown = kind[:SHOWN_HEADER_CHARS].decode("latin-1")
        raise UnsupportedContent(
            f"a file is sent as multipart/form-data, the Content-Type header says {shown!r}", param="Content-Type"
        )
    if headers.get(b"content-encoding", b"").strip().lower() not in (b"", b"identity"):
        raise UnsupportedContent("a form with a file may not be compressed", param="Content-Encoding")
    boundary = options.get(b"boundary", b"")
    if not boundary:
        raise BadRequest("the Content-Type header names no boundary of the form", param="Content-Type")
    return boundary


def _part(headers: Mapping[bytes, bytes]) -> FormPart:
    """The part with these headers."""
    kind, options = parse_options_header(headers.get(b"content-disposition"))
    try:
        name = options.get(b"name", b"").decode()
        filename = options.get(b"filename", b"").decode()
    except UnicodeDecodeError:
        raise BadRequest("a name in the form is not valid UTF-8", param="body") from None
    if kind != b"form-data" or not name:
        raise BadRequest("a part of the form has no name (Content-Disposition: form-data; name=...)", param="body")
    shown = name[:SHOWN_NAME_CHARS]
    if headers.get(b"content-transfer-encoding", b"").strip().lower() not in _PLAIN_ENCODINGS:
        raise BadRequest(f"`{shown}` has a Content-Transfer-Encoding, which forms do not have", param=shown)
    if len(filename) > MAX_NAME_CHARS or not filename.isprintable():
        raise BadRequest(
            f"`{shown}`: a file's name has {MAX_NAME_CHARS} characters at most, all printable", param=shown
        )
    return FormPart(name, filename or None)


def _too_large(max_file_bytes: int, setting: str) -> BodyTooLarge:
    return BodyTooLarge(f"a file may have {max_file_bytes} bytes at most ({setting})", param="file")
