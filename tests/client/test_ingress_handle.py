"""What Serve does to a client's call, and the error that the client gets for it; Serve's handle is a stand-in."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

import pytest
from grpc import StatusCode
from grpc.aio import AioRpcError, Metadata
from ray.exceptions import RayError
from ray.serve._private.common import DeploymentID, ReplicaID
from ray.serve.exceptions import RayServeException

from serve_app.errors import DROPPED, NO_ROUTER, BodyTooLarge, ServeAppError, Unavailable
from serve_app.ray_adapter import IngressHandle, ingress_handle

SHORT_S = 0.02  # for a router to accept a call that none accepts
TOO_LARGE = AioRpcError(StatusCode.RESOURCE_EXHAUSTED, Metadata(), Metadata(), "too large")


class Result:
    """A call on a replica: these values, then this error; without an error it waits for ever."""

    def __init__(self, values: list[int], error: BaseException | None) -> None:
        self.values = values
        self.error = error
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True

    async def __aiter__(self) -> AsyncGenerator[int, None]:
        for value in self.values:
            yield value
        if self.error is None:
            await asyncio.Event().wait()
        elif not isinstance(self.error, StopAsyncIteration):
            raise self.error


class Serve:
    """Stands in for Serve's handle, and for the response of each of its calls."""

    def __init__(self, accepted: Result | BaseException | None) -> None:
        self.accepted = accepted
        self._replica_result_future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self.called: list[tuple[Any, ...]] = []
        self.options_given: dict[str, Any] = {}
        self.shut_down = False
        self.request_router: Any = None  # Serve has sent no replicas yet

    def _init(self, *, _run_router_in_separate_loop: bool) -> None:
        assert not _run_router_in_separate_loop

    def _init_router(self) -> Serve:
        return self

    def options(self, **given: Any) -> Serve:
        self.options_given = given
        return self

    def remote(self, *arguments: Any) -> Serve:
        self.called.append(arguments)
        return self

    async def _fetch_future_result_async(self) -> Result:
        if isinstance(self.accepted, BaseException):
            raise self.accepted
        if self.accepted is None:
            return await asyncio.shield(self._replica_result_future)
        return self.accepted

    async def shutdown_async(self) -> None:
        self.shut_down = True


def run(
    monkeypatch: pytest.MonkeyPatch,
    accepted: Result | BaseException | None,
    scenario: Callable[[IngressHandle, Serve], Awaitable[None]],
) -> None:
    async def bounded() -> None:
        serve = Serve(accepted)
        monkeypatch.setattr(ingress_handle, "DeploymentHandle", lambda *_: serve)
        monkeypatch.setattr(ingress_handle, "home_loop", asyncio.get_running_loop)
        async with asyncio.timeout(10):
            await scenario(IngressHandle("Router", "app", "exchange"), serve)

    asyncio.run(bounded())


async def read(handle: IngressHandle, accept_s: float | None = None) -> list[int]:
    return [value async for value in handle.stream("a", 1, accept_s=accept_s)]


def test_the_values_are_passed_on_and_the_call_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    result = Result([1, 2, 3], StopAsyncIteration())

    async def scenario(handle: IngressHandle, serve: Serve) -> None:
        assert await read(handle) == await read(handle) == [1, 2, 3]
        assert serve.called == [("a", 1), ("a", 1)]
        assert (serve.options_given["method_name"], serve.options_given["stream"]) == ("exchange", True)
        assert result.cancelled

    run(monkeypatch, result, scenario)


@pytest.mark.parametrize(
    ("accepted", "kind", "code"),
    [
        (RayServeException("no such application"), Unavailable, NO_ROUTER),
        (RayError("the actor died\nand a long trace"), Unavailable, DROPPED),
        (Result([1], RayError("the actor died\nand a long trace")), Unavailable, DROPPED),
        (Result([], ConnectionError("reset")), Unavailable, DROPPED),
        (Result([], asyncio.CancelledError()), Unavailable, DROPPED),
        (Result([], TOO_LARGE), BodyTooLarge, BodyTooLarge.code),
        (Result([1], TOO_LARGE), Unavailable, DROPPED),
    ],
)
def test_a_call_that_serve_ends_is_an_error_of_ours(
    monkeypatch: pytest.MonkeyPatch, accepted: Result | BaseException, kind: type[ServeAppError], code: str
) -> None:
    async def scenario(handle: IngressHandle, _: Serve) -> None:
        with pytest.raises(ServeAppError) as raised:
            await read(handle)
        assert (type(raised.value), raised.value.code) == (kind, code)
        assert "\n" not in raised.value.message
        assert not isinstance(accepted, Result) or accepted.cancelled

    run(monkeypatch, accepted, scenario)


def test_a_call_that_no_router_accepts_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(handle: IngressHandle, serve: Serve) -> None:
        with pytest.raises(Unavailable, match=r"'app' took the call within 0\.02 s") as late:
            await read(handle, SHORT_S)
        assert late.value.code == NO_ROUTER
        assert isinstance(late.value.__cause__, TimeoutError), "a transport tells it from a lost router"
        assert serve._replica_result_future.cancelled()

    run(monkeypatch, None, scenario)


@pytest.mark.parametrize(
    ("replicas", "output"),
    [
        (None, "no router runs (see `ray status`)"),
        ({}, "no router runs (see `ray status`)"),
        ({ReplicaID("r", DeploymentID("Router", "app")): None}, "none of its 1 routers took it"),
    ],
    ids=["not known", "none", "one"],
)
def test_a_call_that_waits_for_a_router_says_so_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, replicas: Any, output: str
) -> None:
    monkeypatch.setattr(ingress_handle, "TELL_S", SHORT_S)
    monkeypatch.setattr(logging.getLogger("ray.serve"), "propagate", True)

    async def scenario(handle: IngressHandle, serve: Serve) -> None:
        serve.request_router = None if replicas is None else SimpleNamespace(curr_replicas=replicas)
        with pytest.raises(Unavailable):
            await read(handle, 10 * SHORT_S)

    run(monkeypatch, None, scenario)
    (reported,) = {record.getMessage() for record in caplog.records}
    assert reported == f"Application 'app' left a call waiting for {SHORT_S:g} s: {output}; the call fails after 0.2 s"


def test_a_call_that_is_taken_says_nothing(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(ingress_handle, "TELL_S", SHORT_S)
    monkeypatch.setattr(logging.getLogger("ray.serve"), "propagate", True)

    async def scenario(handle: IngressHandle, _: Serve) -> None:
        assert await read(handle) == [1]
        await asyncio.sleep(2 * SHORT_S)  # bound: itself; a timer that is left would have fired

    run(monkeypatch, Result([1], StopAsyncIteration()), scenario)
    assert caplog.records == []


def test_a_reader_that_leaves_ends_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    result = Result([1], None)

    async def scenario(handle: IngressHandle, _: Serve) -> None:
        async with aclosing(handle.stream("a")) as values:
            assert await anext(values) == 1
            assert not result.cancelled
        assert result.cancelled
        result.cancelled = False
        reading = asyncio.create_task(read(handle))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        reading.cancel()
        await asyncio.wait({reading})
        assert reading.cancelled(), "the reader's own cancellation stays one"
        assert result.cancelled

    run(monkeypatch, result, scenario)


def test_closing_the_handle_ends_its_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    result = Result([1], None)

    async def scenario(handle: IngressHandle, serve: Serve) -> None:
        async with aclosing(handle.stream("a")) as values:
            await anext(values)
            await handle.close()
            assert (result.cancelled, serve.shut_down) == (True, True)

    run(monkeypatch, result, scenario)
