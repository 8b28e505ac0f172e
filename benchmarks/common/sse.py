"""What one streamed chat answer says, parsed as little as counting tokens and taking time stamps needs.

Decides which server-sent event carries tokens and which the usage; everything else in an event is left unread. Events
of our server and of vLLM's are read by their bytes; those of any other server as JSON, whatever its spaces and line
ends (`lenient`).
Invariant: an event is judged once, whole, however the transport cut the bytes.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httptools

EVENT_END = b"\n\n"
LINE_END = b"\n"  # OpenAI's events have one line of data each
DATA = b"data:"
TEXT_FIELDS = ("content", "reasoning_content", "reasoning", "refusal", "tool_calls")  # of a delta


class EventKind(enum.Enum):
    """What an event is to the clock: TOKENS moves it, ROLE and OTHER do not, ERROR fails the run."""

    ROLE = "role"
    TOKENS = "tokens"
    USAGE = "usage"
    DONE = "done"
    ERROR = "error"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one answer, as the server states them."""

    prompt_tokens: int
    completion_tokens: int


class SseSplitter:
    """Cuts a byte stream into whole events; what is left over waits for the next piece."""

    __slots__ = ("_end", "_rest")

    def __init__(self, end: bytes = EVENT_END) -> None:
        self._end = end
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The events completed by `data`, without what ends them."""
        if self._rest:
            data = self._rest + data
        events = data.split(self._end)
        self._rest = events.pop()
        return events

    @property
    def pending(self) -> bytes:
        """The beginning of an event whose end has not come."""
        return self._rest


class AnswerReader:
    """Reads the answers of one connection, one after the other; the callback object of a parser in C.

    Args:
        clock: when what has just been read came.
        streamed: whether answers are event streams; else all of one is its `body`.
        lenient: events are any server's. Only those with text are stamped then, and the last usage counts.
    """

    def __init__(self, clock: Callable[[], float], *, streamed: bool = True, lenient: bool = False) -> None:
        self.clock = clock
        self.streamed = streamed
        self.end = LINE_END if lenient else EVENT_END
        self.read = self._read_any if lenient else self._read_known
        self.parser = httptools.HttpResponseParser(self)
        self.begin()

    def begin(self) -> None:
        """Another answer is to come. `stamps`: a moment for each event with tokens; `body`: what was no such stream."""
        self.splitter = SseSplitter(self.end)
        self.stamps: list[float] = []
        self.usage: Usage | None = None
        self.done = self.complete = False
        self.retry_s: float | None = None
        self.body = b""

    @property
    def status(self) -> int:
        return int(self.parser.get_status_code())

    def feed(self, data: bytes) -> None:
        """Raises ConnectionError: it is not HTTP."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError as error:
            raise ConnectionError(f"not HTTP: {error.__context__ or error}: {data[:200]!r}") from None

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"retry-after" and value.isdigit():
            self.retry_s = float(value)

    def on_body(self, body: bytes) -> None:
        if not self.streamed or self.status != 200:
            self.body += body
            return
        for event in self.splitter.feed(body):
            self.read(event)

    def _read_known(self, event: bytes) -> None:
        kind = classify(event)
        if kind is EventKind.TOKENS:
            self.stamps.append(self.clock())
        elif kind is EventKind.DONE:
            self.done = True
        elif kind is EventKind.USAGE:
            self.usage = parse_usage(event)
        elif kind is EventKind.ERROR:
            self.body += event

    def _read_any(self, line: bytes) -> None:
        if not line.startswith(DATA):
            return
        data = line.removeprefix(DATA).strip()
        if data == b"[DONE]":
            self.done = True
            return
        try:
            event = json.loads(data)
        except ValueError:
            event = None
        if not isinstance(event, dict) or event.get("error"):
            self.body += line
            return
        if has_text(event):
            self.stamps.append(self.clock())
        self.usage = usage_in(event) or self.usage

    def on_message_complete(self) -> None:
        self.complete = True


def classify(event: bytes) -> EventKind:
    """The kind of one event. Generated text cannot imitate a key: inside a JSON string its quotes are escaped.

    An event with a delta counts as tokens even when its text is empty: the server made a token whose bytes do not yet
    form a character.
    """
    if b'"choices":[{' in event:
        return EventKind.ROLE if b'"role":' in event else EventKind.TOKENS
    if event == b"data: [DONE]":
        return EventKind.DONE
    if b'"error":' in event:
        return EventKind.ERROR
    if b'"usage":{' in event:
        return EventKind.USAGE
    return EventKind.OTHER


def parse_usage(event: bytes) -> Usage:
    """The counts in a usage event.

    Raises:
        ValueError: not JSON, or without both counts.
    """
    try:
        usage = json.loads(event.removeprefix(b"data:"))["usage"]
        return Usage(int(usage["prompt_tokens"]), int(usage["completion_tokens"]))
    except (KeyError, TypeError) as error:
        raise ValueError(f"usage event without {error}: {event[:200]!r}") from None


def has_text(event: dict[str, Any]) -> bool:
    """Whether an event of any server brings its client something to read."""
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        if choice.get("text") or any(delta.get(name) for name in TEXT_FIELDS):
            return True
    return False


def usage_in(event: dict[str, Any]) -> Usage | None:
    """The counts in an event of any server; None: it has not both."""
    usage = event.get("usage") or {}
    prompt = usage.get("prompt_tokens")
    completion = usage.get("completion_tokens")
    if not isinstance(prompt, int) or not isinstance(completion, int):
        return None
    return Usage(prompt, completion)
