"""A list of prompts: each is granted by itself, and the client gets one answer."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest

from serve_app.core.body_bounds import body_size
from serve_app.errors import BadRequest
from serve_app.http.prompt_list import MergedExchange
from serve_app.http.split_body import BYTES_TOGETHER, INPUTS_TOGETHER, SplitBody, split_body
from serve_app.settings import HttpSettings
from serve_app.types import Operation, Outcome
from tests.fakes.asgi_client import BATCH_KEY, Reply, ask, cancel, running, started
from tests.fakes.engines import MODEL, FakeCluster, model, run, turns, until
from tests.fakes.router import LONG, SOON_S, expected_text

PROMPTS = [f"p {number}" for number in range(20)]  # LangChain's default batch
TOKENS = 5


def split(operation: Operation, **body: Any) -> SplitBody:
    return split_body(operation, body, body_size(operation, body), HttpSettings())


def bodies_of(operation: Operation, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Of each part."""
    return [part for part, _ in split(operation, **body).parts]


def texts(reply: Reply) -> dict[int, str]:
    """The texts by the number of their choice."""
    answers = (
        reply.events if reply.headers["content-type"].startswith("text/event-stream") else [json.loads(reply.body)]
    )
    found: dict[int, str] = {}
    for answer in answers:
        for choice in answer["choices"]:
            found[choice["index"]] = found.get(choice["index"], "") + choice["text"]
    return found


def usage(reply: Reply) -> dict[str, int]:
    answers = (
        reply.events if reply.headers["content-type"].startswith("text/event-stream") else [json.loads(reply.body)]
    )
    (found,) = [answer["usage"] for answer in answers if answer.get("usage")]
    return dict(found)


@pytest.mark.parametrize("stream", [False, True])
def test_a_list_longer_than_the_batch_is_answered_as_by_one_engine(stream: bool) -> None:
    more: dict[str, Any] = {"stream_options": {"include_usage": True}} if stream else {}

    async def scenario(cluster: FakeCluster) -> None:
        client = await started(cluster, "r1", "r2")
        reply = await client.post(ask(PROMPTS, TOKENS, stream=stream, **more))
        first = await client.post(ask(PROMPTS[0], TOKENS, stream=stream, **more))

        assert reply.status == 200
        assert texts(reply) == {number: expected_text(prompt, TOKENS) for number, prompt in enumerate(PROMPTS)}
        assert usage(reply)["completion_tokens"] == len(PROMPTS) * usage(first)["completion_tokens"]
        ids = {answer["id"] for answer in (reply.events if stream else [json.loads(reply.body)])}
        assert ids == {reply.headers["x-serve-app-request-id"]}
        if stream:
            assert reply.body.count(b"[DONE]") == 1
            assert reply.body.endswith(b"data: [DONE]\n\n")
        assert client.outcomes == {Outcome.OK: 2}
        receipt = client.edge.parts.receipts.find(reply.headers["x-serve-app-request-id"], None)
        assert receipt is not None
        assert (receipt.trace.measure.slots, receipt.output_tokens) == (len(PROMPTS), len(PROMPTS) * TOKENS)
        assert client.figures("serve_app_completion_tokens_total") == {(): (len(PROMPTS) + 1) * TOKENS}
        assert client.figures("serve_app_time_to_first_token_seconds_count") == {(): 2}, "one of each request"
        await until(client.at_rest, SOON_S, "all given back")

    run(scenario, model(slots=4))


def test_an_answer_states_one_time_also_if_a_later_prompt_was_granted_in_another_second() -> None:
    sent: list[bytes] = []

    class Sent:
        async def send_events(self, data: bytes, *, is_last: bool = False) -> None:
            sent.append(data)

    def event(number: int, created: int, *choices: dict[str, Any]) -> bytes:
        chunk = {"id": f"r-{number}", "created": created, "choices": choices, "usage": {"completion_tokens": 1}}
        return b"data: " + json.dumps(chunk).encode() + b"\n\n"

    async def scenario() -> None:
        merged = MergedExchange(Sent(), split(Operation.COMPLETION, prompt=["a", "b"]))  # type: ignore[arg-type]
        for number, created in ((1, 1_001), (0, 1_000)):
            events = event(number, created, {"index": 0, "text": "a"}) + event(number, created)
            await merged.send_events(number, events)
        await merged.end()

    asyncio.run(scenario())
    lines = b"".join(sent).decode().split("\n\n")[:-2]
    reported = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert [(one["id"], one["created"]) for one in reported] == [("r", 1_001)] * 3


