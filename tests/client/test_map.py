"""A map of prompts: order, bounds, refusals, errors and leaving, with a fake server and in virtual time."""

from __future__ import annotations

import asyncio
import contextlib
import random
import tracemalloc
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.client import MapProgress
from serve_app.client.map import MapResult, call_of
from serve_app.client.map_plan import UNREAD_PER_CALL
from serve_app.errors import (
    BadRequest,
    EngineFailed,
    NotFound,
    Overloaded,
    RateLimited,
    Unavailable,
)
from serve_app.http import CallKind
from tests.effort import effort, examples
from tests.fakes.map_calls import FakeServer, Outcome, Prompts, collect, numbered
from tests.fakes.virtual_time import run_in_virtual_time

CONCURRENCY = 4
MANY = effort(3_000, 10_000)
HELLO = [{"role": "user", "content": "Hi"}]
MAX_HELD_BYTES = 200 * MANY  # of a map of many prompts


def test_results_come_in_the_order_of_the_prompts() -> None:
    server = FakeServer(lambda subject, _: (10.0 - int(subject[1:]), None))
    results = run_in_virtual_time(collect(server.map(numbered(10))))
    assert [(result.index, result.item, result.text) for result in results] == [
        (number, f"p{number}", f"p{number} answered") for number in range(10)
    ]
    assert server.most_in_flight == CONCURRENCY


def test_results_come_as_completed_where_order_does_not_matter() -> None:
    server = FakeServer(lambda subject, _: (10.0 - int(subject[1:]), None))
    results = run_in_virtual_time(collect(server.map(numbered(4), ordered=False)))
    assert [result.index for result in results] == [3, 2, 1, 0]


def test_an_item_is_a_completion_a_chat_or_an_embedding_with_its_own_fields() -> None:
    fields = {"max_tokens": 5, "priority": "low"}
    assert call_of("p", fields) == (CallKind.COMPLETE, "p", fields)
    assert call_of([1, 2, 3], fields) == (CallKind.COMPLETE, [1, 2, 3], fields)
    assert call_of(HELLO, fields) == (CallKind.CHAT, HELLO, fields)
    own = {"messages": HELLO, "max_tokens": 7, "metadata": {"row": "12"}}
    assert call_of(own, fields) == (CallKind.CHAT, HELLO, fields | {"max_tokens": 7, "metadata": {"row": "12"}})
    assert call_of({"prompt": "p"}, fields) == (CallKind.COMPLETE, "p", fields)
    assert call_of({"input": ["a", "b"]}, {}) == (CallKind.EMBED, ["a", "b"], {})


@pytest.mark.parametrize("item", [None, 7, [], b"text", {}, {"role": "user"}, {"prompt": "p", "input": "i"}])
def test_an_item_that_is_no_request_is_an_error_of_its_own(item: Any) -> None:
    server = FakeServer()
    results = run_in_virtual_time(collect(server.map(["before", item, "after"])))
    assert [type(result.error) for result in results] == [type(None), BadRequest, type(None)]
    assert (results[1].attempts, results[1].item, len(server.sent)) == (0, item, 2)
    with pytest.raises(BadRequest, match="an item"):
        results[1].unwrap()


@pytest.mark.parametrize("ordered", [True, False])
def test_thousands_of_prompts_are_read_as_results_are_taken_and_held_in_bounded_memory(ordered: bool) -> None:
    async def scenario() -> tuple[int, int]:
        prompts = Prompts(MANY)
        server = FakeServer(lambda *_: (1.0, None))
        most = 0
        taken = 0
        server.keeps_sent = False
        async for result in server.map(prompts.items(), ordered=ordered):
            most = max(most, prompts.read - taken)
            taken += 1
            assert not ordered or result.index == taken - 1
        assert server.most_in_flight == CONCURRENCY
        return most, taken

    tracemalloc.start()
    most, taken = run_in_virtual_time(scenario())
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert taken == MANY
    assert most <= UNREAD_PER_CALL * CONCURRENCY
    assert peak_bytes < MAX_HELD_BYTES


