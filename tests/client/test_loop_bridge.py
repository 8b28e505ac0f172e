"""A link carries calls from any loop and thread to its home loop: in order, bounded, and ended when their reader is."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import pytest

from serve_app.client import loop_bridge as links
from serve_app.client.loop_bridge import Forwarder, LoopBridge
from serve_app.http import AnswerPiece, HttpRequest
from tests.fakes.handle_calls import NearCalls, home, link_to

ASKED = HttpRequest("POST", "/x", [], b"{}")
SOON_S = 5.0  # bound of what takes milliseconds
STUCK_S = 0.05  # of a send whose reader does not read: the others take microseconds


class Edge:
    """Sends numbered pieces, then ends, fails, or waits for ever; tells when its task has ended."""

    def __init__(self, pieces: int, then: str = "end") -> None:
        self._pieces = pieces
        self._then = then
        self.sent = 0
        self.stuck = threading.Event()  # a send had to wait for longer than a reader takes
        self.ended = threading.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            for number in range(self._pieces):
                late = asyncio.get_running_loop().call_later(STUCK_S, self.stuck.set)
                await send({"type": "http.response.body", "body": b"%d," % number, "more_body": True})
                late.cancel()
                self.sent += 1
            if self._then == "fail":
                raise ValueError("broken")
            if self._then == "wait":
                await asyncio.Event().wait()
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self.ended.set()


async def read(link: LoopBridge) -> bytes:
    reported: list[AnswerPiece] = []
    async with aclosing(link.exchange(ASKED)) as pieces:
        async for piece in pieces:
            reported.append(piece)
    return b"".join(piece[2] if isinstance(piece, tuple) else piece for piece in reported)


def numbers(count: int) -> bytes:
    return b"".join(b"%d," % number for number in range(count))


@pytest.mark.parametrize(
    "count", [0, 1, links.MAX_UNREAD_PIECES - 1, links.MAX_UNREAD_PIECES, 5 * links.MAX_UNREAD_PIECES]
)
def test_pieces_cross_loops_in_order(count: int) -> None:
    with home() as loop:
        assert asyncio.run(read(link_to(Edge(count), loop))) == numbers(count)


def test_pieces_are_read_in_the_home_loop_itself() -> None:
    async def here() -> bytes:
        return await read(link_to(Edge(200), asyncio.get_running_loop()))

    assert asyncio.run(here()) == numbers(200)


def test_an_error_comes_after_the_pieces_before_it() -> None:
    async def scenario(link: LoopBridge) -> None:
        reported: list[AnswerPiece] = []

        async def all_of_it() -> None:
            async for piece in link.exchange(ASKED):
                reported.append(piece)

        with pytest.raises(ValueError, match="broken"):
            await all_of_it()
        assert len(reported) == 3

    with home() as loop:
        asyncio.run(scenario(link_to(Edge(3, "fail"), loop)))


def test_a_reader_that_is_behind_holds_the_writer_up() -> None:
    edge = Edge(10 * links.MAX_UNREAD_PIECES)

    async def scenario(link: LoopBridge) -> None:
        async with aclosing(link.exchange(ASKED)) as pieces:
            await anext(pieces)
            await asyncio.to_thread(edge.stuck.wait, SOON_S)
            assert edge.stuck.is_set()
            assert edge.sent <= links.MAX_UNREAD_PIECES + 2
            read_so_far = 1
            async for _ in pieces:
                read_so_far += 1
        assert read_so_far == 10 * links.MAX_UNREAD_PIECES + 1

    with home() as loop:
        asyncio.run(scenario(link_to(edge, loop)))


async def _close(link: LoopBridge) -> None:
    pieces = link.exchange(ASKED)
    await anext(pieces)
    await pieces.aclose()


async def _cancel(link: LoopBridge) -> None:
    reading = asyncio.create_task(read(link))
    await asyncio.sleep(0.01)  # it waits for pieces by then, or has not begun: both are cancelled
    reading.cancel()
    await asyncio.wait({reading})


async def _drop(link: LoopBridge) -> None:
    pieces = link.exchange(ASKED)
    await anext(pieces)
    del pieces
    await asyncio.sleep(0)


async def _end_the_loop(link: LoopBridge) -> None:
    left_open.append(link.exchange(ASKED))
    await anext(left_open[-1])


left_open: list[Any] = []


@pytest.mark.parametrize("leave", [_close, _cancel, _drop, _end_the_loop])
@pytest.mark.parametrize("pieces", [1, 10 * links.MAX_UNREAD_PIECES])
def test_a_reader_that_leaves_ends_the_call(leave: Any, pieces: int) -> None:
    edge = Edge(pieces, "wait")
    with home() as loop:
        asyncio.run(leave(link_to(edge, loop)))
        assert edge.ended.wait(SOON_S)


def test_a_reader_dropped_after_its_loop_was_closed_ends_the_call() -> None:
    edge = Edge(1, "wait")
    with home() as loop:
        other = asyncio.new_event_loop()
        pieces = link_to(edge, loop).exchange(ASKED)
        other.run_until_complete(anext(pieces))
        other.close()  # without a word to its generators
        assert not edge.ended.is_set()
        del pieces
        assert edge.ended.wait(SOON_S)


def test_a_writer_notices_that_its_reader_s_loop_was_closed() -> None:
    ended = threading.Event()

    async def source() -> AsyncGenerator[int, None]:
        try:
            while True:
                yield 1
        finally:
            ended.set()

    other = asyncio.new_event_loop()
    other.close()
    with home() as loop:
        forwarder = Forwarder(source(), loop, lambda message: other.call_soon_threadsafe(print, message))
        assert ended.wait(SOON_S)
        forwarder.close()


def test_run_waits_in_any_thread_but_the_home_loop_s_own() -> None:
    async def inside(link: LoopBridge) -> str:
        with pytest.raises(RuntimeError, match="use `await`"):
            link.run(asyncio.sleep, 0)
        return "told"

    with home() as loop:
        link = link_to(Edge(0), loop)
        assert link.run(inside, link) == "told"

        async def elsewhere() -> bytes:
            return link.run(read, link)  # another loop runs in this thread, and waits

        assert asyncio.run(elsewhere()) == b""


def test_a_wait_that_is_interrupted_ends_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by Ctrl-C in the main thread."""
    edge = Edge(1, "wait")
    submit = asyncio.run_coroutine_threadsafe

    def interrupted(coroutine: Any, loop: Any) -> Any:
        future = submit(coroutine, loop)

        def result(timeout: float | None = None) -> None:
            while not edge.sent:
                continue
            raise KeyboardInterrupt

        monkeypatch.setattr(future, "result", result)
        return future

    with home() as loop:
        link = link_to(edge, loop)
        monkeypatch.setattr(links.asyncio, "run_coroutine_threadsafe", interrupted)
        with pytest.raises(KeyboardInterrupt):
            link.run(read, link)
        monkeypatch.undo()
        assert edge.ended.wait(SOON_S)


def test_a_closed_link_refuses_and_closes_its_calls_once() -> None:
    made: list[NearCalls] = []
    with home() as loop:
        plain = link_to(Edge(1), loop)

        def make() -> NearCalls:
            made.append(plain.make())  # type: ignore[arg-type]
            return made[-1]

        link = LoopBridge(make)
        assert asyncio.run(read(link)) == numbers(1)
        link.close(SOON_S)
        link.close(SOON_S)
        assert [calls.closed for calls in made] == [True]
        with pytest.raises(RuntimeError, match="closed"):
            asyncio.run(read(link))
        with pytest.raises(RuntimeError, match="closed"):
            link.run(read, link)


def test_calls_are_made_anew_where_their_loop_has_ended() -> None:
    made: list[asyncio.AbstractEventLoop] = []

    async def here(link: LoopBridge) -> bytes:
        return await read(link)

    def make() -> NearCalls:
        made.append(asyncio.get_running_loop())
        return link_to(Edge(2), made[-1]).make()  # type: ignore[return-value]

    link = LoopBridge(make)
    assert asyncio.run(here(link)) == asyncio.run(here(link)) == numbers(2)
    assert len(made) == 2
