"""A client that goes away takes its request with it: out of the line, out of the engine, within a second."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest

from tests.e2e.half_closed import read_until, send
from tests.e2e.observe import ABORT_S, FILL_S, Observer
from tests.e2e.stack import SIMULATED, SIMULATED_SLOTS, TINY, Stack
from tests.waiting import wait_until

# Tokens that take many times ABORT_S, so that a request that is gone in time has not ended by itself: the simulated
# engine makes 200 a second of one sequence, tiny at most some 600.
LONG = {SIMULATED: 8000, TINY: 2000}
MODELS = [TINY, SIMULATED]
ROUTES = ["/v1/completions", "/v1/chat/completions"]


def body_for(model: str, path: str = "/v1/completions", **more: Any) -> dict[str, Any]:
    asked: dict[str, Any] = {"model": model, "max_tokens": LONG[model], "temperature": 0, "ignore_eos": True}
    if path == "/v1/chat/completions":
        asked["messages"] = [{"role": "user", "content": "The river"}]
    else:
        asked["prompt"] = "The river"
    return asked | more


def sdk_call(model: str) -> dict[str, Any]:
    """The same for the SDK, which knows no `ignore_eos` of its own."""
    return {"model": model, "prompt": "The river", "max_tokens": LONG[model], "extra_body": {"ignore_eos": True}}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest, stack: Stack, observer: Observer) -> Iterator[str]:
    """Each model in turn, idle before and after."""
    name: str = request.param
    if name not in stack.models:
        pytest.skip(f"the external stack does not serve {name}")
    observer.wait_idle(name)
    yield name
    observer.wait_idle(name)


@contextmanager
def full(stack: Stack, model: str, observer: Observer) -> Iterator[None]:
    """All slots of the simulated model taken for the block."""
    blocker = send(stack, "/v1/completions", body_for(model, n=SIMULATED_SLOTS))
    try:
        wait_until(lambda: observer.granted(model), FILL_S, "slots granted", wanted=SIMULATED_SLOTS)
        yield
    finally:
        blocker.close()


@pytest.mark.parametrize("in_two", [False, True], ids=["one segment", "two segments"])
@pytest.mark.parametrize("path", ROUTES)
def test_leaving_a_stream_aborts_it_in_the_engine(
    stack: Stack, observer: Observer, model: str, path: str, in_two: bool
) -> None:
    with observer.ends(model, "cancelled_running"):
        connection = send(stack, path, body_for(model, path, stream=True), in_two=in_two)
        read_until(connection, b"data: ")
        wait_until(lambda: observer.running(model), FILL_S, "sequences running", wanted=1)
        connection.close()
        wait_until(lambda: observer.figures(model), ABORT_S, "running, waiting, granted", wanted=(0, 0, 0))
    made = observer.generated(model)
    assert observer.generated(model) == made, "the engine goes on generating"


@pytest.mark.parametrize("in_two", [False, True], ids=["one segment", "two segments"])
def test_leaving_before_a_whole_answer_aborts_it_in_the_engine(
    stack: Stack, observer: Observer, model: str, in_two: bool
) -> None:
    with observer.ends(model, "cancelled_running"):
        connection = send(stack, "/v1/completions", body_for(model), in_two=in_two)
        wait_until(lambda: observer.running(model), FILL_S, "sequences running", wanted=1)
        connection.close()
        wait_until(lambda: observer.figures(model), ABORT_S, "running, waiting, granted", wanted=(0, 0, 0))


def test_leaving_a_response_stream_aborts_it(stack: Stack, observer: Observer) -> None:
    observer.wait_idle(TINY)
    body = {"model": TINY, "input": "The river", "max_output_tokens": 1900, "temperature": 0, "stream": True}
    with observer.ends(TINY, "cancelled_running"):
        connection = send(stack, "/v1/responses", body | {"ignore_eos": True}, in_two=True)
        read_until(connection, b"response.output_text.delta")
        connection.close()
        wait_until(lambda: observer.figures(TINY), ABORT_S, "running, waiting, granted", wanted=(0, 0, 0))


def test_leaving_takes_all_of_a_request_s_sequences(stack: Stack, observer: Observer, model: str) -> None:
    connection = send(stack, "/v1/completions", body_for(model, n=4, stream=True, temperature=1.0))
    wait_until(lambda: observer.running(model), FILL_S, "sequences running", wanted=4)
    connection.close()
    wait_until(lambda: observer.figures(model), ABORT_S, "running, waiting, granted", wanted=(0, 0, 0))


@pytest.mark.parametrize("in_two", [False, True], ids=["one segment", "two segments"])
@pytest.mark.parametrize("stream", [False, True])
def test_leaving_the_queue_takes_the_request_out(
    stack: Stack, observer: Observer, simulated: str, stream: bool, in_two: bool
) -> None:
    with observer.ends(simulated, "cancelled_queued", 3), full(stack, simulated, observer):
        body = body_for(simulated, stream=stream)
        waiting = [send(stack, "/v1/completions", body, in_two=in_two) for _ in range(3)]
        wait_until(lambda: observer.waiting(simulated), FILL_S, "requests waiting", wanted=3)
        for connection in waiting:
            connection.close()
        wait_until(lambda: observer.waiting(simulated), ABORT_S, "requests waiting", wanted=0)
        assert observer.granted(simulated) == SIMULATED_SLOTS


def test_who_waits_behind_a_client_that_left_is_served(stack: Stack, observer: Observer, simulated: str) -> None:
    with full(stack, simulated, observer):
        left = send(stack, "/v1/completions", body_for(simulated))
        wait_until(lambda: observer.waiting(simulated), FILL_S, "requests waiting", wanted=1)
        stays = send(stack, "/v1/completions", body_for(simulated, max_tokens=3))
        wait_until(lambda: observer.waiting(simulated), FILL_S, "requests waiting", wanted=2)
        left.close()
        wait_until(lambda: observer.waiting(simulated), ABORT_S, "requests waiting", wanted=1)
    read_until(stays, b'"finish_reason":"length"')
    stays.close()


def test_the_sdk_s_cancelled_calls_are_aborted(stack: Stack, observer: Observer, model: str) -> None:
    """A task around the async SDK that is cancelled, as a web framework does it for its own clients."""

    async def leave() -> None:
        async with stack.async_client() as client:
            calls = [asyncio.create_task(client.completions.create(**sdk_call(model))) for _ in range(4)]
            await asyncio.to_thread(wait_until, lambda: observer.running(model), FILL_S, "sequences running", wanted=4)
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)

    asyncio.run(leave())
    wait_until(lambda: observer.figures(model), ABORT_S, "running, waiting, granted", wanted=(0, 0, 0))


def test_the_sdk_s_closed_streams_are_aborted(client: openai.OpenAI, observer: Observer, model: str) -> None:
    with client.completions.create(stream=True, **sdk_call(model)) as stream:
        next(iter(stream))
    wait_until(lambda: observer.figures(model), ABORT_S, "running, waiting, granted", wanted=(0, 0, 0))


def test_no_header_lets_an_abandoned_request_run_on(stack: Stack, observer: Observer, model: str) -> None:
    """Serve has a header by which a client switches the watch for its disconnect off: refused, or without effect."""
    headers = {"x-request-disconnect-disabled": "?1"}
    tried = stack.post("/v1/completions", body_for(model, max_tokens=1), headers=headers)
    if tried.status_code == 400:
        assert tried.json()["error"]["param"] == "x-request-disconnect-disabled"
        return
    assert tried.status_code == 200
    connection = send(stack, "/v1/completions", body_for(model), headers=headers, in_two=True)
    wait_until(lambda: observer.running(model), FILL_S, "sequences running", wanted=1)
    connection.close()
    wait_until(lambda: observer.figures(model), ABORT_S, "running, waiting, granted", wanted=(0, 0, 0))


@pytest.mark.long
def test_a_client_that_reads_slowly_gets_everything(stack: Stack, observer: Observer) -> None:
    """Closing is leaving; being slow is not."""
    observer.wait_idle(TINY)
    with observer.ends(TINY, "ok"):
        connection = send(stack, "/v1/completions", body_for(TINY, max_tokens=1500, stream=True))
        wait_until(lambda: observer.running(TINY), FILL_S, "sequences running", wanted=1)
        wait_until(
            lambda: observer.running(TINY), FILL_S, "sequences running", wanted=0
        )  # all is made, nothing read yet
        seen = read_until(connection, b"data: [DONE]")
        connection.close()
    assert seen.count(b"data: ") > 500
