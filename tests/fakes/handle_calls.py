"""The far end of a link without Serve: calls that reach an edge in a loop of this process."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import AsyncGenerator, Iterator
from typing import Any

from serve_app.client import Client
from serve_app.client.loop_bridge import LoopBridge
from serve_app.http import AnswerPiece, HttpRequest
from serve_app.http.asgi_bridge import AsgiBridge
from tests.fakes import engines

JOIN_S = 5.0  # for a thread that has nothing left to do

run = functools.partial(engines.run, loop=asyncio.new_event_loop)  # in real time: handles have loops in other threads


class NearCalls:
    """Stands in for `serve_app.ray_adapter.IngressHandle`, on an edge in `loop`."""

    def __init__(self, inside: AsgiBridge, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._inside = inside
        self.closed = False

    def stream(self, *request: Any, accept_s: float | None = None) -> AsyncGenerator[AnswerPiece, None]:
        return self._inside.exchange(HttpRequest(*request))

    async def close(self) -> None:
        self.closed = True


def client_on(calls: Any, key: str, model: str | None = None) -> Client:
    """A client that sends its requests by this stand-in for `IngressHandle`."""
    return Client(lambda: calls, key, contextlib.ExitStack(), model=model)


def client_of(inside: AsgiBridge, key: str, loop: asyncio.AbstractEventLoop, model: str | None = None) -> Client:
    """A client whose calls reach this edge in `loop`."""
    return client_on(NearCalls(inside, loop), key, model)


@contextlib.contextmanager
def home() -> Iterator[asyncio.AbstractEventLoop]:
    """An event loop in a thread of its own, for the block; everything in it has ended after that."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield loop
        left = asyncio.run_coroutine_threadsafe(_tasks(), loop).result(JOIN_S)
        assert not left, left
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(JOIN_S)
        loop.close()


async def _tasks() -> list[str]:
    """What still runs, once it has had a few turns to end."""
    for _ in range(20):
        await asyncio.sleep(0)
    return [str(task) for task in asyncio.all_tasks() if task is not asyncio.current_task()]


def link_to(edge: Any, loop: asyncio.AbstractEventLoop) -> LoopBridge:
    """A link to a bare ASGI callable in `loop`."""
    return LoopBridge(lambda: NearCalls(AsgiBridge(edge), loop))  # type: ignore[arg-type,return-value]
