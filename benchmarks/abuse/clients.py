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

import httpx

from benchmarks.common.workload import post

# shares of the requests
LEAVES = 0.2
BAD = 0.1
SESSIONS = 0.01
LEAVE_S = 4.0  # at most: before an answer of three seconds has ended, while it waits or while it is read
HUNG_S = 90.0  # of a request without an end: above the longest wait and the longest answer together
# of a client that was told no Retry-After; none waits longer, to keep up the load
RETRY_S = 1.0
MOST_RETRY_S = 5.0
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
        self._host = host
        self._port = port
        self._model = model
        self._keys = keys
        self._tokens = tokens
        self._draw = random.Random(seed)
        self.counts = Counts()
        own = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._http = httpx.AsyncClient(base_url=f"http://{host}:{port}", timeout=None, limits=own, trust_env=False)

    async def run(self, clients: int, span_s: float) -> None:
        """So many clients for so long; returns when the last one was answered, or was given up as hung."""
        until = time.monotonic() + span_s
        await asyncio.gather(*(self._client(until) for _ in range(clients)))

    async def plain(self, tokens: int) -> None:
        """One request that is what it should be."""
        await self.ask(self._completion(tokens, stream=True), {})

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
                _, retry_s = await self.ask(self._completion(self._tokens, stream=draw.random() < 0.7), {})
                if retry_s:
                    await asyncio.sleep(min(retry_s, MOST_RETRY_S) * draw.uniform(0.8, 1.2))

    def _completion(self, tokens: int, *, stream: bool) -> bytes:
        words = " ".join(str(self._draw.randrange(1000)) for _ in range(self._draw.randrange(5, 80)))
        body = {"model": self._model, "prompt": words, "max_tokens": self._draw.randrange(tokens // 2, tokens + 1)}
        return json.dumps(body | {"stream": stream, "ignore_eos": True}).encode()

    async def _leaving(self) -> None:
        """A client that is gone before its answer is whole: with a close, some with half of what they had to say."""
        draw = self._draw
        body = self._completion(self._tokens, stream=self._draw.random() < 0.7)
        self.counts.left += 1
        try:
            reader, writer = await asyncio.open_connection(self._host, self._port)
        except OSError as error:
            self.counts.sample(f"a connection: {error!r}")
            return
        data = post(f"{self._host}:{self._port}", "/v1/completions", draw.choice(self._keys), body, connection="close")
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
        status, _ = await self.ask(body, headers)
        if status == 200:
            self.counts.bad_accepted += 1
            self.counts.sample(f"200 to {body[:100]!r} with {headers}")

    async def _session(self) -> None:
        """One that is opened, and left to its time to live."""
        name = f"s{self._draw.randrange(10**9)}"
        asked = {"model": self._model, "session_id": name, "kv_tokens": 512, "ttl_s": 5, "wait_s": 2}
        status, _ = await self.ask(json.dumps(asked).encode(), {}, "/v1/sessions")
        if status == 201:
            self.counts.sessions += 1
            await self.ask(self._completion(16, stream=True), {"x-session-id": name})

    def _headers(self) -> dict[str, str]:
        key = self._draw.choice(self._keys)
        return {"authorization": f"Bearer {key}", "content-type": "application/json", "connection": "close"}

    async def ask(self, body: bytes, headers: dict[str, str], path: str = "/v1/completions") -> tuple[int, float]:
        """One request to its end; returns its status, 0 of none, and the seconds after which a refused one may come
        again."""
        try:
            async with asyncio.timeout(HUNG_S):
                answer = await self._http.post(path, content=body, headers=self._headers() | headers)
        except TimeoutError:
            self.counts.hung += 1
            self.counts.sample(f"hung: {path} {body[:100]!r}")
            return 0, 0.0
        except httpx.TransportError as error:
            self.counts.cut += 1
            self.counts.sample(f"{error!r}: {body[:100]!r}")
            return 0, RETRY_S
        return self._judge(answer, body)

    def _judge(self, answer: httpx.Response, body: bytes) -> tuple[int, float]:
        status = answer.status_code
        self.counts.status[status] += 1
        if status >= 500 and status not in REFUSED:
            self.counts.sample(f"{status}: {answer.content[:160]!r} to {body[:100]!r}")
        if status == 200 and not _whole(answer):
            self.counts.cut += 1
            self.counts.sample(f"cut off: {answer.content[-160:]!r}")
        retry_after = answer.headers.get("retry-after", "")
        return status, max(RETRY_S, float(retry_after) if retry_after.isdigit() else 0.0) if status in REFUSED else 0.0


def _whole(answer: httpx.Response) -> bool:
    """Whether an answer that httpx found whole is: of a stream, its last word and no error before it."""
    if not answer.headers.get("content-type", "").startswith("text/event-stream"):
        return True
    return b"data: [DONE]" in answer.content and b'"error"' not in answer.content
