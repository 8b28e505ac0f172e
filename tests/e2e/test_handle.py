"""The Python handle answers as HTTP does: the same text, usage, rights and errors."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from serve_app import connect
from serve_app.client import Client
from serve_app.errors import ConfigError, Forbidden, Overloaded, ServeAppError, Unauthorized
from tests.e2e.joined import cluster_of, environment, full, joined, run
from tests.e2e.observe import Observer
from tests.e2e.stack import SIMULATED, TINY, Stack

HELLO = [{"role": "user", "content": "The river"}]
GREEDY: dict[str, Any] = {"model": TINY, "max_tokens": 24, "temperature": 0}
SOON_S = 0.2  # a deadline that no full engine meets


@pytest.fixture(scope="module")
def llm(stack: Stack) -> Iterator[Client]:
    with joined(stack) as client:
        yield client


def over_http(stack: Stack, path: str, body: dict[str, Any], **options: Any) -> dict[str, Any]:
    answer: dict[str, Any] = stack.post(path, body, **options).json()
    return answer


def test_a_chat_answer_is_the_one_over_http(stack: Stack, llm: Client) -> None:
    over = over_http(stack, "/v1/chat/completions", {"messages": HELLO, **GREEDY})
    by_handle = asyncio.run(llm.chat(HELLO, **GREEDY))
    assert by_handle.choices[0].message.content == over["choices"][0]["message"]["content"]
    assert by_handle.usage is not None
    assert by_handle.usage.model_dump(exclude_unset=True) == over["usage"]
    assert by_handle.model_dump(exclude_unset=True).keys() == over.keys()


def test_a_streamed_chat_is_the_whole_one_in_pieces(llm: Client) -> None:
    async def streamed() -> tuple[str, Any]:
        text = ""
        usage = None
        async for chunk in llm.stream(HELLO, stream_options={"include_usage": True}, **GREEDY):
            text += chunk.choices[0].delta.content or "" if chunk.choices else ""
            usage = chunk.usage or usage
        return text, usage

    whole = llm.sync.chat(HELLO, **GREEDY)
    text, usage = asyncio.run(streamed())
    assert text == whole.choices[0].message.content
    assert whole.usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (whole.usage.prompt_tokens, whole.usage.completion_tokens)
    by_sync = llm.sync.stream(HELLO, **GREEDY)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in by_sync) == text


def test_completions_are_those_over_http(stack: Stack, llm: Client) -> None:
    over = over_http(stack, "/v1/completions", {"prompt": "The river", **GREEDY})
    whole = llm.sync.complete("The river", **GREEDY)
    assert whole.choices[0].text == over["choices"][0]["text"]
    assert whole.usage is not None
    assert whole.usage.model_dump(exclude_unset=True) == over["usage"]
    streamed = llm.sync.stream_complete("The river", **GREEDY)
    assert "".join(chunk.choices[0].text for chunk in streamed) == over["choices"][0]["text"]
    many = llm.sync.complete(["The river", "A table"], **GREEDY)
    assert [choice.index for choice in many.choices] == [0, 1]


def test_models_are_those_over_http(stack: Stack, llm: Client) -> None:
    reported = [(one.id, one.max_model_len) for one in llm.sync.models()]  # type: ignore[attr-defined]
    assert reported == [(card["id"], card["max_model_len"]) for card in stack.get("/v1/models").json()["data"]]


def test_an_answer_s_message_goes_back_as_it_is(llm: Client) -> None:
    first = llm.sync.chat(HELLO, **GREEDY)
    second = llm.sync.chat([*HELLO, first.choices[0].message, *HELLO], **GREEDY)
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.prompt_tokens > first.usage.total_tokens


def test_a_call_must_say_which_of_several_models(stack: Stack, llm: Client) -> None:
    with pytest.raises(ServeAppError, match=", ".join(sorted(stack.models))) as refused:
        llm.sync.chat(HELLO)
    assert (refused.value.status, refused.value.param) == (400, "model")
    assert connect(stack.api_key, model=SIMULATED).sync.chat(HELLO, max_tokens=2).model == SIMULATED


ROUTES = {"chat": "/v1/chat/completions", "complete": "/v1/completions", "embed": "/v1/embeddings"}
SUBJECTS: dict[str, tuple[str, Any]] = {
    "chat": ("messages", HELLO),
    "complete": ("prompt", "The river"),
    "embed": ("input", "The river"),
}
WRONG: list[tuple[str, dict[str, Any]]] = [
    ("chat", {"model": "nobody"}),
    ("chat", {"messages": "not a list"}),
    ("chat", {"messages": [{"role": "nobody", "content": "x"}]}),
    ("chat", {"messages": []}),
    ("chat", {"temperature": "hot"}),
    ("chat", {"max_tokens": 10**6}),
    ("chat", {"max_tokens": "many"}),
    ("chat", {"priority": "critical"}),
    ("chat", {"priority": "soon"}),
    ("chat", {"n": 10_000}),
    ("chat", {"seed": 2**70}),
    ("complete", {"prompt": []}),
    ("complete", {"best_of": 3}),
    ("complete", {"echo": "yes please"}),
    ("embed", {}),
]


@pytest.mark.parametrize(("method", "changes"), WRONG)
def test_a_wrong_call_gets_http_s_error(stack: Stack, llm: Client, method: str, changes: dict[str, Any]) -> None:
    field, subject = SUBJECTS[method]
    fields = {"model": TINY, field: subject, **changes}
    response = stack.post(ROUTES[method], fields)
    reported = response.json()["error"]
    value = fields.pop(field)
    with pytest.raises(ServeAppError) as refused:
        getattr(llm.sync, method)(value, **fields)
    error = refused.value
    assert (error.status, error.message, error.param, error.type) == (
        response.status_code,
        reported["message"],
        reported["param"],
        reported["type"],
    )
    assert reported["code"] in (error.code, None)


def test_the_key_decides_who_calls(stack: Stack, batch_key: str, llm: Client, observer: Observer) -> None:
    batch = connect(batch_key, model=TINY)
    with pytest.raises(Forbidden):
        batch.sync.chat(HELLO, priority="high")
    with pytest.raises(Unauthorized) as refused:
        connect("sk-of-nobody-0123456789", model=TINY).sync.chat(HELLO)
    assert refused.value.code == "invalid_api_key"
    before = observer.value("serve_app_requests_total", model=TINY, tenant="batch", priority="low", outcome="ok")
    batch.sync.chat(HELLO, max_tokens=1)
    after = observer.value("serve_app_requests_total", model=TINY, tenant="batch", priority="low", outcome="ok")
    assert after - before == 1


def test_a_deadline_passed_in_the_queue_is_a_refusal(llm: Client, observer: Observer, simulated: str) -> None:
    with observer.ends(simulated, "refused", 2), full(llm):
        with pytest.raises(Overloaded) as refused:
            llm.sync.chat(HELLO, model=simulated, deadline_s=SOON_S)
        assert refused.value.code == "deadline"
        assert refused.value.retry_after_s is not None
        with pytest.raises(Overloaded, match="deadline"):
            next(llm.sync.stream(HELLO, model=simulated, deadline_s=SOON_S))


def test_a_repeat_with_an_idempotency_key_runs_once(llm: Client, observer: Observer, simulated: str) -> None:
    def ask() -> str:
        return llm.sync.chat(HELLO, model=simulated, max_tokens=3, idempotency_key="handle-1", session="s").id

    before = observer.generated(simulated)
    assert ask() == ask()
    assert observer.generated(simulated) - before == 3


def test_a_crowd_of_callers_in_many_threads_and_loops(llm: Client, simulated: str) -> None:
    async def several() -> list[str]:
        calls = (llm.chat(HELLO, model=simulated, max_tokens=4) for _ in range(8))
        return [answer.choices[0].message.content or "" for answer in await asyncio.gather(*calls)]

    async def crowd() -> list[list[str]]:
        return await asyncio.gather(*(asyncio.to_thread(asyncio.run, several()) for _ in range(4)))

    reported = [text for texts in asyncio.run(crowd()) for text in texts]
    assert len(reported) == 32
    assert set(reported) == {llm.sync.chat(HELLO, model=simulated, max_tokens=4).choices[0].message.content}


def test_sync_works_where_an_event_loop_runs_already(llm: Client, simulated: str) -> None:
    """As in a notebook, whose cells run inside the kernel's loop."""

    async def cell() -> int:
        answer = llm.sync.chat(HELLO, model=simulated, max_tokens=3)
        assert answer.usage is not None
        return answer.usage.completion_tokens + sum(1 for _ in llm.sync.stream_complete("x", model=simulated))

    assert asyncio.run(cell()) > 3


