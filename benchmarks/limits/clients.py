"""Clients of `benchmarks.limits`: the official SDK with its default retries, clients that leave, one that never waits.

Invariant: every request is one `Ask`; each of its attempts is noted with the moment and the status of its answer. All
moments are of the host's monotonic clock, as those of receipts are.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai

from benchmarks.common.workload import WORDS

REFUSED = 429
HUNG_S = 300.0  # of a request with all its retries: far above any moment that is told here
ID_HEADER = "x-serve-app-request-id"
STANDING = ("x-ratelimit-limit-requests", "x-ratelimit-remaining-requests", "x-ratelimit-reset-requests")
FAILED_S = 1.0  # before a client whose request failed asks for something else
END_POLL_S = 0.05  # between looks at who still asks when a load ends


@dataclass(frozen=True, slots=True)
class Shape:
    """A request: words of its prompt, each about a token, and tokens of its answer."""

    words: int
    tokens: int

    def body(self, model: str, draw: random.Random) -> dict[str, Any]:
        """A completion of exactly so many tokens, with a prompt of its own."""
        prompt = " ".join([f"{draw.getrandbits(64):016x}", *draw.choices(WORDS, k=self.words)])
        return {"model": model, "prompt": prompt, "max_tokens": self.tokens}


@dataclass(frozen=True, slots=True)
class Attempt:
    """One answer to one request on the wire. `retry_after_s`: what a refusal told."""

    sent: float
    answered: float
    status: int
    retry_after_s: float | None
    code: str
    has_standing: bool


@dataclass(slots=True)
class Ask:
    """A request of a client, with its repeats. `failure`: of what was never answered, or why."""

    began: float
    ended: float = 0.0
    request_id: str = ""
    tokens: int = 0
    failure: str = ""
    sent: float = 0.0  # the last attempt
    attempts: list[Attempt] = field(default_factory=list)

    @property
    def sleeps(self) -> bool:
        """Whether it was refused and waits before it repeats."""
        return bool(self.attempts) and self.attempts[-1].status == REFUSED and self.attempts[-1].answered > self.sent

    @property
    def broken_promises(self) -> int:
        """Refusals for a limit of a request that came back no earlier than it was told to."""
        pairs = zip(self.attempts, self.attempts[1:], strict=False)
        return sum(
            after.status == before.status == REFUSED
            and before.retry_after_s is not None
            and after.sent >= before.answered + before.retry_after_s
            for before, after in pairs
        )


_current: ContextVar[Ask] = ContextVar("_current")


async def _note_sent(_request: Any) -> None:
    _current.get().sent = time.monotonic()


async def _note_answer(response: Any) -> None:
    """Note an attempt; `response` is the HTTP library's of the SDK, or ours."""
    ask = _current.get()
    status = int(response.status_code)
    code = ""
    answered = time.monotonic()
    if status >= 400:
        await response.aread()
        code = str((response.json().get("error") or {}).get("code"))
    retry_after_ms = response.headers.get("retry-after-ms")
    retry_after_s = None if retry_after_ms is None else float(retry_after_ms) / 1000
    has_standing = all(name in response.headers for name in STANDING)
    ask.request_id = response.headers.get(ID_HEADER, "")
    ask.attempts.append(Attempt(ask.sent, answered, status, retry_after_s, code, has_standing))


HOOKS: Mapping[str, Any] = {"request": [_note_sent], "response": [_note_answer]}


@dataclass(slots=True)
class Crowd:
    """The clients of one key."""

    url: str
    key: str
    model: str
    draw: random.Random
    asks: list[Ask] = field(default_factory=list)

    @asynccontextmanager
    async def sdk(self) -> AsyncIterator[openai.AsyncOpenAI]:
        """The official SDK as it comes; our hooks only look."""
        http = openai.DefaultAsyncHttpxClient(event_hooks={name: list(hooks) for name, hooks in HOOKS.items()})
        async with openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=self.key, http_client=http) as client:
            yield client

    @asynccontextmanager
    async def http(self) -> AsyncIterator[httpx.AsyncClient]:
        """A bare client, which repeats nothing."""
        headers = {"authorization": f"Bearer {self.key}"}
        limits = httpx.Limits(max_connections=None)
        hooks = {name: list(found) for name, found in HOOKS.items()}
        async with httpx.AsyncClient(
            base_url=self.url, headers=headers, limits=limits, timeout=HUNG_S, trust_env=False, event_hooks=hooks
        ) as client:
            yield client

    async def ask(self, client: openai.AsyncOpenAI, body: Mapping[str, Any], ask: Ask | None = None) -> Ask:
        """One request by the SDK, to its end."""
        ask = ask or self._begin()
        try:
            async with asyncio.timeout(HUNG_S):
                answer = await client.completions.create(**body)
            ask.tokens = answer.usage.total_tokens if answer.usage else 0
        except (openai.OpenAIError, TimeoutError) as error:
            ask.failure = f"{type(error).__name__}: {error}"[:300]
        ask.ended = time.monotonic()
        return ask

    async def ask_once(self, client: httpx.AsyncClient, body: Mapping[str, Any]) -> Ask:
        """One request that is not repeated, whatever is answered; a refusal is no failure here."""
        ask = self._begin()
        try:
            answer = await client.post("/v1/completions", json=dict(body))
            if answer.status_code == 200:
                ask.tokens = answer.json()["usage"]["total_tokens"]
            elif answer.status_code != REFUSED:
                ask.failure = f"{answer.status_code} {answer.text[:200]}"
        except httpx.TransportError as error:
            ask.failure = repr(error)
        ask.ended = time.monotonic()
        return ask

    async def at_once(self, bodies: list[dict[str, Any]]) -> None:
        """All of these at the same time, by one client of the SDK."""
        async with self.sdk() as client:
            await asyncio.gather(*(asyncio.create_task(self.ask(client, body)) for body in bodies))

    async def closed_loop(self, clients: int, shape: Shape, until: float) -> None:
        """Clients that ask again as soon as they are answered; at the end those that sleep before a repeat leave."""
        async with self.sdk() as client:

            async def caller(number: int) -> None:
                while time.monotonic() < until:
                    ask = self._begin()
                    present[number] = ask
                    await self.ask(client, shape.body(self.model, self.draw), ask)
                    if ask.failure:
                        await asyncio.sleep(FAILED_S)

            present: dict[int, Ask] = {}
            tasks = {number: asyncio.create_task(caller(number)) for number in range(clients)}
            await asyncio.sleep(max(0.0, until - time.monotonic()))
            while pending := [number for number, task in tasks.items() if not task.done()]:
                for number in pending:
                    if present[number].sleeps:
                        tasks[number].cancel()
                await asyncio.wait([tasks[number] for number in pending], timeout=END_POLL_S)

    async def open_loop(self, per_s: float, shape: Shape, until: float) -> None:
        """New requests at a fixed rate; who is refused never comes back."""
        async with self.http() as client, asyncio.TaskGroup() as group:
            at = time.monotonic()
            while (now := time.monotonic()) < until:
                group.create_task(self.ask_once(client, shape.body(self.model, self.draw)))
                at = max(at + 1.0 / per_s, now - 1.0)
                await asyncio.sleep(max(0.0, at - time.monotonic()))

    def _begin(self) -> Ask:
        ask = Ask(time.monotonic())
        _current.set(ask)
        self.asks.append(ask)
        return ask
