"""Streamed chat completions of many tenants over all models, from clients that ask again as soon as they are answered.

Invariant: each client holds one connection with one request in flight; an answer that is not whole ends the run.
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
        address = urlsplit(self.url)
        where = f"{address.hostname}:{address.port}"
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        answer = AnswerReader(time.monotonic, lenient=True)
        try:
            while goes_on():
                turn = next(self._turns)
                body = chat(self.models[turn % len(self.models)], next(self._prompts), self.tokens)
                answer.begin()
                writer.write(post(where, CHAT_PATH, self.keys[turn % len(self.keys)], body))
                async with asyncio.timeout(ANSWER_TIMEOUT_S):
                    while not answer.complete:
                        answer.feed(await _some(reader))
                if answer.status != 200 or not answer.done or answer.body:
                    raise BenchmarkError(f"answer {answer.status} is not whole: {answer.body[:300]!r}")
                self.answered += 1
        finally:
            writer.close()


async def _some(reader: asyncio.StreamReader) -> bytes:
    data = await reader.read(READ_BYTES)
    if not data:
        raise BenchmarkError("the endpoint closed a connection in the middle of an answer")
    return data