def test_a_slow_first_item_and_a_reader_that_stops_stop_the_reading() -> None:
    async def scenario() -> None:
        prompts = Prompts(None)
        server = FakeServer(lambda subject, _: (1000.0 if subject == "p0" else 1.0, None))
        async with server.map(prompts.items()) as results:
            await anext(results)
            assert asyncio.get_running_loop().time() == 1000.0
            assert prompts.read == UNREAD_PER_CALL * CONCURRENCY
            await asyncio.sleep(1000)  # the reader does something else, in virtual time
            assert prompts.read == UNREAD_PER_CALL * CONCURRENCY + 1, "one for the one that was taken"
            assert server.in_flight == 0

    run_in_virtual_time(scenario())


def test_an_endless_source_is_read_while_results_are_taken() -> None:
    async def scenario() -> None:
        prompts = Prompts(None)
        async for result in FakeServer().map(prompts.items()):
            if result.index == 100:
                break
        await asyncio.sleep(1)  # for the loop to close what was left, in virtual time
        assert prompts.is_closed
        assert prompts.read <= 101 + UNREAD_PER_CALL * CONCURRENCY

    run_in_virtual_time(scenario())


def test_progress_counts_every_item_once() -> None:
    seen: list[MapProgress] = []
    server = FakeServer(lambda subject, _: (1.0, NotFound("no") if subject == "bad" else None))
    run_in_virtual_time(collect(server.map(["a", "bad", "b"], progress=seen.append)))
    assert [progress.done for progress in seen] == [1, 2, 3]
    assert seen[-1] == MapProgress(done=3, failed=1, in_flight=0, waiting=0, tokens=6, total=3)
    lazy: list[MapProgress] = []
    run_in_virtual_time(collect(server.map(Prompts(3).items(), progress=lazy.append)))
    assert lazy[-1].total is None


async def _broken_source() -> AsyncGenerator[str, None]:
    yield "a"
    yield "b"
    raise LookupError("the file is torn")


def test_an_error_of_the_source_comes_after_the_results_before_it() -> None:
    async def scenario() -> None:
        texts: list[str] = []
        try:
            async for result in FakeServer(lambda *_: (1.0, None)).map(_broken_source()):
                texts.append(result.text)
        except LookupError as error:
            texts.append(str(error))
        assert texts == ["a answered", "b answered", "the file is torn"]

    run_in_virtual_time(scenario())


def test_an_error_of_the_progress_function_ends_the_map() -> None:
    def fails(progress: MapProgress) -> None:
        raise LookupError("mine")

    async def scenario() -> None:
        server = FakeServer(lambda *_: (1.0, None))
        prompts = Prompts(None)
        with pytest.raises(LookupError, match="mine"):
            await collect(server.map(prompts.items(), progress=fails))
        assert (server.in_flight, prompts.is_closed) == (0, True)

    run_in_virtual_time(scenario())


def test_a_fault_of_the_client_itself_ends_the_map() -> None:
    def closed(subject: Any, attempt: int) -> Outcome:
        raise RuntimeError("this client is closed")

    async def scenario() -> None:
        with pytest.raises(RuntimeError, match="closed"):
            await collect(FakeServer(closed).map(["a", "b"]))

    run_in_virtual_time(scenario())


async def _break(results: Any) -> None:
    async for _ in results:
        break


async def _raise(results: Any) -> None:
    with contextlib.suppress(KeyError):
        async for _ in results:
            raise KeyError


async def _leave_the_block(results: Any) -> None:
    async with results:
        await anext(results)
        await asyncio.sleep(0.5)  # in virtual time: the next one is sent


async def _cancel(results: Any) -> None:
    reading = asyncio.create_task(collect(results))
    await asyncio.sleep(1.5)  # in virtual time: it waits for the second result
    reading.cancel()
    await asyncio.wait({reading})
    assert reading.cancelled()


async def _drop(results: Any) -> None:
    await anext(results)


