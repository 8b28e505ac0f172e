"""The served models called from another Serve application, and by plain Serve handles, without our client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from ray import serve
from ray.serve.handle import DeploymentHandle

from serve_app.client import Client
from serve_app.errors import Forbidden, NotFound, Overloaded, Unauthorized
from serve_app.names import APPLICATION, ROUTER
from tests.e2e import caller_app
from tests.e2e.joined import LONG, full, joined
from tests.e2e.observe import ABORT_S, FILL_S, Observer
from tests.e2e.stack import SIMULATED, TINY, Stack
from tests.waiting import wait_until

pytestmark = pytest.mark.long  # programs that join the cluster; test_handle and the README's examples have some

HELLO = [{"role": "user", "content": "The river"}]
SOON_S = 0.2  # a deadline that no full engine meets

Handle = DeploymentHandle  # of a class Ray does not type


@pytest.fixture(scope="module")
def llm(stack: Stack) -> Iterator[Client]:
    with joined(stack) as client:
        yield client


@pytest.fixture(scope="module")
def plain(llm: Client) -> Handle:
    """The ingress of the served application, as Serve gives it to anyone: its calls go by Ray's own transport."""
    return serve.get_app_handle(APPLICATION)


@pytest.fixture(scope="module")
def caller(stack: Stack, llm: Client) -> Iterator[Handle]:
    """Another application on the same cluster, removed afterwards."""
    yield serve.run(caller_app.build(stack.api_key), name=caller_app.NAME, route_prefix=None)
    serve.delete(caller_app.NAME)


def test_a_plain_handle_gives_plain_data(stack: Stack, llm: Client, plain: Handle) -> None:
    body = {"messages": HELLO, "model": TINY, "max_tokens": 16, "temperature": 0}
    over: dict[str, Any] = stack.post("/v1/chat/completions", body).json()
    answer = plain.chat.remote(api_key=stack.api_key, **body).result()
    assert type(answer) is dict
    assert (answer["choices"], answer["usage"]) == (over["choices"], over["usage"])
    chunks = list(plain.options(stream=True).stream.remote(api_key=stack.api_key, **body))
    text = "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
    assert text == over["choices"][0]["message"]["content"]
    completion = plain.complete.remote("The river", api_key=stack.api_key, model=TINY, max_tokens=3).result()
    assert completion["object"] == "text_completion"
    pieces = plain.options(stream=True).stream_complete.remote("x", api_key=stack.api_key, model=TINY, max_tokens=3)
    assert {piece["object"] for piece in pieces} == {"text_completion"}
    assert plain.models.remote(stack.api_key).result() == stack.get("/v1/models").json()


@pytest.mark.parametrize("by_reference", [True, False])
def test_a_plain_handle_raises_our_errors(
    stack: Stack, llm: Client, plain: Handle, batch_key: str, simulated: str, by_reference: bool
) -> None:
    """By Ray's own transport an error comes as one of a class that Ray makes of ours and its own."""
    handle = plain.options(_by_reference=by_reference)
    with pytest.raises(NotFound) as unknown:
        handle.chat.remote(HELLO, api_key=stack.api_key, model="nobody").result()
    assert (unknown.value.status, unknown.value.code, unknown.value.param) == (404, "model_not_found", "model")
    with pytest.raises(Unauthorized):
        handle.chat.remote(HELLO, model=simulated).result()
    with pytest.raises(Forbidden):
        list(handle.options(stream=True).stream.remote(HELLO, api_key=batch_key, model=simulated, priority="high"))
    with full(llm), pytest.raises(Overloaded) as late:
        handle.chat.remote(HELLO, api_key=stack.api_key, model=simulated, deadline_s=SOON_S).result()
    assert late.value.code == "deadline"
    assert late.value.retry_after_s is not None


