"""A server of `llm.map` in virtual time: a function says how long each attempt takes and how it ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any

from openai.types import Completion

from serve_app.client.map import PATIENCE_S, Ask, MapOptions, MapResult, results_of
from serve_app.client.map_progress import Report
from serve_app.client.streams import Stream
from serve_app.errors import ServeAppError
from serve_app.http import CallKind

Outcome = tuple[float, ServeAppError | None]  # the seconds that an attempt takes, and its error
Script = Callable[[Any, int], Outcome]  # of an attempt: its subject, and the attempts before


def completion(text: str) -> Completion:
    return Completion.model_validate({
        "id": "cmpl-1",
        "object": "text_completion",
        "created": 0,
        "model": "sim",
        "choices": [{"index": 0, "text": text, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5},
    })  # fmt: skip


def answered_at_once(subject: Any, attempt: int) -> Outcome:
    return 0.0, None


class Prompts:
    """Numbered prompts, made when they are read; counts what was read, and whether it was closed."""

    def __init__(self, count: int | None) -> None:
        self.count = count
        self.read = 0
        self.is_closed = False

    async def items(self) -> AsyncGenerator[str, None]:
        try:
            while self.count is None or self.read < self.count:
                self.read += 1
                yield f"p{self.read - 1}"
        finally:
            self.is_closed = True


class FakeServer:
    """Answers the calls of one map, and keeps count."""

    def __init__(self, script: Script = answered_at_once) -> None:
        self._script = script
        self.in_flight = self.most_in_flight = self.cancelled = 0
        self.sent: list[tuple[float, Any, int]] = []  # when, subject, attempts before
        self.prepared: list[tuple[CallKind, Any, Mapping[str, Any]]] = []
        self.keeps_sent = True  # False: for many prompts

    async def prepare(self, kind: CallKind, subject: Any, fields: Mapping[str, Any]) -> Ask:
        if self.keeps_sent:
            self.prepared.append((kind, subject, fields))

        def ask(attempts: int) -> Awaitable[Completion]:
            return self._call(subject, attempts)

        return ask

    async def _call(self, subject: Any, attempts: int) -> Completion:
        if self.keeps_sent:
            self.sent.append((asyncio.get_running_loop().time(), subject, attempts))
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        took_s, error = self._script(subject, attempts)
        try:
            await asyncio.sleep(took_s)  # in virtual time
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.in_flight -= 1
        if error is not None:
            raise error
        return completion(f"{subject} answered")

    def map(
        self,
        prompts: Any,
        *,
        concurrency: int = 4,
        ordered: bool = True,
        progress: bool | Report | None = None,
        patience_s: float = PATIENCE_S,
        **fields: Any,
    ) -> Stream[MapResult]:
        options = MapOptions(concurrency, ordered, patience_s, fields)
        return results_of(self.prepare, prompts, options, progress)


def numbered(count: int) -> list[str]:
    return [f"p{number}" for number in range(count)]


async def collect(results: Any) -> list[MapResult]:
    return [result async for result in results]