@pytest.mark.parametrize("leave", [_break, _raise, _leave_the_block, _cancel, _drop])
def test_leaving_aborts_all_requests_and_closes_the_source(leave: Any) -> None:
    async def scenario() -> None:
        prompts = Prompts(None)
        server = FakeServer(lambda subject, _: (1.0 if subject == "p0" else 500.0, None))
        await leave(server.map(prompts.items()))
        await asyncio.sleep(1)  # for the loop to close what was left, in virtual time
        assert (server.in_flight, server.cancelled) == (0, CONCURRENCY)
        assert prompts.is_closed

    run_in_virtual_time(scenario())


def test_a_map_that_is_never_read_touches_nothing() -> None:
    async def scenario() -> None:
        prompts = Prompts(3)
        server = FakeServer()
        async with server.map(prompts.items()):
            pass
        assert (prompts.read, server.sent) == (0, [])

    run_in_virtual_time(scenario())


@pytest.mark.parametrize(
    ("prompts", "options", "error", "reported"),
    [
        (["p"], {"concurrency": 0}, ValueError, "concurrency is 0"),
        (["p"], {"concurrency": 2.5}, ValueError, "concurrency is 2.5"),
        (["p"], {"patience_s": -1}, ValueError, "patience_s is -1"),
        (["p"], {"patience_s": float("nan")}, ValueError, "patience_s is nan"),
        (["p"], {"max_token": 5}, BadRequest, r"map\(\) has no argument `max_token`; did you mean `max_tokens`"),
        (["p"], {"stream": True}, BadRequest, "`stream` is not an argument"),
        (["p"], {"deadline_s": "soon"}, BadRequest, "deadline_s"),
        (["p"], {"seed": object()}, BadRequest, "`seed` cannot be written as JSON"),
        (["p"], {"idempotency_key": "k"}, BadRequest, "belongs to one item"),
        (["p"], {"messages": HELLO}, BadRequest, "belongs to one item"),
        ("a text", {}, TypeError, "one text"),
        ({"prompt": "p"}, {}, TypeError, "one mapping"),
        (7, {}, TypeError, "is a int"),
    ],
)
def test_a_wrong_argument_is_an_error_before_anything_is_sent(
    prompts: Any, options: dict[str, Any], error: type[Exception], reported: str
) -> None:
    with pytest.raises(error, match=reported):
        FakeServer().map(prompts, **options)


@settings(max_examples=examples(150), deadline=None)
@given(
    seed=st.integers(0, 2**32),
    count=st.integers(0, 60),
    concurrency=st.integers(1, 6),
    ordered=st.booleans(),
    refusals=st.floats(0, 0.6),
)
def test_every_item_comes_out_once_whatever_the_server_and_the_reader_do(
    seed: int, count: int, concurrency: int, ordered: bool, refusals: float
) -> None:
    random_ = random.Random(seed)

    def script(subject: Any, attempt: int) -> Outcome:
        took_s = random_.choice((0.0, 0.1, 1.0, 20.0))
        if random_.random() >= refusals:
            return took_s, random_.choice((None, None, BadRequest("no")))
        retry_s = random_.choice((None, 0.0, 0.5, 5.0, 5.0))
        return took_s, random_.choice((
            Overloaded("full", retry_after_s=retry_s),
            RateLimited("limit", retry_after_s=retry_s),
            Unavailable("none", retry_after_s=retry_s),
            EngineFailed("died"),
        ))  # fmt: skip

    async def scenario() -> list[MapResult]:
        prompts = Prompts(count)
        server = FakeServer(script)
        results = []
        async for result in server.map(prompts.items(), concurrency=concurrency, ordered=ordered):
            results.append(result)
            assert prompts.read - len(results) <= UNREAD_PER_CALL * concurrency
            await asyncio.sleep(random_.choice((0.0, 0.0, 0.3, 10.0)))  # the reader's own work, in virtual time
        assert server.most_in_flight <= concurrency
        attempts = [subject for _, subject, _ in server.sent]
        assert all(attempts.count(result.item) == result.attempts for result in results)
        return results

    results = run_in_virtual_time(scenario())
    indices = [result.index for result in results]
    assert (indices if ordered else sorted(indices)) == list(range(count))
    assert all((result.answer is None) != (result.error is None) for result in results)
