"""A map in scripts, and sources that block: which thread reads what."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from serve_app.client.map import MapOptions, MapResult, sync_results_of
from serve_app.client.map_plan import UNREAD_PER_CALL
from serve_app.client.streams import SyncStream
from tests.fakes.handle_calls import home, link_to
from tests.fakes.map_calls import FakeServer, Prompts, answered_at_once, collect, numbered

CONCURRENCY = 4
SOON_S = 10.0  # bound of what takes milliseconds


def test_a_sync_source_is_read_in_one_thread_beside_the_loop() -> None:
    threads: set[str] = set()

    def rows() -> Iterator[str]:
        for number in range(20):
            threads.add(threading.current_thread().name)
            yield f"p{number}"

    results = asyncio.run(collect(FakeServer(answered_at_once).map(rows())))
    assert [result.index for result in results] == list(range(20))
    assert len(threads) == 1
    assert threads != {threading.current_thread().name}


def test_a_sync_source_that_blocks_holds_up_neither_the_loop_nor_leaving() -> None:
    reading = threading.Event()
    arrives = threading.Event()
    closed = threading.Event()

    def rows() -> Iterator[str]:
        try:
            yield "first"
            reading.set()
            arrives.wait(10)
            yield "second"
        finally:
            closed.set()

    async def scenario() -> None:
        async with FakeServer(answered_at_once).map(rows()) as results:
            assert (await anext(results)).text == "first answered"
            assert await asyncio.to_thread(reading.wait, 10)
        assert not closed.is_set(), "it is being read"
        arrives.set()
        assert await asyncio.to_thread(closed.wait, 10)

    asyncio.run(scenario())


class Calls:
    """The home loop of a client, in a thread of its own, and the fake server in it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, server: FakeServer) -> None:
        self.bridge = link_to(None, loop)
        self.server = server

    def map(self, prompts: Any, *, progress: Any = None, **options: Any) -> SyncStream[MapResult]:
        made = MapOptions(**{"concurrency": CONCURRENCY, "ordered": True, "patience_s": 60.0, "fields": {}} | options)
        return sync_results_of(self.server.prepare, self.bridge, prompts, made, progress)


@pytest.fixture
def calls() -> Iterator[Calls]:
    with home() as loop:
        yield Calls(loop, FakeServer())


class Rows:
    """Numbered prompts of a generator; keeps the threads that read and closed it."""

    def __init__(self) -> None:
        self.read = 0
        self.threads: set[threading.Thread] = set()
        self.closed = threading.Event()

    def __call__(self, count: int) -> Iterator[str]:
        try:
            for number in range(count):
                self.threads.add(threading.current_thread())
                self.read += 1
                yield f"p{number}"
        finally:
            self.threads.add(threading.current_thread())
            self.closed.set()


@pytest.mark.parametrize("ordered", [True, False])
def test_a_sync_map_is_an_ordinary_iterator_that_reads_its_prompts_in_the_caller_s_thread(
    calls: Calls, ordered: bool
) -> None:
    rows = Rows()
    most = 0
    results = []
    for result in calls.map(rows(300), ordered=ordered):
        most = max(most, rows.read - len(results))
        results.append(result)
    assert sorted(result.index for result in results) == list(range(300))
    assert {result.text for result in results} == {f"p{number} answered" for number in range(300)}
    assert rows.threads == {threading.current_thread()}
    assert most <= UNREAD_PER_CALL * CONCURRENCY + 1, "one more is on its way between the threads"


def test_a_sync_map_reports_its_progress_in_the_caller_s_thread(calls: Calls) -> None:
    seen: list[tuple[int, threading.Thread]] = []
    list(calls.map(numbered(5), progress=lambda progress: seen.append((progress.done, threading.current_thread()))))
    assert [done for done, _ in seen] == [1, 2, 3, 4, 5]
    assert {thread for _, thread in seen} == {threading.current_thread()}


def test_errors_of_the_prompts_and_of_the_progress_function_are_raised_in_the_caller_s_thread(calls: Calls) -> None:
    def torn() -> Iterator[str]:
        yield "a"
        raise LookupError("the file is torn")

    def fails(progress: Any) -> None:
        raise LookupError("mine")

    results = calls.map(torn())
    assert next(results).text == "a answered"
    with pytest.raises(LookupError, match="torn"):
        next(results)
    assert list(results) == []
    rows = Rows()
    with pytest.raises(LookupError, match="mine"):
        list(calls.map(rows(5), progress=fails))
    assert rows.closed.is_set()


def _sync_break(results: SyncStream[MapResult]) -> None:
    for _ in results:
        break


def _sync_close(results: SyncStream[MapResult]) -> None:
    next(results)
    results.close()
    assert list(results) == []


def _sync_raise(results: SyncStream[MapResult]) -> None:
    with contextlib.suppress(KeyError), results:
        next(results)
        raise KeyError


@pytest.mark.parametrize("leave", [_sync_break, _sync_close, _sync_raise])
def test_leaving_a_sync_map_aborts_all_requests_and_closes_the_prompts(leave: Any) -> None:
    rows = Rows()
    with home() as loop:
        server = FakeServer(lambda subject, _: (0.0 if subject == "p0" else 60.0, None))
        leave(Calls(loop, server).map(rows(100)))
        assert rows.closed.is_set()
    assert server.in_flight == 0, "home() has checked that no task is left"
    assert rows.threads == {threading.current_thread()}


def test_another_thread_may_close_a_sync_map_while_a_prompt_is_being_read() -> None:
    reading = threading.Event()
    arrives = threading.Event()
    closed_in: list[threading.Thread] = []

    def rows() -> Iterator[str]:
        try:
            reading.set()
            arrives.wait(SOON_S)
            yield "late"
        finally:
            closed_in.append(threading.current_thread())

    with home() as loop:
        results = Calls(loop, FakeServer()).map(rows())
        read: list[MapResult] = []
        reader = threading.Thread(target=lambda: read.extend(results))
        reader.start()
        assert reading.wait(SOON_S)
        results.close()
        arrives.set()
        reader.join(SOON_S)
        assert not reader.is_alive()
        assert read == []
        assert closed_in == [reader]


def test_an_async_source_is_refused_where_nobody_awaits(calls: Calls) -> None:
    with pytest.raises(TypeError, match="async for"):
        calls.map(Prompts(3).items())


def test_the_loop_of_the_calls_itself_cannot_wait_for_a_map() -> None:
    async def inside(calls: Calls) -> None:
        with pytest.raises(RuntimeError, match="use `await`"):
            next(calls.map(["p"]))

    with home() as loop:
        calls = Calls(loop, FakeServer())
        calls.bridge.run(inside, calls)
