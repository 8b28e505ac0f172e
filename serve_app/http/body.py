"""The request body: bytes in, a plain `dict` out, or a refusal that names the position of the error.

Invariant: `read` returns at most `max_body_bytes` bytes. Whatever they are, `decode` returns a dict of at most
`max_json_depth` levels and `max_json_values` values, or raises a `BadRequest`, in time linear in the bytes and without
recursion here. A field of the body that is null is one that was not sent. Work on each value of a large
body runs outside the event loop, one body after another (`BodyThread`).

Decisions where the JSON standard is open:

- null asks for nothing: SDKs send it for a parameter that was not set. `NULLS_KEPT` are the exceptions, and a body
  that changes what is there, where null takes away. Below the top level the engine says what null is: a value of a
  schema, or a field of a message, a part or a tool that is not there.
- A key given twice: the last one counts. The body is parsed once and only the decoded dict travels on, so no second
  parser can read it differently.
- NaN, Infinity, numbers beyond a double, integers beyond 64 bits: refused. Other integers stay exact. (Found by fuzzing
  vLLM 0.32.0: an integer beyond 64 bits fails on its way to EngineCore and looks like a lost engine.)
- Bytes that are not UTF-8, a byte order mark, half a surrogate pair written as an escape: refused, because such text
  cannot be encoded again on its way to the engine. An escaped NUL is an ordinary character.
- The top level counts as depth 1, and must be an object.
- Content-Type: absent or `application/json` with any parameters. Content-Encoding: none or gzip, inflated up to
  `max_body_bytes` and no byte further. Anything else is a 415.
"""

from __future__ import annotations

import asyncio
import re
import zlib
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec

from serve_app.core.json_bounds import has_more_values, is_deeper, path_of
from serve_app.errors import BadRequest, BodyTooLarge, BodyTooSlow, UnsupportedContent
from serve_app.settings import HttpSettings

LARGE_BYTES = 2**16  # a body below it is checked within some 2 ms; the way to another thread and back takes 0.1 ms
# The time a body has to arrive, and the bytes that earn one more second: 8 MB over a bad mobile network take two
# minutes; a client that sends single bytes is refused after ten seconds.
ARRIVAL_S = 10.0
ARRIVAL_BYTES_PER_S = 65_536
SHOWN_HEADER_CHARS = 100  # of a wrong header in the error: enough to see the mistake
LENGTH_DIGITS = 18  # a Content-Length of more digits is nonsense, and int() on it would not be cheap
# the range of msgpack, which vLLM uses to reach EngineCore
INTEGER_MIN = -(2**63)
INTEGER_MAX = 2**64 - 1
GZIP = (b"gzip", b"x-gzip")
GZIP_WINDOW_BITS = 31  # zlib's: the largest window, with gzip's header

# A completion has 16 tokens by default, and with null as many as fit (vLLM 0.32.0).
NULLS_KEPT = frozenset({"max_tokens"})

_CUT = "Input data was truncated"  # what msgspec says, also of text that ends after the first half of a pair
# The escapes in a text of JSON: whole pairs, halves of one, others.
_ESCAPES = re.compile(rb"\\(?:u[dD][89abAB]..\\u[dD][c-fC-F]..|(?P<half>u[dD][89a-fA-F]..)|.)", re.DOTALL)

_decoder = msgspec.json.Decoder()
_encoder = msgspec.msgpack.Encoder()
_JSON_NAMES: dict[type, str] = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}

T = TypeVar("T")
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]  # ASGI's
HeaderMap = Mapping[bytes, bytes]  # by name in lower case


async def read(headers: Mapping[bytes, bytes], receive: Receive, bounds: HttpSettings) -> bytes:
    """A request's body; refused as soon as it is known to be too large or too slow. Raises as `check_content`,
    BodyTooSlow, and CancelledError: the client has disconnected."""
    check_content(headers, bounds.max_body_bytes)
    chunks: list[bytes] = []
    size = 0
    started = asyncio.get_running_loop().time()
    try:
        async with asyncio.timeout_at(started + ARRIVAL_S) as bound:
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise asyncio.CancelledError
                chunk = message.get("body", b"")
                size += len(chunk)
                if size > bounds.max_body_bytes:
                    raise _too_large(bounds.max_body_bytes)
                chunks.append(chunk)
                if not message.get("more_body", False):
                    break
                bound.reschedule(started + ARRIVAL_S + size / ARRIVAL_BYTES_PER_S)
    except TimeoutError:
        raise BodyTooSlow(f"the body did not arrive in time: {size} bytes of it did", param="body") from None
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


async def read_object(
    headers: HeaderMap, receive: Receive, bounds: HttpSettings, thread: BodyThread, *, with_nulls: bool = False
) -> tuple[dict[str, Any], bytes]:
    """The decoded body, and its bytes. Raises as `read`, `inflate` and `decode`."""
    raw = sent = await read(headers, receive, bounds)
    if is_gzip(headers):
        raw = await thread.run(bounds.max_body_bytes, lambda: inflate(sent, bounds.max_body_bytes))
    return await thread.run(len(raw), lambda: decode(raw, bounds, with_nulls=with_nulls)), raw


