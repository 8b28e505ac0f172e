"""What a map does when its requests are refused: moments, pressure, patience; in virtual time."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from serve_app.client import MapProgress
from serve_app.errors import (
    BadRequest,
    EngineFailed,
    Forbidden,
    NotFound,
    Overloaded,
    RateLimited,
    ServeAppError,
    Unauthorized,
    Unavailable,
)
from tests.fakes.map_calls import FakeServer, Outcome, collect, numbered
from tests.fakes.virtual_time import run_in_virtual_time

REFUSED_AFTER_S = 0.25  # so that the first ones are all sent before any is refused


def refused_until(moment_s: float, error: ServeAppError) -> Any:
    """A closed door: every attempt before the moment is refused."""

    def script(subject: Any, attempt: int) -> Outcome:
        return (REFUSED_AFTER_S, error) if asyncio.get_running_loop().time() < moment_s else (1.0, None)

    return script


@pytest.mark.parametrize(
    "error",
    [
        BadRequest("no"),
        Unauthorized("no"),
        Forbidden("no"),
        NotFound("no"),
        ServeAppError("no"),
        Overloaded("too late", code="deadline", retry_after_s=1.0),
        RateLimited("larger than its bucket"),
        RateLimited("tomorrow", code="quota", retry_after_s=1.0),
    ],
    ids=lambda error: f"{type(error).__name__}-{error.code}",
)
def test_an_error_that_stays_is_a_result_at_once_and_ends_nothing_else(error: ServeAppError) -> None:
    server = FakeServer(lambda subject, _: (1.0, error if subject == "bad" else None))
    results = run_in_virtual_time(collect(server.map(["a", "bad", "b"])))
    assert [result.error for result in results] == [None, error, None]
    assert [result.attempts for result in results] == [1, 1, 1]


def test_an_engine_s_failure_is_tried_once_more() -> None:
    server = FakeServer(
        lambda subject, attempt: (0.0, EngineFailed("died") if subject == "bad" or not attempt else None)
    )
    results = run_in_virtual_time(collect(server.map(["bad", "unlucky"])))
    assert [(type(result.error), result.attempts) for result in results] == [(EngineFailed, 2), (type(None), 2)]


def test_a_refused_item_is_sent_again_at_its_moment_and_none_before() -> None:
    server = FakeServer(refused_until(7.0, Overloaded("full", retry_after_s=7.0)))
    results = run_in_virtual_time(collect(server.map(numbered(12))))
    assert {result.error for result in results} == {None}
    assert sorted(result.attempts for result in results) == [1] * 8 + [2] * 4
    moments = [moment for moment, _, _ in server.sent]
    assert moments[:4] == [0.0] * 4
    assert moments[4:6] == [7.25, 8.25], "after a closed door one request, not a herd"
    assert [subject for _, subject, _ in server.sent[4:6]] == ["p0", "p1"]


def test_a_door_that_opens_is_used_fully_again() -> None:
    server = FakeServer(refused_until(5.0, Unavailable("no replica", retry_after_s=5.0)))
    run_in_virtual_time(collect(server.map(numbered(200), concurrency=16)))
    sent = Counter(moment for moment, _, _ in server.sent)
    assert [sent[5.25 + after] for after in range(4)] == [1, 2, 4, 8], "twice as many in each round"
    assert sent[12.25] == 16


def test_an_item_that_is_always_refused_does_not_hold_up_the_others() -> None:
    """As of a model without a replica, beside items of another one."""
    ends: dict[int, float] = {}

    async def scenario() -> None:
        server = FakeServer(lambda subject, _: (0.1, Unavailable("none")) if subject == "p3" else (1.0, None))
        async for result in server.map(numbered(200), ordered=False):
            ends[result.index] = asyncio.get_running_loop().time()
            assert (result.error is None) == (result.index != 3)

    run_in_virtual_time(scenario())
    assert ends.pop(3) > 3500.0
    assert max(ends.values()) < 1.5 * 200 / 4, "of the seconds that they take without it"


def test_the_level_follows_what_the_server_accepts() -> None:
    """A queue with room for three: the fourth is refused while three run."""

    async def scenario() -> FakeServer:
        server = FakeServer(lambda _subject, _attempt: (2.0, None) if server.in_flight <= 3 else (0.0, full))
        await collect(server.map(numbered(120), concurrency=16))
        return server

    full = Overloaded("full", retry_after_s=1.0)
    server = run_in_virtual_time(scenario())
    refused = len(server.sent) - 120
    assert refused < 40, "sixteen in flight would be refused thirteen times a round"


def test_moments_that_a_limit_has_reserved_are_kept_by_each_item() -> None:
    """As many requests as one a second allows, whatever their number: each is told its own moment."""
    reported: dict[str, float] = {}

    def script(subject: str, attempt: int) -> Outcome:
        now = asyncio.get_running_loop().time()
        if subject not in reported:
            reported[subject] = float(len(reported) + 1)
            return 0.0, RateLimited("one a second", retry_after_s=reported[subject] - now)
        assert now == reported[subject], "neither before nor after its moment"
        return 3.0, None

    server = FakeServer(script)
    results = run_in_virtual_time(collect(server.map(numbered(4))))
    assert [result.attempts for result in results] == [2] * 4


@pytest.mark.parametrize(
    "error", [Overloaded("full", retry_after_s=60.0), Unavailable("none"), RateLimited("x", retry_after_s=9)]
)
def test_patience_ends_with_the_refusal_as_the_result(error: ServeAppError) -> None:
    async def scenario() -> float:
        server = FakeServer(lambda subject, _: (0.0, error if subject == "bad" else None))
        bad, good = await collect(server.map(["bad", "good"], patience_s=300.0))
        assert (bad.error, good.error) == (error, None)
        assert bad.attempts > 5
        return asyncio.get_running_loop().time()

    assert 240.0 <= run_in_virtual_time(scenario()) <= 300.0


def test_progress_tells_that_items_wait_for_their_moment() -> None:
    seen: list[MapProgress] = []
    server = FakeServer(refused_until(7.0, Overloaded("full", retry_after_s=7.0)))
    run_in_virtual_time(collect(server.map(["a", "b"], progress=seen.append)))
    assert [(progress.in_flight, progress.waiting) for progress in seen][:2] == [(1, 1), (0, 2)]


def test_leaving_while_items_wait_for_their_moment_leaves_no_timer() -> None:
    async def scenario() -> None:
        server = FakeServer(lambda *_: (0.0, Overloaded("full", retry_after_s=60.0)))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(30):
                await collect(server.map(["a", "b"]))
        await asyncio.sleep(100)  # past the moment, in virtual time
        assert len(server.sent) == 2

    run_in_virtual_time(scenario())
