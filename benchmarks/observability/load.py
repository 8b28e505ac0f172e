"""Streamed chat completions of many tenants over all models, from clients that ask again as soon as they are answered.

Invariant: each client holds one connection with one request in flight; an answer that is not whole ends the run. A
connection that ends between two answers is opened again, as every HTTP client does: HAProxy ends them when it takes on
new routers.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import uvloop

from benchmarks.common.arms import BenchmarkError
from benchmarks.common.sse import AnswerReader
from benchmarks.common.workload import CHAT_PATH, chat, post, prompts

READ_BYTES = 65_536
ANSWER_TIMEOUT_S = 60.0  # of one answer: a simulated engine needs a second


@dataclass(slots=True)
class Load:
    """What is asked, of which endpoint.

    Args:
        keys: of the tenants, which take turns.
        tokens: of each answer.
    """

    url: str
    keys: Sequence[str]
    models: Sequence[str]
    tokens: int
    seed: int
    answered: int = 0
    _prompts: Iterator[str] = field(init=False)
    _turns: Iterator[int] = field(init=False)

    def __post_init__(self) -> None:
        self._prompts = prompts(self.seed)
        self._turns = itertools.count()

    def for_seconds(self, clients: int, seconds: float) -> None:
        """Ask until the time is over; every answer is read to its end. Raises BenchmarkError: one was not whole."""
        until = time.monotonic() + seconds
        uvloop.run(self._all(clients, lambda: time.monotonic() < until))

    def times(self, clients: int, requests: int) -> None:
        """Ask so many times. Raises as `for_seconds`."""
        left = iter(range(requests))
        uvloop.run(self._all(clients, lambda: next(left, None) is not None))

    async def _all(self, clients: int, goes_on: Callable[[], bool]) -> None:
        async with asyncio.TaskGroup() as asking:
            for _ in range(clients):
                asking.create_task(self._client(goes_on))

    async def _client(self, goes_on: Callable[[], bool]) -> None:
        connection = Connection(self.url)
        try:
            while goes_on():
                turn = next(self._turns)
                body = chat(self.models[turn % len(self.models)], next(self._prompts), self.tokens)
                answer = await connection.ask(post(connection.where, CHAT_PATH, self.keys[turn % len(self.keys)], body))
                if answer.status != 200 or not answer.done or answer.body:
                    raise BenchmarkError(f"answer {answer.status} is not whole: {answer.body[:300]!r}")
                self.answered += 1
        finally:
            connection.close()


class Connection:
    """A client's connection. `where`: its host and port."""

    def __init__(self, url: str) -> None:
        self._address = urlsplit(url)
        self.where = f"{self._address.hostname}:{self._address.port}"
        self._answer = AnswerReader(time.monotonic, lenient=True)
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, request: bytes) -> AnswerReader:
        """Send a request and read its answer. Raises BenchmarkError: the connection ended within it."""
        was_open = self._streams is not None
        answered = await self._try(request)
        if not answered and was_open:
            self.close()
            answered = await self._try(request)
        if not answered:
            raise BenchmarkError("the endpoint closed a new connection without an answer")
        return self._answer

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
        self._streams = None

    async def _try(self, request: bytes) -> bool:
        """Whether there was an answer, which is then complete."""
        if self._streams is None:
            self._streams = await asyncio.open_connection(self._address.hostname, self._address.port)
        reader, writer = self._streams
        self._answer.begin()
        writer.write(request)
        has_begun = False
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            while not self._answer.complete:
                data = await _read(reader)
                if not data and not has_begun:
                    return False
                if not data:
                    raise BenchmarkError("the endpoint closed a connection in the middle of an answer")
                has_begun = True
                self._answer.feed(data)
        return True


async def _read(reader: asyncio.StreamReader) -> bytes:
    """The next bytes; none: the connection has ended."""
    try:
        return await reader.read(READ_BYTES)
    except ConnectionResetError:
        return b""
