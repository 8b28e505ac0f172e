"""What a worker hears of a router: an answer in pieces, a refusal, and no answer."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import pytest

from serve_app.batch.router_calls import NamedFigures, RouterCalls
from serve_app.core.batches import BatchRecord, BatchStatus, ModelFigures, RowError
from serve_app.core.names import ModelRoute, WeightedModel
from serve_app.errors import DROPPED, BodyTooLarge, Unavailable

BATCH = BatchRecord("batch_1", "people", "key_1", "/v1/completions", "file-1", "24h", BatchStatus.IN_PROGRESS, 0.0, 9.0)
HEAD = [(b"retry-after-ms", b"1500"), (b"x-serve-app-request-id", b"abc")]


class Handle:
    """A handle of `run_row` that gives these pieces, and then fails with this error."""

    def __init__(self, loop: asyncio.AbstractEventLoop, pieces: list[Any], error: BaseException | None = None) -> None:
        self.loop = loop
        self._pieces = pieces
        self._error = error
        self.asked: list[tuple[Any, ...]] = []
        self.loops: set[asyncio.AbstractEventLoop] = set()
        self.is_closed = False

    async def stream(self, *arguments: Any) -> AsyncGenerator[Any, None]:
        self.asked.append(arguments)
        self.loops.add(asyncio.get_running_loop())
        for piece in self._pieces:
            yield piece
        if self._error is not None:
            raise self._error

    async def close(self) -> None:
        self.is_closed = True


def check(scenario: Callable[[RouterCalls, Handle], Awaitable[None]], *pieces: Any, error: Any = None) -> None:
    async def run() -> None:
        handle = Handle(asyncio.get_running_loop(), list(pieces), error)
        await scenario(RouterCalls(handle), handle)  # type: ignore[arg-type]

    asyncio.run(run())


def test_a_row_is_asked_for_as_its_batch_s_key_and_read_to_its_end() -> None:
    async def scenario(calls: RouterCalls, handle: Handle) -> None:
        answer = await calls.run(BATCH, "/v1/completions", b"{}", "batch_1-7")
        assert (answer.status, answer.body, answer.retry_after_s, answer.request_id) == (200, b"abc", 1.5, "abc")
        ((key_id, tenant, method, path, headers, body),) = handle.asked
        assert (key_id, tenant, method, path, body) == ("key_1", "people", "POST", "/v1/completions", b"{}")
        assert dict(headers)[b"idempotency-key"] == b"batch_1-7"
        assert dict(headers)[b"x-serve-app-batch-row"] == b"batch_1-7"
        await calls.run(BATCH, "/v1/completions", b"{}", "batch_1-7-2")
        again = dict(handle.asked[1][4])
        assert again[b"idempotency-key"] == b"batch_1-7-2"
        assert again[b"x-serve-app-batch-row"] == b"batch_1-7", "another attempt is of the same row"
        await calls.run_as("key_1", "people", "/v1/completions", b"{}", "stream-5")
        assert b"x-serve-app-batch-row" not in dict(handle.asked[2][4])

    check(scenario, (200, HEAD, b"a"), b"b", b"c")


@pytest.mark.parametrize("pieces", [(), ((200, [], b"half"),)])
def test_a_router_that_dies_is_an_error_and_never_half_an_answer(pieces: tuple[Any, ...]) -> None:
    async def scenario(calls: RouterCalls, handle: Handle) -> None:
        with pytest.raises(Unavailable):
            await calls.run(BATCH, "/v1/completions", b"{}", "batch_1-7")

    check(scenario, *pieces, error=Unavailable("the router has died", code=DROPPED))
    if not pieces:
        check(scenario)


def test_a_row_that_no_message_can_carry_is_refused_like_a_body_that_is_too_large() -> None:
    async def scenario(calls: RouterCalls, handle: Handle) -> None:
        answer = await calls.run(BATCH, "/v1/completions", b"{}", "batch_1-7")
        assert (answer.status, json.loads(answer.body)["error"]["code"]) == (413, BodyTooLarge.code)

    check(scenario, error=BodyTooLarge("too large", param="body"))


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_model_that_the_key_may_not_use_is_an_error_of_the_batch(status: int) -> None:
    async def scenario(calls: RouterCalls, handle: Handle) -> None:
        found = await calls.refusal(BATCH, "org/large")
        assert found == RowError("model_not_found", "there is no such model", param="model")
        assert handle.asked[0][2:4] == ("GET", "/v1/models/org/large")

    error = {"message": "there is no such model", "code": "model_not_found"}
    check(scenario, (status, [], json.dumps({"error": error}).encode()))


@pytest.mark.parametrize("status", [200, 429, 503])
def test_a_router_that_is_busy_forbids_no_model(status: int) -> None:
    async def scenario(calls: RouterCalls, handle: Handle) -> None:
        assert await calls.refusal(BATCH, "m") is None

    check(scenario, (status, [], b"{}"))


def test_a_handle_in_another_loop_is_used_there() -> None:
    home = asyncio.new_event_loop()
    thread = threading.Thread(target=home.run_forever)
    thread.start()
    handle = Handle(home, [(200, [], b"{}")])

    async def run() -> None:
        calls = RouterCalls(handle)  # type: ignore[arg-type]
        assert (await calls.run(BATCH, "/v1/completions", b"{}", "batch_1-7")).status == 200
        await calls.close()

    try:
        asyncio.run(run())
    finally:
        home.call_soon_threadsafe(home.stop)
        thread.join()
        home.close()
    assert handle.loops == {home}
    assert handle.is_closed


def test_a_name_has_the_figures_of_its_heaviest_target() -> None:
    class OfModels:
        async def get(self) -> dict[str, ModelFigures]:
            return {"old": ModelFigures(8, 3, 0, 0), "new": ModelFigures(4, 0, 0, 0)}

    canary = ModelRoute("chat", (WeightedModel("new", 10), WeightedModel("old", 90)))
    gone = ModelRoute("other", (WeightedModel("absent"),))
    found = asyncio.run(NamedFigures(OfModels(), [canary, gone]).get())
    assert found.keys() == {"old", "new", "chat"}
    assert found["chat"] == found["old"]
