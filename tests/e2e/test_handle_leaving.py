"""A caller by handle that goes away takes its request with it, however it goes: out of the line, out of the engine,
within a second."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from serve_app.client import Client, connect
from serve_app.client.streams import Stream, SyncStream
from tests.e2e.joined import LONG, PROGRAM_S, environment, full, joined, running
from tests.e2e.observe import ABORT_S, FILL_S, Observer
from tests.e2e.stack import SIMULATED, SIMULATED_SLOTS, TINY, Stack
from tests.waiting import patient, wait_until

pytestmark = pytest.mark.long  # test_disconnect has every way of leaving, by HTTP

TOKENS = {SIMULATED: LONG, TINY: 2000}  # of the real one some three seconds and more


@pytest.fixture(scope="module")
def llm(stack: Stack) -> Iterator[Client]:
    with joined(stack) as client:
        yield client


@pytest.fixture(params=[TINY, SIMULATED])
def model(request: pytest.FixtureRequest, observer: Observer) -> Iterator[str]:
    """Each model in turn, idle before and after."""
    name: str = request.param
    observer.wait_idle(name)
    yield name
    observer.wait_idle(name)


def long(model: str) -> dict[str, Any]:
    return {"prompt": "The river", "model": model, "max_tokens": TOKENS[model], "ignore_eos": True}


async def begun(observer: Observer, model: str, count: int = 1) -> None:
    await asyncio.to_thread(wait_until, lambda: observer.running(model), FILL_S, "sequences running", wanted=count)


async def gone(observer: Observer, model: str) -> None:
    """In a thread: the event loop has to go on meanwhile."""
    await asyncio.to_thread(
        wait_until, lambda: observer.figures(model), ABORT_S, "running, waiting, granted", wanted=(0, 0, 0)
    )


async def _cancelled_while_waiting_for_it_all(llm: Client, model: str, observer: Observer) -> None:
    call = asyncio.create_task(llm.complete(**long(model)))
    await begun(observer, model)
    call.cancel()
    await asyncio.wait({call})
    assert call.cancelled()


async def _timed_out(llm: Client, model: str, observer: Observer) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(patient(1.0)):  # bound of nothing: the caller's own patience, once it runs
            await llm.complete(**long(model))


async def _left_by_break(llm: Client, model: str, observer: Observer) -> None:
    async for _ in llm.stream_complete(**long(model)):
        break


async def _left_by_break_with_the_stream_kept(llm: Client, model: str, observer: Observer) -> Stream[Any]:
    stream = llm.stream_complete(**long(model))
    async for _ in stream:
        break
    await gone(observer, model)
    return stream


async def _left_by_an_error(llm: Client, model: str, observer: Observer) -> None:
    with contextlib.suppress(KeyError):
        async for _ in llm.stream_complete(**long(model)):
            raise KeyError


async def _closed(llm: Client, model: str, observer: Observer) -> None:
    stream = llm.stream_complete(**long(model))
    await anext(stream)
    await stream.aclose()


async def _left_by_the_end_of_a_block(llm: Client, model: str, observer: Observer) -> None:
    async with llm.stream_complete(**long(model)) as stream:
        await anext(stream)


async def _dropped(llm: Client, model: str, observer: Observer) -> None:
    stream = llm.stream_complete(**long(model))
    await anext(stream)
    del stream
    await gone(observer, model)


async def _cancelled_while_reading(llm: Client, model: str, observer: Observer) -> None:
    async def read() -> int:
        return sum([1 async for _ in llm.stream_complete(**long(model))])

    reading = asyncio.create_task(read())
    await begun(observer, model)
    reading.cancel()
    await asyncio.wait({reading})
    assert reading.cancelled()


WAYS = [
    _cancelled_while_waiting_for_it_all,
    _timed_out,
    _left_by_break,
    _left_by_break_with_the_stream_kept,
    _left_by_an_error,
    _closed,
    _left_by_the_end_of_a_block,
    _dropped,
    _cancelled_while_reading,
]


@pytest.mark.parametrize("leave", WAYS, ids=lambda way: way.__name__.strip("_"))
def test_an_async_caller_that_leaves(
    llm: Client, observer: Observer, model: str, leave: Callable[[Client, str, Observer], Awaitable[Any]]
) -> None:
    async def scenario() -> None:
        await leave(llm, model, observer)
        await gone(observer, model)

    with observer.ends(model, "cancelled_running"):
        asyncio.run(scenario())
    made = observer.generated(model)
    assert observer.generated(model) == made, "the engine goes on generating"


def test_an_event_loop_that_ends_in_the_middle_of_a_stream(llm: Client, observer: Observer, model: str) -> None:
    kept: list[Stream[Any]] = []

    async def leave() -> None:
        kept.append(llm.stream_complete(**long(model)))
        await anext(kept[0])

    with observer.ends(model, "cancelled_running"):
        asyncio.run(leave())
        wait_until(lambda: observer.figures(model), ABORT_S, "running, waiting, granted", wanted=(0, 0, 0))


def _sync_break(stream: SyncStream[Any]) -> None:
    for _ in stream:
        break


def _sync_close(stream: SyncStream[Any]) -> None:
    next(stream)
    stream.close()


def _sync_error(stream: SyncStream[Any]) -> None:
    with contextlib.suppress(KeyError), stream:
        next(stream)
        raise KeyError


@pytest.mark.parametrize("leave", [_sync_break, _sync_close, _sync_error], ids=lambda way: way.__name__.strip("_"))
def test_a_sync_caller_that_leaves(
    llm: Client, observer: Observer, model: str, leave: Callable[[SyncStream[Any]], None]
) -> None:
    stream = llm.sync.stream_complete(**long(model))
    with observer.ends(model, "cancelled_running"):
        leave(stream)
        wait_until(lambda: observer.figures(model), ABORT_S, "running, waiting, granted", wanted=(0, 0, 0))
    assert list(stream) == []


def test_a_sync_iterator_that_is_dropped(llm: Client, observer: Observer, model: str) -> None:
    with observer.ends(model, "cancelled_running"):
        iterator = iter(llm.sync.stream_complete(**long(model)))
        next(iterator)
        del iterator
        wait_until(lambda: observer.figures(model), ABORT_S, "running, waiting, granted", wanted=(0, 0, 0))


def test_leaving_the_queue_takes_the_request_out(llm: Client, observer: Observer, simulated: str) -> None:
    async def leave() -> None:
        waiting: list[asyncio.Task[Any]] = [asyncio.create_task(llm.complete(**long(simulated)))]
        waiting += [asyncio.create_task(anext(llm.stream_complete(**long(simulated)))) for _ in range(2)]
        await asyncio.to_thread(wait_until, lambda: observer.waiting(simulated), FILL_S, "requests waiting", wanted=3)
        for call in waiting:
            call.cancel()
        await asyncio.wait(waiting)

    with observer.ends(simulated, "cancelled_queued", 3), full(llm):
        asyncio.run(leave())
        wait_until(lambda: observer.waiting(simulated), ABORT_S, "requests waiting", wanted=0)
        assert observer.granted(simulated) == SIMULATED_SLOTS


def test_a_client_that_is_closed_ends_its_calls(stack: Stack, llm: Client, observer: Observer, simulated: str) -> None:
    async def closing() -> None:
        client = connect(stack.api_key)
        calls = [asyncio.create_task(client.complete(**long(simulated))) for _ in range(3)]
        await begun(observer, simulated, 3)
        await asyncio.to_thread(client.close)
        reported = await asyncio.gather(*calls, return_exceptions=True)
        assert {type(error).__name__ for error in reported} == {"Unavailable"}
        with pytest.raises(RuntimeError, match="closed"):
            await client.complete(**long(simulated))

    with observer.ends(simulated, "cancelled_running", 3):
        asyncio.run(closing())
        wait_until(lambda: observer.figures(simulated), ABORT_S, "running, waiting, granted", wanted=(0, 0, 0))
    assert llm.sync.complete("others are not concerned", model=simulated, max_tokens=2).usage is not None


WHOLE = "llm.sync.complete('x', max_tokens=8000)"
STREAMED = "for chunk in llm.sync.stream_complete('x', max_tokens=8000): pass"
AWAITED = "import asyncio; asyncio.run(llm.complete('x', max_tokens=8000))"
PROGRAM = "from serve_app import connect; llm = connect(model='tiny-sim')\n{}"
ONCE_JOINED = PROGRAM.format("llm.sync.complete('x', max_tokens=1); print('joined', flush=True); input()\n{}")


@pytest.mark.parametrize(
    ("call", "sent"),
    [
        (WHOLE, signal.SIGKILL),
        (STREAMED, signal.SIGKILL),
        (AWAITED, signal.SIGKILL),
        (WHOLE, signal.SIGINT),
        (STREAMED, signal.SIGTERM),
    ],
    ids=["whole, killed", "streamed, killed", "awaited, killed", "whole, Ctrl-C", "streamed, terminated"],
)
def test_a_program_that_dies_takes_its_request_with_it(
    stack: Stack, observer: Observer, simulated: str, call: str, sent: signal.Signals
) -> None:
    with observer.ends(simulated, "cancelled_running"), running(PROGRAM.format(call), environment(stack)) as program:
        wait_until(lambda: observer.running(simulated), PROGRAM_S, "sequences running", wanted=1)
        program.send_signal(sent)
        wait_until(lambda: observer.figures(simulated), ABORT_S, "running, waiting, granted", wanted=(0, 0, 0))


@pytest.mark.parametrize("call", [WHOLE, STREAMED], ids=["whole", "streamed"])
def test_a_program_that_dies_in_the_queue_leaves_it(
    stack: Stack, llm: Client, observer: Observer, simulated: str, call: str
) -> None:
    """It has joined and asked before the slots are taken: what takes them does not last as long as a start may."""
    with running(ONCE_JOINED.format(call), environment(stack)) as program:
        assert program.stdout is not None
        assert program.stdin is not None
        assert program.stdout.readline() == "joined\n"
        with observer.ends(simulated, "cancelled_queued"), full(llm):
            program.stdin.write("go on\n")
            program.stdin.flush()
            wait_until(lambda: observer.waiting(simulated), FILL_S, "requests waiting", wanted=1)
            program.kill()
            wait_until(lambda: observer.waiting(simulated), ABORT_S, "requests waiting", wanted=0)


FROZEN = """
import os, signal
from serve_app import connect
llm = connect(model="tiny-sim")
for chunk in llm.sync.stream_complete("x", max_tokens=8000):
    os.kill(os.getpid(), signal.SIGSTOP)
"""


def test_a_frozen_program_delays_nobody_else(stack: Stack, llm: Client, observer: Observer, simulated: str) -> None:
    with running(FROZEN, environment(stack)):
        wait_until(lambda: observer.running(simulated), PROGRAM_S, "sequences running", wanted=1)
        answer = llm.sync.complete("x", model=simulated, max_tokens=50)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 50
    observer.wait_idle(simulated)