def test_a_large_request_and_a_large_answer_go_through(llm: Client) -> None:
    """Larger than one message of gRPC's default size in the one direction, many messages in the other."""
    with pytest.raises(ServeAppError, match="context length"):
        llm.sync.complete("river " * 700_000, model=TINY)
    answer = llm.sync.complete(
        "The river", model=TINY, max_tokens=600, n=8, logprobs=20, temperature=1.0, ignore_eos=True
    )
    assert len(answer.model_dump_json()) > 2**20
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8 * 600


NEWCOMER = """
from serve_app import connect
with connect(model="tiny") as llm:
    answer = llm.sync.chat([{"role": "user", "content": "The river"}], max_tokens=24, temperature=0)
    print(answer.choices[0].message.content)
"""


def test_a_program_that_knows_the_cluster_s_environment(stack: Stack, llm: Client) -> None:
    done = run(NEWCOMER, environment(stack))
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip("\n") == llm.sync.chat(HELLO, **GREEDY).choices[0].message.content


@pytest.mark.long
def test_a_program_in_the_environment_of_a_node_is_reported(stack: Stack) -> None:
    done = run(NEWCOMER, environment(stack, RAY_SERVE_THROUGHPUT_OPTIMIZED="1"))
    assert done.returncode != 0
    assert "ConfigError" in done.stderr
    assert "RAY_SERVE_THROUGHPUT_OPTIMIZED=1" in done.stderr


