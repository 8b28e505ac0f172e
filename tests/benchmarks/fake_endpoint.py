"""An OpenAI-compatible server of the tests, in a thread: a few slots, a queue by order of arrival or fair to tenants.

It keeps its own account of what it served. A prompt of n words has 2n + 3 tokens, so that words do not pass as tokens.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

HOST = "127.0.0.1"
GAP_S = 0.005  # between tokens: a request takes tens of milliseconds, so that few connections are a backlog
START_TIMEOUT_S = 10.0  # of a listening socket: it takes milliseconds

Decide = Callable[["Asked"], bool]


def never(asked: Asked) -> bool:
    return False


@dataclass(eq=False)
class Asked:
    """One request, and what became of it."""

    number: int
    tenant: str
    headers: dict[str, str]
    body: dict[str, Any]
    writer: asyncio.StreamWriter
    reader: asyncio.StreamReader
    granted: asyncio.Event = field(default_factory=asyncio.Event)
    has_slot: bool = False
    sent: int = 0
    finished: bool = False

    @property
    def prompt_tokens(self) -> int:
        return 2 * len(self.body["messages"][0]["content"].split()) + 3

    @property
    def gone(self) -> bool:
        return self.writer.is_closing() or self.reader.at_eof()


class FakeEndpoint:
    """Args:
    order: which of those that wait is next, the least; None: the first.
    usage: "last", in a chunk of its own; "every", in each chunk with text; "none".
    refuses, breaks: whether a request gets 429, or loses its connection after two tokens.
    """

    def __init__(
        self,
        keys: dict[str, str],
        *,
        slots: int = 2,
        order: Callable[[FakeEndpoint, Asked], float] | None = None,
        usage: str = "last",
        refuses: Decide = never,
        breaks: Decide = never,
    ) -> None:
        self.keys = keys
        self.slots = slots
        self.free = slots
        self.order = order
        self.usage = usage
        self.refuses = refuses
        self.breaks = breaks
        self.asked: list[Asked] = []
        self.refused: list[Asked] = []
        self.waiting: list[Asked] = []
        self.service: defaultdict[str, float] = defaultdict(float)
        self.made: defaultdict[str, float] = defaultdict(float)  # service since the beginning
        self.writers: set[asyncio.StreamWriter] = set()

    def next_granted(self) -> None:
        """Give free slots to those that wait."""
        for asked in [asked for asked in self.waiting if asked.gone]:
            self.waiting.remove(asked)
            asked.granted.set()  # to end, without a slot
        while self.free and self.waiting:
            order = self.order
            chosen = self.waiting[0] if order is None else min(self.waiting, key=lambda asked: order(self, asked))
            self.waiting.remove(chosen)
            self.free -= 1
            chosen.has_slot = True
            chosen.granted.set()

    def close(self) -> None:
        """Close every connection, so that each handler comes to its end."""
        for writer in self.writers:
            writer.close()
        for asked in self.waiting:
            asked.granted.set()

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.add(writer)
        with suppress(asyncio.IncompleteReadError, ConnectionError):  # the client has left
            while not writer.is_closing():
                asked = await self._read(reader, writer)
                if self.refuses(asked):
                    self.refused.append(asked)
                    error = json.dumps({"error": {"message": "slow down", "code": 429}}).encode()
                    writer.write(b"HTTP/1.1 429 X\r\nretry-after: 0\r\ncontent-length: %d\r\n\r\n" % len(error) + error)
                    continue
                self.asked.append(asked)
                await self._serve(asked)
        writer.close()

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Asked:
        request, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().splitlines()
        assert request == "POST /v1/chat/completions HTTP/1.1"
        headers = {name.lower(): value for name, _, value in (text.partition(": ") for text in lines if text)}
        body = json.loads(await reader.readexactly(int(headers["content-length"])))
        tenant = self.keys[headers["authorization"].removeprefix("Bearer ")]
        return Asked(len(self.asked), tenant, headers, body, writer, reader)

    async def _serve(self, asked: Asked) -> None:
        if not self.waiting and self.free == self.slots:
            self.service.clear()  # what a tenant got before the endpoint was idle is no debt
        self.waiting.append(asked)
        self.next_granted()
        await asked.granted.wait()
        if not asked.has_slot:
            return
        try:
            await self._stream(asked)
        finally:
            self.free += 1
            self.next_granted()

    async def _stream(self, asked: Asked) -> None:
        self._count(asked, asked.prompt_tokens)
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        asked.writer.write(head)
        self._event(asked, {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        while asked.sent < asked.body["max_tokens"]:
            await asyncio.sleep(GAP_S)  # the token's time
            if asked.sent == 2 and self.breaks(asked):
                asked.writer.close()
                return
            asked.sent += 1
            self._count(asked, 2)
            chunk: dict[str, Any] = {"choices": [{"index": 0, "delta": {"content": "a "}}], "usage": None}
            if self.usage == "every":
                chunk["usage"] = self._usage(asked)
            self._event(asked, chunk)
            await asked.writer.drain()
        if self.usage == "last":
            self._event(asked, {"choices": [{"index": 0, "delta": {}}], "usage": self._usage(asked)})
        asked.finished = True
        self._data(asked, b"data: [DONE]\r\n\r\n")
        asked.writer.write(b"0\r\n\r\n")

    def _count(self, asked: Asked, tokens: int) -> None:
        self.service[asked.tenant] += tokens
        self.made[asked.tenant] += tokens

    @staticmethod
    def _usage(asked: Asked) -> dict[str, int]:
        return {"prompt_tokens": asked.prompt_tokens, "completion_tokens": asked.sent}

    def _event(self, asked: Asked, event: dict[str, Any]) -> None:
        self._data(asked, f"data: {json.dumps(event)}\r\n\r\n".encode())

    @staticmethod
    def _data(asked: Asked, data: bytes) -> None:
        asked.writer.write(b"%x\r\n%s\r\n" % (len(data), data))


def by_service(endpoint: FakeEndpoint, asked: Asked) -> float:
    """Fair: the tenant with the least service."""
    return endpoint.service[asked.tenant]


def by_priority(endpoint: FakeEndpoint, asked: Asked) -> float:
    """Lower numbers first, as vLLM has it."""
    return float(asked.body.get("priority", 0))


@contextmanager
def serving(endpoint: FakeEndpoint) -> Iterator[str]:
    """The URL of the endpoint, for the block."""
    loop = asyncio.new_event_loop()
    ports: list[int] = []
    listens = threading.Event()
    over = asyncio.Event()

    async def serve() -> None:
        server = await asyncio.start_server(endpoint.answer, HOST, 0)
        ports.append(server.sockets[0].getsockname()[1])
        listens.set()
        async with server:
            await over.wait()
        endpoint.close()
        await asyncio.gather(*(asyncio.all_tasks() - {asyncio.current_task()}))

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert listens.wait(START_TIMEOUT_S)
    try:
        yield f"http://{HOST}:{ports[0]}"
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join()
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()