def test_choices_of_each_prompt_are_numbered_as_in_one_engine() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client = await started(cluster, "r1")
        reply = await client.post(ask(["a", "b"], 2, n=2, stream=False))
        assert sorted(texts(reply)) == [0, 1, 2, 3]
        assert texts(reply)[2] == expected_text("b", 2)

    run(scenario, model(slots=2))


def test_prompts_run_in_the_one_slot_that_is_free() -> None:
    """Granted together they would wait for the long request, and no other could use the slots kept for them."""

    async def scenario(cluster: FakeCluster) -> None:
        client = await started(cluster, "r1")
        task, _ = await running(client, n=3)
        reply = await client.post(ask(["a", "b", "c", "d"], TOKENS))
        assert reply.status == 200
        assert sorted(texts(reply)) == [0, 1, 2, 3]
        assert not task.done()
        await cancel(task)

    run(scenario, model(slots=4))


def test_a_list_fills_no_queue_and_its_deadline_bounds_its_start() -> None:
    """All at once, twenty would be more than may wait, and the last would start after the deadline of the list."""

    async def scenario(cluster: FakeCluster) -> None:
        client = await started(cluster, "r1", admission={"max_queued": 3})
        began = time.monotonic()
        await client.post(ask("a", LONG // 50))
        one_s = time.monotonic() - began
        headers = {"X-Deadline-Ms": str(round(2000 * one_s))}
        reply = await client.post(ask(PROMPTS, LONG // 50, stream=False), headers=headers)
        assert reply.status == 200, reply.body
        assert len(texts(reply)) == len(PROMPTS)

    run(scenario, model(slots=2))


def test_what_has_begun_is_not_shed_for_a_request_that_comes_later() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client = await started(cluster, "r1", admission={"max_queued": 1})
        task, _ = await running(client)
        reply = Reply()
        listed = client.posting(ask(["a", "b", "c"], TOKENS), key=BATCH_KEY, reply=reply)
        await until(lambda: bool(reply.chunks), SOON_S, "it has begun")
        cluster["r1"].freeze()
        await until(lambda: client.model.queue.waiting == 1, SOON_S, "the next prompt waits")
        refused = await client.post(ask("p"))  # of a higher class
        assert (refused.status, refused.error["code"]) == (429, "queue_full")
        cluster["r1"].thaw()
        await listed
        assert texts(reply) == {number: expected_text(prompt, TOKENS) for number, prompt in enumerate("abc")}
        await cancel(task)

    run(scenario, model(slots=2, step_s=0.1))


def test_one_prompt_of_a_list_waits_at_a_time_and_the_first_is_refused_as_any_request() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client = await started(cluster, "r1", admission={"max_queued": 1})
        task, _ = await running(client, n=4)
        listed = client.posting(ask(["a", "b", "c"], stream=False))
        await until(lambda: client.model.queue.waiting == 1, SOON_S, "the first prompt waits")
        await turns(50)
        assert client.model.queue.waiting == 1
        refused = await client.post(ask(["a", "b", "c"]), key=BATCH_KEY)
        assert (refused.status, refused.error["code"]) == (429, "queue_full")
        await cancel(task)
        assert sorted(texts(await listed)) == [0, 1, 2]

    run(scenario, model(slots=4))


def test_a_prompt_that_the_engine_refuses_ends_the_list() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client = await started(cluster, "r1")
        reply = await client.post(ask(["a", "word " * 9000], TOKENS, stream=False))
        assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")
        assert reply.error["param"] == "prompt.1"
        assert reply.headers["x-should-retry"] == "false"
        assert client.outcomes == {Outcome.BAD_REQUEST: 1}
        await until(client.at_rest, SOON_S, "all given back")

    run(scenario, model(slots=4))


LONG_PROMPT = "word " * 9000


def test_a_prompt_refused_while_others_are_streamed_is_reported_after_their_ends() -> None:
    """One slot is free: the first prompt is streamed to its end before one that is too long has its turn."""

    async def scenario(cluster: FakeCluster) -> None:
        client = await started(cluster, "r1")
        task, _ = await running(client, n=3)
        prompts = ["a", LONG_PROMPT, "b", LONG_PROMPT, "c"]
        more = {"stream_options": {"include_usage": True}}
        reply = await client.post(ask(prompts, TOKENS, **more))
        await cancel(task)
        assert reply.status == 200
        chunks = [event for event in reply.events if "choices" in event]
        found: dict[int, str] = {}
        for chunk in chunks:
            for choice in chunk["choices"]:
                found[choice["index"]] = found.get(choice["index"], "") + choice["text"]
        assert found == {0: expected_text("a", TOKENS), 2: expected_text("b", TOKENS), 4: expected_text("c", TOKENS)}
        assert [chunk["usage"]["completion_tokens"] for chunk in chunks if chunk.get("usage")] == [3 * TOKENS]
        errors = [event["error"] for event in reply.events[len(chunks) :]]
        reported = [(error["param"], error["code"]) for error in errors]
        assert reported == [(f"prompt.{number}", "context_length_exceeded") for number in (1, 3)]
        assert reply.body.count(b"[DONE]") == 1
        assert reply.body.endswith(b"data: [DONE]\n\n")
        await until(client.at_rest, SOON_S, "all given back")

    run(scenario, model(slots=4))


def test_a_list_whose_first_prompt_is_refused_is_a_status_that_names_it() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client = await started(cluster, "r1")
        reply = await client.post(ask([LONG_PROMPT, "a"], TOKENS))
        assert (reply.status, reply.error["param"]) == (400, "prompt.0")
        await until(client.at_rest, SOON_S, "all given back")

    run(scenario, model(slots=1))


def test_a_client_that_leaves_ends_all_prompts() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client = await started(cluster, "r1")
        reply = Reply()
        task = client.posting(ask(["a", "b", "c"], LONG), reply=reply)
        await until(lambda: bool(reply.chunks), SOON_S, "first frames")
        await cancel(task)
        await until(client.at_rest, SOON_S, "all given back")
        await until(lambda: not cluster["r1"].work, SOON_S, "aborted")

    run(scenario, model(slots=2))


@pytest.mark.parametrize("stream", [False, True])
def test_a_repeat_gets_the_merged_answer(stream: bool) -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client = await started(cluster, "r1")
        body = ask(["a", "b"], TOKENS, stream=stream)
        headers = {"Idempotency-Key": "k"}
        first, second = [await client.post(body, headers=headers) for _ in range(2)]
        assert second.headers["x-idempotent-replay"] == "true"
        assert second.body == first.body

    run(scenario, model(slots=2))


def test_waiting_prompts_say_where_they_stand() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client = await started(cluster, "r1")
        task, _ = await running(client, n=4)
        reply = Reply()
        waiting = client.posting(ask(["a", "b"]), headers={"X-Queue-Status": "1"}, reply=reply)
        await until(lambda: b": queue position=1" in reply.body, SOON_S, "a comment")
        await cancel(task)
        await waiting
        assert sorted(texts_after_comments(reply)) == [0, 1]

    def texts_after_comments(reply: Reply) -> dict[int, str]:
        reply.chunks[:] = [chunk for chunk in reply.chunks if not chunk.startswith(b":")]
        return texts(reply)

    run(scenario, model(slots=4))


@pytest.mark.parametrize("prompt", ["a", ["a"], [1, 2, 3], None, [[1, 2]]])
def test_one_prompt_is_no_list(prompt: Any) -> None:
    assert bodies_of(Operation.COMPLETION, {"prompt": prompt}) == [{"prompt": prompt}]


@pytest.mark.parametrize("wrong", [None, 1.5, [], ["b", "c"], {"x": 1}, True])
def test_an_entry_that_is_no_prompt_is_refused_by_its_number(wrong: Any) -> None:
    """A list in the list would run several sequences in one slot."""
    with pytest.raises(BadRequest) as caught:
        bodies_of(Operation.COMPLETION, {"prompt": ["a", wrong]})
    assert caught.value.param == "prompt.1"


def embed(inputs: Any, **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "input": inputs, **more}


@pytest.mark.parametrize("more", [{}, {"encoding_format": "base64"}])
def test_many_inputs_are_embedded_as_one_after_the_other(more: dict[str, Any]) -> None:
    inputs = [f"input {number}" for number in range(2 * INPUTS_TOGETHER + 5)]

    async def scenario(cluster: FakeCluster) -> None:
        client = await started(cluster, "r1", "r2")
        reply = await client.post(embed(inputs, **more), path="/v1/embeddings")
        assert reply.status == 200, reply.body
        answer = json.loads(reply.body)
        alone = json.loads((await client.post(embed(inputs[-1], **more), path="/v1/embeddings")).body)
        assert [one["index"] for one in answer["data"]] == list(range(len(inputs)))
        assert answer["data"][-1]["embedding"] == alone["data"][0]["embedding"]
        assert len({str(one["embedding"]) for one in answer["data"]}) == len(inputs)
        assert answer["usage"]["prompt_tokens"] == len(inputs) * alone["usage"]["prompt_tokens"]
        assert client.outcomes == {Outcome.OK: 2}
        await until(client.at_rest, SOON_S, "all given back")

    run(scenario, model(slots=8, task="embed"))


def test_many_inputs_of_one_hold_no_replica_until_they_are_embedded() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client = await started(cluster, "r1")
        many = asyncio.create_task(client.post(embed(["a"] * 40 * INPUTS_TOGETHER), path="/v1/embeddings"))
        await until(lambda: not client.at_rest(), SOON_S, "the list has begun")
        reply = await client.post(embed("b"), path="/v1/embeddings")
        assert (reply.status, many.done()) == (200, False)
        assert (await many).status == 200

    run(scenario, model(slots=INPUTS_TOGETHER, task="embed"))


def test_inputs_are_embedded_together_up_to_a_number_and_to_their_bytes() -> None:
    short = "a"
    long = "b" * (BYTES_TOGETHER // 2)
    ids = [7] * BYTES_TOGETHER
    inputs = [short] * (INPUTS_TOGETHER + 1) + [long, long, ids, short]
    bodies = bodies_of(Operation.EMBEDDING, {"input": inputs, "user": "u"})
    parts = [body["input"] for body in bodies]
    assert parts == [[short] * INPUTS_TOGETHER, [short, long], [long], [ids], [short]]
    assert all(body["user"] == "u" for body in bodies)


def test_conversations_are_embedded_together_like_inputs() -> None:
    short = [{"role": "user", "content": "a"}]
    long = [{"role": "user", "content": "b" * BYTES_TOGETHER}]
    bodies = bodies_of(Operation.EMBEDDING, {"messages": [short] * (INPUTS_TOGETHER + 2) + [long]})
    assert [body["messages"] for body in bodies] == [[short] * INPUTS_TOGETHER, [short] * 2, [long]]


@pytest.mark.parametrize("given", ["a", ["a"], [1, 2, 3], None, [[1, 2]]])
def test_one_input_is_no_list(given: Any) -> None:
    assert bodies_of(Operation.EMBEDDING, {"input": given}) == [{"input": given}]


@pytest.mark.parametrize(
    "given", [[{"role": "user", "content": "a"}] * 50, [[{"role": "user", "content": "a"}]], [1, []]]
)
def test_one_conversation_is_no_list(given: Any) -> None:
    assert bodies_of(Operation.EMBEDDING, {"messages": given}) == [{"messages": given}]


def test_an_input_that_is_none_is_refused_by_its_number() -> None:
    """In a part of its own a list of numbers would be one prompt, and its answer one embedding."""
    inputs = ["a"] * INPUTS_TOGETHER + [1, 2, 3]
    with pytest.raises(BadRequest) as caught:
        bodies_of(Operation.EMBEDDING, {"input": inputs})
    assert caught.value.param == f"input.{INPUTS_TOGETHER}"


def test_embeddings_are_merged_without_a_look_at_their_numbers() -> None:
    """Of 2,000 embeddings they are megabytes, which an event loop should not read."""
    sent = list[bytes]()

    class Sent:
        async def send_answer(self, status: int, headers: Any, body: bytes) -> None:
            sent.append(body)

    inputs = ["a", "b", "c" * BYTES_TOGETHER]  # two parts, of which the first has two

    async def scenario() -> None:
        merged = MergedExchange(Sent(), split(Operation.EMBEDDING, input=inputs))  # type: ignore[arg-type]
        first = b'{"id":"r-0","created":1,"data":[{"index":0,"embedding":[1.50]},{"index":1,"embedding":[0.0010]}]}'
        merged.keep(1, b'{"id":"r-1","created":2,"data":[{"index":0,"embedding":"AAA="}],"usage":null}')
        merged.keep(0, first)
        await merged.end()

    asyncio.run(scenario())
    (body,) = sent
    assert b"[1.50]" in body
    assert b"[0.0010]" in body
    answer = json.loads(body)
    assert [one["index"] for one in answer["data"]] == [0, 1, 2]
    assert answer["id"] == "r"