class BodyThread:
    """Runs work on each value of a body: directly for a small body, in a thread for a large one. There is one thread,
    so that the event loop shares the interpreter with no more than one."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "bodies")

    async def run(self, size: int, work: Callable[[], T]) -> T:
        """Run `work` for a body of `size` bytes. Raises as `work`."""
        if size <= LARGE_BYTES:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def check_content(headers: Mapping[bytes, bytes], max_body_bytes: int) -> None:
    """Refuse a body by its headers, before a byte of the body is read. The names of `headers` are in lower case.

    Raises:
        UnsupportedContent: the Content-Type is not JSON, or the body is compressed otherwise than with gzip.
        BadRequest: the Content-Length is not a number.
        BodyTooLarge: Content-Length above `max_body_bytes`.
    """
    kind = headers.get(b"content-type")
    if kind is not None and kind.split(b";", 1)[0].strip().lower() != b"application/json":
        shown = kind[:SHOWN_HEADER_CHARS].decode("latin-1")
        raise UnsupportedContent(
            f"the request body must be application/json, the Content-Type header says {shown!r}", param="Content-Type"
        )
    if _encoding(headers) not in (b"", b"identity", *GZIP):
        raise UnsupportedContent("the request body may be compressed with gzip alone", param="Content-Encoding")
    if content_length(headers) > max_body_bytes:
        raise _too_large(max_body_bytes)


def content_length(headers: Mapping[bytes, bytes]) -> int:
    """The bytes that the headers of a request announce; 0: they do not say. Raises BadRequest."""
    length = headers.get(b"content-length", b"0")
    if not length.isdigit() or len(length) > LENGTH_DIGITS:
        raise BadRequest("Content-Length is not a number of bytes", param="Content-Length")
    return int(length)


def is_gzip(headers: Mapping[bytes, bytes]) -> bool:
    return _encoding(headers) in GZIP


def inflate(body: bytes, max_body_bytes: int) -> bytes:
    """The content of a body in gzip, of one member: thousands of small ones would cost far more than their bytes.

    Raises:
        BodyTooLarge: it has more than `max_body_bytes`; no more than these are inflated.
        BadRequest: not gzip, cut off, or followed by more.
    """
    member = zlib.decompressobj(GZIP_WINDOW_BITS)
    try:
        content = member.decompress(body, max_body_bytes + 1)
    except zlib.error as error:
        raise BadRequest(f"the request body is not valid gzip: {error}", param="body") from None
    if len(content) > max_body_bytes:
        raise _too_large(max_body_bytes)
    if not member.eof or member.unused_data:
        raise BadRequest("the request body is not one whole gzip member", param="body")
    return content


def _encoding(headers: Mapping[bytes, bytes]) -> bytes:
    return headers.get(b"content-encoding", b"").strip().lower()


def decode(body: bytes, bounds: HttpSettings, *, with_nulls: bool = False) -> dict[str, Any]:
    """The JSON object in `body`, without the fields that are null unless `with_nulls`.

    Raises:
        BadRequest: not JSON (the message names the byte), not an object, nested too deep, or too many values
            (`param` is "body"); an integer beyond 64 bits (`param` is its path).
    """
    check_count(body, bounds.max_json_values)
    try:
        value = _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(_malformed(body, error), param="body", code="invalid_json") from None
    except RecursionError:
        raise _too_deep(bounds) from None
    if type(value) is not dict:
        found = _JSON_NAMES.get(type(value), "a number")
        raise BadRequest(f"the request body must be a JSON object, it is {found}", param="body", code="invalid_json")
    if is_deeper(body, value, bounds.max_json_depth):
        raise _too_deep(bounds)
    try:
        _encoder.encode(value)
    except OverflowError:
        path = path_of(value, _is_large_integer)
        raise BadRequest(f"`{path}` is an integer beyond 64 bits", param=path) from None
    return {name: one for name, one in value.items() if one is not None or with_nulls or name in NULLS_KEPT}


def check_count(text: bytes, max_values: int) -> None:
    """Refuse JSON with more than `max_values` values before it is parsed: decoding them blocks the whole process. An
    object or array counts as a value in addition to its content; malformed JSON may pass.

    Raises:
        BadRequest: `param` is "body".
    """
    if has_more_values(text, max_values):
        raise BadRequest(f"the JSON of `body` holds more than {max_values} values", param="body")


def _is_large_integer(value: Any) -> bool:
    """Whether it cannot be sent to an engine."""
    return type(value) is int and not INTEGER_MIN <= value <= INTEGER_MAX


def _malformed(body: bytes, error: Exception) -> str:
    if not body.strip():
        return "the request body is empty, a JSON object is needed"
    if isinstance(error, UnicodeDecodeError):
        try:
            body.decode()
        except UnicodeDecodeError as whole:  # the decoder's own position counts from the start of the string it was in
            return f"the request body is not valid UTF-8 at byte {whole.start}"
    reason = str(error).removeprefix("JSON is malformed: ")
    half = next((part.start() for part in _ESCAPES.finditer(body) if part["half"]), None)
    if half is not None and ("surrogate" in reason or reason == _CUT):
        reason = f"half a surrogate pair (byte {half})"
    elif reason == _CUT:
        reason = f"it ends too early (byte {len(body)})"
    return f"the request body is not valid JSON: {reason}"


def _too_large(max_body_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"the request body may have {max_body_bytes} bytes at most", param="body")


def _too_deep(bounds: HttpSettings) -> BadRequest:
    return BadRequest(f"the request body is nested deeper than {bounds.max_json_depth} levels", param="body")
