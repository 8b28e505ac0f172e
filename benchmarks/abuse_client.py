"""Clients of `benchmarks.abuse`: some leave, some ask for nonsense, all of the others stay until they are answered.

Each request has a connection of its own, read to its end. Invariant: every request that was sent is counted once.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from dataclasses import dataclass, field

LEAVES, BAD, SESSIONS = 0.2, 0.1, 0.01  # shares of the requests
LEAVE_S = 4.0  # at most: before an answer of three seconds has ended, while it waits or while it is read
HUNG_S = 90.0  # of a request without an end: above the longest wait and the longest answer together
RETRY_S, MOST_RETRY_S = 1.0, 5.0  # of a client that was told no Retry-After; none waits longer, to keep up the load
SAMPLES = 8  # of what should not have been
READ_BYTES = 65_536
REFUSED = (429, 503)

BAD_BODIES: tuple[bytes, ...] = (
    b"",
    b"{",
    b"[]",
    b"null",
    b'"model"',
    b"\xff\xfe{}",
    b'{"model": "tiny"}',
    b'{"model": "no-such-model", "prompt": "a"}',
    b'{"model": "tiny", "prompt": "a", "max_tokens": -1}',
    b'{"model": "tiny", "prompt": "a", "max_tokens": "many"}',
    b'{"model": "tiny", "prompt": "a", "n": 100000}',
    b'{"model": "tiny", "prompt": {"a": 1}}',
    b'{"model": "tiny", "prompt": "a", "priority": "royal"}',
    b'{"model": ["tiny"], "prompt": "a"}',
    b'{"model": "tiny", "prompt": "a", "stop": [1, 2]}',
    b'{"model": "tiny", "prompt": "' + b"word " * 4000 + b'"}',
    b'{"model": "tiny", "prompt": ' + b"[" * 200 + b"]" * 200 + b"}",
)


@dataclass
class Counts:
    """What became of the requests. `bad_accepted`: nonsense that was answered with 200."""

    status: Counter[int] = field(default_factory=Counter)
    left: int = 0
    bad: int = 0
    bad_accepted: int = 0
    hung: int = 0
    cut: int = 0  # ended before their answer did, or without one
    sessions: int = 0
    samples: list[str] = field(default_factory=list)

    def sample(self, text: str) -> None:
        if len(self.samples) < SAMPLES:
            self.samples.append(text[:300])


class Crowd:
    """All clients of a run."""

    def __init__(self, host: str, port: int, model: str, keys: list[str], seed: int, tokens: int) -> None:
        self._host, self._port, self._model, self._keys, self._tokens = host, port, model, keys, tokens
        self._draw = random.Random(seed)
        self.counts = Counts()

    async def run(self, clients: int, span_s: float) -> None:
        """So many clients for so long; returns when the last one was answered, or was given up as hung."""
        until = time.monotonic() + span_s
        await asyncio.gather(*(self._client(until) for _ in range(clients)))

    async def plain(self, tokens: int) -> None:
        """One request that is what it should be."""
        await self._ask(self._completion(tokens, stream=True), {})

    async def _client(self, until: float) -> None:
        draw = self._draw
        await asyncio.sleep(draw.uniform(0.0, 2.0))
        while time.monotonic() < until:
            kind = draw.random()
            if kind < LEAVES:
                await self._leaving()
            elif kind < LEAVES + BAD:
                await self._bad()
            elif kind < LEAVES + BAD + SESSIONS:
                await self._session()
            else:
                _, retry_s = await self._ask(self._completion(self._tokens, stream=draw.random() < 0.7), {})
                if retry_s:
                    await asyncio.sleep(min(retry_s, MOST_RETRY_S) * draw.uniform(0.8, 1.2))

    def _completion(self, tokens: int, *, stream: bool) -> bytes:
        words = " ".join(str(self._draw.randrange(1000)) for _ in range(self._draw.randrange(5, 80)))
        body = {"model": self._model, "prompt": words, "max_tokens": self._draw.randrange(tokens // 2, tokens + 1)}
        return json.dumps(body | {"stream": stream, "ignore_eos": True}).encode()

    async def _leaving(self) -> None:
        """A client that is gone before its answer is whole: with a close, some with half of what they had to say."""
        draw, body = self._draw, self._completion(self._tokens, stream=self._draw.random() < 0.7)
        self.counts.left += 1
        try:
            reader, writer = await asyncio.open_connection(self._host, self._port)
        except OSError as error:
            self.counts.sample(f"a connection: {error!r}")
            return
        data = self._request("/v1/completions", body, {})
        writer.write(data[: draw.randrange(1, len(data))] if draw.random() < 0.1 else data)
        try:
            async with asyncio.timeout(draw.uniform(0.0, LEAVE_S)):
                while await reader.read(READ_BYTES):
                    pass
        except (TimeoutError, OSError):
            pass
        writer.transport.abort() if draw.random() < 0.5 else writer.close()

    async def _bad(self) -> None:
        draw = self._draw
        self.counts.bad += 1
        headers: dict[str, str] = {}
        body = draw.choice(BAD_BODIES)
        if draw.random() < 0.2:
            body = self._completion(8, stream=False)
            headers = draw.choice(({"authorization": "Bearer sk-none"}, {"x-deadline-ms": "soon"}))
        status, _ = await self._ask(body, headers)
        if status == 200:
            self.counts.bad_accepted += 1
            self.counts.sample(f"200 to {body[:100]!r} with {headers}")

    async def _session(self) -> None:
        """One that is opened, and left to its time to live."""
        name = f"s{self._draw.randrange(10**9)}"
        asked = {"model": self._model, "session_id": name, "kv_tokens": 512, "ttl_s": 5, "wait_s": 2}
        status, _ = await self._ask(json.dumps(asked).encode(), {}, "/v1/sessions")
        if status == 201:
            self.counts.sessions += 1
            await self._ask(self._completion(16, stream=True), {"x-session-id": name})

    def _request(self, path: str, body: bytes, headers: dict[str, str]) -> bytes:
        told = {
            "host": f"{self._host}:{self._port}",
            "authorization": f"Bearer {self._draw.choice(self._keys)}",
            "content-type": "application/json",
            "content-length": str(len(body)),
            "connection": "close",
        } | headers
        lines = "".join(f"{name}: {value}\r\n" for name, value in told.items())
        return f"POST {path} HTTP/1.1\r\n{lines}\r\n".encode() + body

    async def _ask(self, body: bytes, headers: dict[str, str], path: str = "/v1/completions") -> tuple[int, float]:
        """One request to its end; returns its status, 0 of none, and the seconds after which a refused one may come
        again."""
        try:
            async with asyncio.timeout(HUNG_S):
                data = await self._exchange(self._request(path, body, headers))
        except TimeoutError:
            self.counts.hung += 1
            self.counts.sample(f"hung: {path} {body[:100]!r}")
            return 0, 0.0
        except OSError as error:
            self.counts.cut += 1
            self.counts.sample(f"{error!r}: {body[:100]!r}")
            return 0, RETRY_S
        return self._judge(data, body)

    async def _exchange(self, data: bytes) -> bytes:
        reader, writer = await asyncio.open_connection(self._host, self._port)
        try:
            writer.write(data)
            return await reader.read(-1)
        finally:
            writer.close()

    def _judge(self, data: bytes, body: bytes) -> tuple[int, float]:
        head, _, rest = data.partition(b"\r\n\r\n")
        status = _status(head)
        if status is None:
            self.counts.cut += 1
            self.counts.sample(f"no answer ({data[:60]!r}) to {body[:100]!r}")
            return 0, RETRY_S
        self.counts.status[status] += 1
        if status >= 500 and status not in REFUSED:
            self.counts.sample(f"{status}: {rest[:160]!r} to {body[:100]!r}")
        if status == 200 and not _whole(head, rest):
            self.counts.cut += 1
            self.counts.sample(f"cut off: {rest[-160:]!r}")
        return status, _retry_s(head) if status in REFUSED else 0.0


def _status(head: bytes) -> int | None:
    parts = head.split(b" ", 2)
    return int(parts[1]) if len(parts) > 2 and parts[0].startswith(b"HTTP/") and parts[1].isdigit() else None


def _whole(head: bytes, rest: bytes) -> bool:
    """Whether the answer has its end: the stream's last word and no error before it, or the chunks' or the length's."""
    lines = head.lower()
    if b"text/event-stream" in lines:
        return b"data: [DONE]" in rest and b'"error"' not in rest
    if b"transfer-encoding: chunked" in lines:
        return rest.endswith(b"0\r\n\r\n")
    return b"content-length: %d\r\n" % len(rest) in lines + b"\r\n"


def _retry_s(head: bytes) -> float:
    for line in head.lower().split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name == b"retry-after" and value.strip().isdigit():
            return max(RETRY_S, float(value))
    return RETRY_S