@pytest.mark.long
@pytest.mark.parametrize(
    ("changes", "reported"),
    [({"RAY_AUTH_TOKEN": "0" * 64}, "its token"), ({"RAY_ADDRESS": "127.0.0.1:1"}, "no Ray cluster answers")],
)
def test_a_program_with_a_wrong_environment_is_reported(stack: Stack, changes: dict[str, str], reported: str) -> None:
    done = run(NEWCOMER, environment(stack, **changes))
    assert done.returncode != 0
    assert "ConfigError" in done.stderr.splitlines()[-1]
    assert reported in done.stderr.splitlines()[-1]


LEFT_OPEN = """
from serve_app import connect
llm = connect(model="tiny-sim")
stream = llm.sync.stream_complete("x", max_tokens=8000)
print(len(next(stream).choices))
"""


def test_a_program_may_end_in_the_middle_of_a_stream(stack: Stack, observer: Observer, simulated: str) -> None:
    with observer.ends(simulated, "cancelled_running"):
        done = run(LEFT_OPEN, environment(stack))
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr


def test_what_cannot_be_found_is_named(stack: Stack, llm: Client) -> None:
    with pytest.raises(ConfigError, match="nobody"):
        connect(stack.api_key, application="nobody")
    with pytest.raises(ConfigError, match="SERVE_APP_API_KEY"):
        connect()
    with pytest.raises(ConfigError, match="no instance 'nobody'"):
        connect(stack.api_key, instance="nobody")
    with pytest.raises(ConfigError, match="connected to another"):
        connect(stack.api_key, address="127.0.0.1:1")
    with pytest.raises(ConfigError, match="not both"):
        connect(stack.api_key, instance="a", address="b:1")
    assert cluster_of(stack).alive


def test_the_official_sdk_s_types_come_back(llm: Client) -> None:
    answer = llm.sync.chat(HELLO, logprobs=True, top_logprobs=2, **GREEDY)
    assert isinstance(answer, openai.types.chat.ChatCompletion)
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.content is not None
    assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 2


CLOSED = """
import os, ray, time
from ray import serve
from serve_app import connect
from serve_app.names import APPLICATION
for _ in range(2):
    with connect(model="tiny-sim") as llm:
        other = connect(model="tiny-sim")
        plain = serve.get_app_handle(APPLICATION)
        asked = {"model": "tiny-sim", "prompt": "x", "max_tokens": 1, "api_key": os.environ["SERVE_APP_API_KEY"]}
        assert plain.complete.remote(**asked).result()["usage"]["completion_tokens"] == 1
        for client in (llm, other):
            assert client.sync.complete("x", max_tokens=1).usage.completion_tokens == 1
    until = time.monotonic() + 3  # Serve's handles push numbers every second, and Ray then connects by itself
    while time.monotonic() < until:
        assert not ray.is_initialized(), "something of Serve's goes on"
        time.sleep(0.05)  # bound: the three seconds
print("still", ray.is_initialized())
"""


@pytest.mark.long
def test_a_program_that_closes_its_client_is_left_without_ray_and_may_connect_again(stack: Stack) -> None:
    done = run(CLOSED, environment(stack))
    assert (done.returncode, done.stdout) == (0, "still False\n"), done.stderr
