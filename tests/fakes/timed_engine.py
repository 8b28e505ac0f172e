"""An engine whose requests take as long as their bodies say: `{"seconds": 3, "tokens": 10, "fails": False}`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any

from serve_app.errors import EngineFailed, EngineUnreachable
from serve_app.transport import EngineInfo, EngineLoad, Frame, Submit, TokenUsage
from serve_app.types import Operation
from tests.fakes.virtual_time import now

DIED = "the engine died"


def submit(number: int, seconds: float = 1.0, operation: Operation = Operation.COMPLETION, **more: Any) -> Submit:
    """A request of so many seconds. `prompt`, `output`: the router's estimate; `fails`, `tokens`: see the module."""
    body = {"seconds": seconds, "tokens": 10} | {name: more.pop(name) for name in ("tokens", "fails") if name in more}
    return Submit(
        number,
        f"id-{number}",
        operation,
        body,
        prompt_tokens=more.pop("prompt", 8),
        output_tokens=more.pop("output", 8),
        **more,
    )


class TimedEngine:
    """An `EngineBackend`. `began` has when each request began, `runs` those that run now."""

    def __init__(self) -> None:
        self.began: dict[int, float] = {}
        self.runs: set[int] = set()
        self.aborted: list[int] = []
        self.figures = EngineLoad()
        self.alive = True
        self.ended = asyncio.Event()

    async def start(self) -> EngineInfo:
        return EngineInfo("timed", ["generate"], 1024, 64, 65_536, 1)

    async def run(self, submit: Submit) -> AsyncGenerator[Frame, None]:
        if not self.alive:
            raise EngineUnreachable(DIED)
        number = submit.number
        body = submit.body
        self.began[number] = now()
        self.runs.add(number)
        try:
            yield Frame(number, b"first", 200, "sse", events=1)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(body["seconds"]):
                    await self.ended.wait()
            if not self.alive or body.get("fails"):
                raise EngineFailed(DIED if not self.alive else "this request failed")
            yield Frame(number, b"last", usage=TokenUsage(8, body["tokens"]))
        except (GeneratorExit, asyncio.CancelledError):
            self.aborted.append(number)
            raise
        finally:
            self.runs.discard(number)

    def die(self) -> None:
        """Fail what runs, and what comes."""
        self.alive = False
        self.ended.set()

    def load(self) -> EngineLoad:
        return self.figures

    async def check_health(self) -> None:
        if not self.alive:
            raise EngineFailed(DIED)

    def kill(self) -> None:
        self.die()

    async def shutdown(self) -> None:
        self.die()