def test_a_plain_call_that_is_cancelled_is_aborted(
    stack: Stack, plain: Handle, observer: Observer, simulated: str
) -> None:
    with observer.ends(simulated, "cancelled_running", 2):
        whole = plain.chat.remote(HELLO, api_key=stack.api_key, model=simulated, max_tokens=LONG)
        streamed = plain.options(stream=True).stream.remote(
            HELLO, api_key=stack.api_key, model=simulated, max_tokens=LONG
        )
        next(streamed)
        wait_until(lambda: observer.running(simulated), FILL_S, "sequences running", wanted=2)
        whole.cancel()
        streamed.cancel()
        wait_until(lambda: observer.figures(simulated), ABORT_S, "running, waiting, granted", wanted=(0, 0, 0))


def test_another_deployment_calls_by_plain_handle(llm: Client, caller: Handle, simulated: str) -> None:
    expected = llm.sync.chat(HELLO, model=simulated, max_tokens=6).choices[0].message.content
    answer = caller.plainly.remote(HELLO, max_tokens=6).result()
    assert answer["choices"][0]["message"]["content"] == expected
    streamed = caller.options(stream=True).stream_plainly.remote(HELLO, max_tokens=6)
    assert "".join(streamed) == expected


def test_another_deployment_gets_our_errors(stack: Stack, caller: Handle) -> None:
    wrong = caller.error.remote("chat", messages=HELLO, api_key=stack.api_key, model="nobody").result()
    assert wrong[:4] == ("NotFound", 404, "model_not_found", "model")
    unknown = caller.error.remote("chat", messages=HELLO, api_key=stack.api_key, model=SIMULATED, max_token=3).result()
    assert unknown[:4] == ("BadRequest", 400, "invalid_request_error", "max_token")
    assert "did you mean `max_tokens`" in unknown[4]
    with pytest.raises(NotFound) as passed_on:
        caller.by_client.remote(HELLO, model="nobody").result()
    assert passed_on.value.code == "model_not_found"


def test_another_deployment_calls_by_our_client(llm: Client, caller: Handle, simulated: str) -> None:
    expected = llm.sync.chat(HELLO, model=simulated, max_tokens=4).choices[0].message.content
    assert caller.by_client.remote(HELLO, max_tokens=4).result() == expected
    assert "".join(caller.options(stream=True).stream_by_client.remote(HELLO, max_tokens=4)) == expected
    assert caller.sync_in_a_thread.remote(HELLO).result() == expected
    assert "use `await`" in caller.sync_in_the_loop.remote(HELLO).result()


@pytest.mark.parametrize("method", ["plainly", "by_client"])
def test_cancelling_another_deployment_s_request_aborts_its_calls(
    caller: Handle, observer: Observer, simulated: str, method: str
) -> None:
    with observer.ends(simulated, "cancelled_running"):
        call = getattr(caller, method).remote(HELLO, max_tokens=LONG)
        wait_until(lambda: observer.running(simulated), FILL_S, "sequences running", wanted=1)
        call.cancel()
        wait_until(lambda: observer.figures(simulated), ABORT_S, "running, waiting, granted", wanted=(0, 0, 0))


@pytest.mark.parametrize("method", ["stream_plainly", "stream_by_client"])
def test_leaving_another_deployment_s_stream_aborts_its_calls(
    caller: Handle, observer: Observer, simulated: str, method: str
) -> None:
    with observer.ends(simulated, "cancelled_running"):
        stream = getattr(caller.options(stream=True), method).remote(HELLO, max_tokens=LONG)
        next(stream)
        wait_until(lambda: observer.running(simulated), FILL_S, "sequences running", wanted=1)
        stream.cancel()
        wait_until(lambda: observer.figures(simulated), ABORT_S, "running, waiting, granted", wanted=(0, 0, 0))


def test_the_ingress_is_found_by_its_deployment_s_name_too(stack: Stack, llm: Client) -> None:
    """As a deployment of the same application would."""
    handle = serve.get_deployment_handle(ROUTER, app_name=APPLICATION)
    answer = handle.chat.remote(HELLO, api_key=stack.api_key, model=TINY, max_tokens=2, ignore_eos=True).result()
    assert answer["usage"]["completion_tokens"] == 2
