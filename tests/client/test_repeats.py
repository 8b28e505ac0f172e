"""A call whose connection is lost is repeated under its key: it runs once, and its caller gets one run's answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest

from serve_app.client import repeats
from serve_app.client.client import Client
from serve_app.errors import DROPPED, NO_ROUTER, Unavailable
from serve_app.http import AnswerPiece, HttpRequest
from serve_app.http.asgi_bridge import AsgiBridge
from serve_app.types import Outcome
from tests.fakes import asgi_client
from tests.fakes.asgi_client import KEY
from tests.fakes.engines import FakeCluster, until
from tests.fakes.handle_calls import client_on, run
from tests.fakes.router import SOON_S, expected_text

TOKENS = 6


class CutCalls:
    """Stands in for `serve_app.ray_adapter.IngressHandle`: the first calls are cut after so many pieces.

    Args:
        cuts: for each call, after how many pieces; None, and calls beyond them: it comes to its end.
    """

    def __init__(self, routers: list[AsgiBridge], *cuts: int | None, code: str = DROPPED) -> None:
        self.loop = asyncio.get_running_loop()
        self._routers = routers
        self._cuts = list(cuts)
        self._code = code
        self.asked: list[HttpRequest] = []

    async def stream(self, *request: Any, accept_s: float | None = None) -> AsyncGenerator[AnswerPiece, None]:
        asked = HttpRequest(*request)
        cut = self._cuts.pop(0) if self._cuts else None
        router = self._routers[len(self.asked) % len(self._routers)]
        self.asked.append(asked)
        pieces = router.exchange(asked)
        try:
            count = 0
            async for piece in pieces:
                if count == cut:
                    raise Unavailable("the connection is lost", code=self._code)
                count += 1
                yield piece
            if cut is not None:
                raise Unavailable("the connection is lost", code=self._code)
        finally:
            await pieces.aclose()

    async def close(self) -> None:
        """There is nothing to close."""


async def started(cluster: FakeCluster, *cuts: int | None, **more: Any) -> tuple[Client, CutCalls, asgi_client.Client]:
    await cluster.add("r1")
    router = await asgi_client.Client(cluster).start()
    calls = CutCalls([AsgiBridge(router.edge)], *cuts, **more)
    return client_on(calls, KEY, "sim"), calls, router


def check(scenario: Callable[[FakeCluster], Any]) -> None:
    run(scenario, waits={(repeats, "PAUSES_S"): (0.0, 0.01)})  # type: ignore[dict-item]


def header(asked: HttpRequest, name: bytes) -> bytes | None:
    return dict(asked.headers).get(name)


@pytest.mark.parametrize("cut", range(TOKENS + 2))
def test_a_stream_that_is_cut_anywhere_goes_on_with_the_same_run(cut: int) -> None:
    async def scenario(cluster: FakeCluster) -> None:
        llm, calls, router = await started(cluster, cut)
        pieces = [piece.choices[0].text async for piece in llm.stream_complete("p", max_tokens=TOKENS)]
        assert "".join(pieces) == expected_text("p", TOKENS)
        assert len(cluster.submits) == 1
        assert len(calls.asked) == 2
        assert len({header(asked, repeats.KEY) for asked in calls.asked}) == 1
        await until(router.at_rest, SOON_S, "nothing runs")

    check(scenario)


def test_an_answer_that_is_cut_twice_is_repeated_and_a_third_time_it_is_an_error() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        llm, calls, _ = await started(cluster, 0, 1, None, 0, 0, 0)
        assert (await llm.complete("p", max_tokens=TOKENS)).choices[0].text == expected_text("p", TOKENS)
        assert len(cluster.submits) == 1
        assert len(calls.asked) == 3
        with pytest.raises(Unavailable) as lost:
            await llm.complete("q", max_tokens=TOKENS)
        assert lost.value.code == DROPPED
        assert len(calls.asked) == 6

    check(scenario)


def test_a_call_that_no_router_took_is_not_repeated() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        llm, calls, _ = await started(cluster, 0, code=NO_ROUTER)
        with pytest.raises(Unavailable):
            await llm.complete("p", max_tokens=TOKENS)
        assert len(calls.asked) == 1

    check(scenario)


def test_a_stream_does_not_go_on_with_another_run() -> None:
    """The routers share no claims here: the second one does not know the run."""

    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add("r1")
        routers = [await asgi_client.Client(cluster, name, 2).start() for name in "ab"]
        calls = CutCalls([AsgiBridge(router.edge) for router in routers], 3)
        got: list[str] = []

        async def read() -> None:
            async for piece in client_on(calls, KEY, "sim").stream_complete("p", max_tokens=TOKENS):
                got.append(piece.choices[0].text)

        with pytest.raises(Unavailable) as lost:
            await read()
        assert lost.value.code == DROPPED
        assert expected_text("p", TOKENS).startswith("".join(got))
        assert len(calls.asked) == 2
        assert len(cluster.submits) == 1, "nothing runs that nobody could use"

    check(scenario)


def test_every_call_has_a_key_of_its_own_and_one_of_the_caller_s_stays() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        llm, calls, router = await started(cluster)
        for _ in range(2):
            await llm.complete("p", max_tokens=TOKENS)
        await llm.complete("p", max_tokens=TOKENS, idempotency_key="mine")
        keys = [header(asked, repeats.KEY) for asked in calls.asked]
        assert len(set(keys)) == 3
        assert keys[2] == b"mine"
        assert [header(asked, repeats.GRACE) for asked in calls.asked] == [repeats.GRACE_MS, repeats.GRACE_MS, None]
        assert router.outcomes == {Outcome.OK: 3}

    check(scenario)
