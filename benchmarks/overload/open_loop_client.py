"""One client connection of `benchmarks.overload.open_loop`, and the request on it.

Invariant: a request ends once, whatever its connection does afterwards.
"""

from __future__ import annotations

import asyncio
import enum
import json
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from benchmarks.common.sse import AnswerReader, Usage
from benchmarks.overload.offered_load import Offer

REFUSING = (429, 503)


class Ended(enum.StrEnum):
    """How a request ended for its client."""

    FINISHED = "finished"
    REFUSED = "refused"  # told so; `code` says why
    ABANDONED = "abandoned"  # the client left before its first token
    FAILED = "failed"  # anything else; `code` begins to say what


@dataclass(slots=True)
class Flight:
    """One request on its way. Moments are those of the loop's clock; `due` is when it was to be sent."""

    offer: Offer
    due: float
    sent: float
    first: float = 0.0
    last: float = 0.0
    ended: float = 0.0
    events: int = 0
    usage: Usage | None = None
    outcome: Ended = Ended.FAILED
    code: str = ""
    retry_s: float | None = None  # of its last refusal
    data: bytes = b""  # as it was sent
    timer: asyncio.TimerHandle | None = None
    client: Client | None = None  # whose connection it went out on last

    def row(self, began: float) -> list[Any]:
        """The fields of `overload_answers.Answer`. Of an answer without usage each event counts as a token."""
        usage = self.usage or Usage(0, self.events)
        offer = self.offer
        gap_ms = (self.last - self.first) / (usage.completion_tokens - 1) * 1e3 if usage.completion_tokens > 1 else None
        return [
            offer.number,
            offer.group,
            offer.prompt_tokens + offer.output_tokens,
            round(self.due - began, 4),
            self.outcome.value,
            self.code,
            round(self.first - self.due, 6) if self.first else None,
            round(self.ended - self.due, 6),
            usage.prompt_tokens,
            usage.completion_tokens,
            None if gap_ms is None else round(gap_ms, 4),
            round((self.sent - self.due) * 1e3, 3),
        ]


Judge = Callable[[Flight, AnswerReader], tuple[Ended, str]]  # how a request ended whose answer is complete, and why


def of_known_server(flight: Flight, answer: AnswerReader) -> tuple[Ended, str]:
    """By our server or vLLM's: exactly the tokens that were asked for, or a refusal with a code."""
    status = answer.status
    if status == 200 and not answer.body and flight.usage is not None:
        if flight.usage.completion_tokens == flight.offer.output_tokens:
            return Ended.FINISHED, ""
        return Ended.FAILED, f"{flight.usage.completion_tokens} tokens of {flight.offer.output_tokens}"
    if status in REFUSING:
        try:
            return Ended.REFUSED, str(json.loads(answer.body)["error"]["code"])
        except (ValueError, KeyError, TypeError):
            pass  # not one of ours: HAProxy's own, or a server's plain text
    return Ended.FAILED, f"status {status}: {answer.body[:300]!r}"


def of_any_server(flight: Flight, answer: AnswerReader) -> tuple[Ended, str]:
    """By any server: a stream that says it is done, whatever its length and usage, or a status that refuses."""
    status = answer.status
    if status == 200 and not answer.body:
        return (Ended.FINISHED, "") if answer.done else (Ended.FAILED, "the stream ended without [DONE]")
    if status in REFUSING:
        return Ended.REFUSED, f"status {status}"
    return Ended.FAILED, f"status {status}: {answer.body[:300]!r}"


@dataclass(frozen=True, slots=True)
class Load:
    """How requests are sent to one server, and for how long; spans in seconds.

    Args:
        clients: of a closed loop. With none, and nobody in `staying`, the loop is open.
        staying: clients of a closed loop by group, who come again when they were refused.
        patience_s: by group, until a client without a first token leaves an open loop; others do not leave.
        drain_s: after the load, until what has not ended is hung up on.
        leave_at_end: clients without a first token leave when the load ends.
        lenient: answers are any server's (`AnswerReader`).
    """

    host: str
    port: int
    warmup_s: float
    window_s: float
    tail_s: float
    drain_s: float
    clients: int = 0
    staying: Mapping[str, int] = field(default_factory=dict)
    patience_s: Mapping[str, float] = field(default_factory=dict)
    leave_at_end: bool = False
    tls: ssl.SSLContext | None = None
    lenient: bool = False

    @property
    def closed(self) -> bool:
        return bool(self.clients or self.staying)

    @property
    def span_s(self) -> float:
        return self.warmup_s + self.window_s + self.tail_s

    @property
    def judge(self) -> Judge:
        return of_any_server if self.lenient else of_known_server


class Clients(Protocol):
    """What a connection needs of the whole."""

    load: Load
    loop: asyncio.AbstractEventLoop

    def leaves_at(self, flight: Flight) -> float | None:
        """When its client gives up without a first token; None: never."""
        ...

    def end(self, flight: Flight, outcome: Ended, code: str = "") -> None:
        """A request is over."""
        ...

    def free(self, client: Client) -> None:
        """The connection can take another request."""
        ...


class Client(asyncio.Protocol):
    """One connection with one request in flight at a time."""

    def __init__(self, run: Clients) -> None:
        self.run = run
        self.transport: Any = None
        self.flight: Flight | None = None
        self.answer = AnswerReader(run.loop.time, lenient=run.load.lenient)
        self.idle_since = 0.0
        self.waiting = b""

    def begin(self, flight: Flight, data: bytes) -> None:
        self.flight = flight
        flight.client = self
        self.waiting = data
        self.answer.begin()
        flight.retry_s = None
        leaves_at = self.run.leaves_at(flight)
        if leaves_at is not None:
            flight.timer = self.run.loop.call_at(leaves_at, self.leave, flight)
        if self.transport is not None:
            self.transport.write(data)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        if self.flight is None:
            self.transport.close()
        else:
            self.transport.write(self.waiting)

    def leave(self, flight: Flight, outcome: Ended = Ended.ABANDONED, code: str = "") -> None:
        """The client closes its connection, as a browser does."""
        if self.flight is flight:
            self.flight = None
            if self.transport is not None:
                self.transport.abort()
            self.run.end(flight, outcome, code)

    def data_received(self, data: bytes) -> None:
        try:
            self.answer.feed(data)
        except ConnectionError as error:
            self._fail(str(error))
        flight = self.flight
        stamps = self.answer.stamps
        if flight is None:
            return
        if stamps:
            flight.first = stamps[0]
            flight.last = stamps[-1]
            flight.events = len(stamps)
            if flight.timer is not None:
                flight.timer.cancel()
        flight.usage = self.answer.usage
        flight.retry_s = self.answer.retry_s
        if self.answer.complete:
            self._answered(flight)

    def _answered(self, flight: Flight) -> None:
        self.flight = None
        outcome, code = self.run.load.judge(flight, self.answer)
        if self.answer.parser.should_keep_alive() and outcome is not Ended.FAILED:
            self.idle_since = self.run.loop.time()
            self.run.free(self)
        else:
            self.transport.close()
        self.run.end(flight, outcome, code)

    def _fail(self, why: str) -> None:
        flight, self.flight = self.flight, None
        if self.transport is not None:
            self.transport.close()
        if flight is not None:
            self.run.end(flight, Ended.FAILED, why)

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(f"connection lost: {exc}")
