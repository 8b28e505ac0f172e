"""The official SDK by handle beside the same SDK over HTTP: the same answers and errors, and a caller that leaves takes
its request with it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import httpx2
import openai
import pytest

from serve_app.client import Client
from tests.e2e.joined import LONG, environment, full, joined, run, running
from tests.e2e.observe import ABORT_S, FILL_S, Observer
from tests.e2e.stack import SIMULATED, SIMULATED_SLOTS, TINY, Stack
from tests.waiting import patient, wait_until

pytestmark = pytest.mark.long  # test_handle has the same calls without the SDK's types

HELLO: Any = [{"role": "user", "content": "The river"}]
GREEDY: dict[str, Any] = {"model": TINY, "messages": HELLO, "max_tokens": 24, "temperature": 0}
IMPATIENT_S = 0.3  # a read timeout that no full engine meets, after the request has come to the queue
CHANGING = {"id", "created"}  # fields that no two answers share


@pytest.fixture(scope="module")
def llm(stack: Stack) -> Iterator[Client]:
    with joined(stack) as client:
        yield client


def test_answers_are_those_over_http(llm: Client, client: openai.OpenAI) -> None:
    async def by_handle() -> tuple[Any, str]:
        whole = await llm.openai.chat.completions.create(**GREEDY)
        async with await llm.openai.chat.completions.create(**GREEDY, stream=True) as stream:
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        return whole, text

    over = client.chat.completions.create(**GREEDY)
    whole, text = asyncio.run(by_handle())
    assert whole.model_dump(exclude=CHANGING) == over.model_dump(exclude=CHANGING)
    assert text == over.choices[0].message.content
    again = llm.sync.openai.chat.completions.create(**GREEDY)
    assert again.model_dump(exclude=CHANGING) == over.model_dump(exclude=CHANGING)
    with llm.sync.openai.chat.completions.create(**GREEDY, stream=True) as streamed:
        assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == text


def test_the_responses_api_is_that_over_http(llm: Client, client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": TINY, "input": "The river", "max_output_tokens": 12, "temperature": 0}
    asked["extra_body"] = {"ignore_eos": True}
    over = client.responses.create(**asked)
    assert llm.sync.openai.responses.create(**asked).output_text == over.output_text
    with llm.sync.openai.responses.stream(**asked) as stream:
        events = list(stream)
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == over.output_text
    # cut off by its bound: OpenAI's word, after which the SDK's `get_final_response` raises there, too
    assert (events[0].type, events[-1].type) == ("response.created", "response.incomplete")


def test_the_sdk_s_helpers_work(llm: Client, client: openai.OpenAI) -> None:
    assert [one.id for one in llm.sync.openai.models.list()] == [one.id for one in client.models.list()]
    assert llm.sync.openai.models.retrieve(TINY).id == TINY
    raw = llm.sync.openai.chat.completions.with_raw_response.create(**GREEDY)
    over = client.chat.completions.with_raw_response.create(**GREEDY)
    ours = {"content-type", "content-length", "x-request-id", "x-serve-app-request-id"}
    assert ours <= raw.headers.keys()
    assert ours <= over.headers.keys()
    answer = llm.sync.http_client.post("chat/completions", json=GREEDY)
    assert answer.json()["choices"][0]["message"]["content"] == raw.parse().choices[0].message.content


WRONG: list[dict[str, Any]] = [
    {"model": "nobody"},
    {"temperature": "hot"},
    {"max_tokens": 10**6},
    {"messages": []},
    {"extra_body": {"priority": "critical"}},
    {"stream": True, "messages": [{"role": "nobody", "content": "x"}]},
]


@pytest.mark.parametrize("changes", WRONG)
def test_errors_are_those_over_http(llm: Client, client: openai.OpenAI, changes: dict[str, Any]) -> None:
    def error(sdk: openai.OpenAI) -> tuple[Any, ...]:
        with pytest.raises(openai.APIStatusError) as refused:
            sdk.chat.completions.create(**{**GREEDY, **changes})
        return type(refused.value), refused.value.status_code, refused.value.body

    assert error(llm.sync.openai) == error(client)


def test_a_refusal_has_its_retry_headers_and_is_not_repeated(llm: Client, observer: Observer, simulated: str) -> None:
    asked: dict[str, Any] = {**GREEDY, "model": simulated, "extra_headers": {"x-deadline-ms": "200"}}
    with observer.ends(simulated, "refused"), full(llm), pytest.raises(openai.RateLimitError) as refused:
        llm.sync.openai.chat.completions.create(**asked)
    assert refused.value.code == "deadline"
    assert refused.value.response.headers["retry-after-ms"].isdigit()


def test_a_request_whose_answer_does_not_begin_times_out_and_leaves_the_queue(
    llm: Client, observer: Observer, simulated: str
) -> None:
    async def ask() -> None:
        await llm.openai.chat.completions.create(
            **{**GREEDY, "model": simulated}, timeout=httpx2.Timeout(None, read=patient(IMPATIENT_S))
        )

    with observer.ends(simulated, "cancelled_queued", 2), full(llm):
        with pytest.raises(openai.APITimeoutError):
            asyncio.run(ask())
        with pytest.raises(openai.APITimeoutError):
            llm.sync.openai.chat.completions.create(**{**GREEDY, "model": simulated}, timeout=patient(IMPATIENT_S))
        wait_until(lambda: observer.waiting(simulated), ABORT_S, "requests waiting", wanted=0)
        assert observer.granted(simulated) == SIMULATED_SLOTS


LASTING: dict[str, Any] = {"prompt": "The river", "model": SIMULATED, "max_tokens": LONG}


async def _leave_the_block(llm: Client) -> None:
    async with await llm.openai.completions.create(**LASTING, stream=True) as stream:
        async for _ in stream:
            break


async def _close_what_was_not_read(llm: Client) -> None:
    await (await llm.openai.completions.create(**LASTING, stream=True)).close()


async def _cancel(llm: Client) -> None:
    call: asyncio.Task[Any] = asyncio.create_task(llm.openai.completions.create(**LASTING))  # type: ignore[arg-type]
    await asyncio.sleep(patient(0.5))  # it runs by then; if not, it is cancelled in the line, and the test says so
    call.cancel()
    await asyncio.wait({call})
    assert call.cancelled()


@pytest.mark.parametrize("leave", [_leave_the_block, _close_what_was_not_read, _cancel])
def test_leaving_gives_the_slot_back(
    llm: Client, observer: Observer, simulated: str, leave: Callable[[Client], Awaitable[None]]
) -> None:
    async def scenario() -> None:
        await leave(llm)
        await asyncio.to_thread(
            wait_until, lambda: observer.figures(simulated), ABORT_S, "running, waiting, granted", wanted=(0, 0, 0)
        )

    with observer.ends(simulated, "cancelled_running"):
        asyncio.run(scenario())


def test_leaving_without_await_gives_the_slot_back(llm: Client, observer: Observer, simulated: str) -> None:
    with observer.ends(simulated, "cancelled_running", 2):
        with llm.sync.openai.completions.create(**LASTING, stream=True) as stream:
            next(stream)
        llm.sync.openai.completions.create(**LASTING, stream=True).close()
        wait_until(lambda: observer.figures(simulated), ABORT_S, "running, waiting, granted", wanted=(0, 0, 0))


KILLED = """
from serve_app import connect
llm = connect(model="tiny-sim")
with llm.sync.openai.completions.create(model="tiny-sim", prompt="x", max_tokens=8000, stream=True) as stream:
    for chunk in stream: pass
"""


def test_a_program_that_dies_takes_its_request_with_it(stack: Stack, observer: Observer, simulated: str) -> None:
    with observer.ends(simulated, "cancelled_running"), running(KILLED, environment(stack)) as program:
        wait_until(lambda: observer.running(simulated), FILL_S * 4, "sequences running", wanted=1)
        program.kill()
        wait_until(lambda: observer.figures(simulated), ABORT_S, "running, waiting, granted", wanted=(0, 0, 0))


LEFT_OPEN = """
from serve_app import connect
llm = connect(model="tiny-sim")
stream = llm.sync.openai.completions.create(model="tiny-sim", prompt="x", max_tokens=8000, stream=True)
print(len(next(stream).choices))
"""


def test_a_program_may_end_in_the_middle_of_a_stream(stack: Stack, observer: Observer, simulated: str) -> None:
    with observer.ends(simulated, "cancelled_running"):
        done = run(LEFT_OPEN, environment(stack))
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
