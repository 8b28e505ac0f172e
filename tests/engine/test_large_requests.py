"""Requests that a process of its own reads and renders: the same as in the engine's process, in fair order."""

from __future__ import annotations

import asyncio
import dataclasses
import pickle
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any

import msgspec
import pytest
from pydantic import BaseModel
from starlette.datastructures import State

from tests.requires import requires

requires("vllm")

from vllm.engine.arg_utils import AsyncEngineArgs  # noqa: E402
from vllm.entrypoints.launchers.api_server.app_state import init_app_state  # noqa: E402
from vllm.entrypoints.serve.engine.protocol import ErrorResponse  # noqa: E402
from vllm.outputs import CompletionOutput, RequestOutput  # noqa: E402
from vllm.parser.utils import count_history_tool_calls  # noqa: E402
from vllm.renderers import renderer_from_config  # noqa: E402

from serve_app.core.body_bounds import LARGE_OBJECTS  # noqa: E402
from serve_app.engine.helper_process import RENDER_PROCESS, RETRY_AFTER_S, HelperProcess  # noqa: E402
from serve_app.engine.tiny_model import ensure_tiny_model  # noqa: E402
from serve_app.engine.vllm_adapter import serving  # noqa: E402
from serve_app.engine.vllm_adapter.large_requests import MEDIA_TIMES, LargeRequests  # noqa: E402
from serve_app.engine.vllm_adapter.render_process import Reader, RenderSetup  # noqa: E402
from serve_app.engine.vllm_adapter.rendered import Rendered, rendered_of_request, take_rendered  # noqa: E402
from serve_app.errors import BadRequest, Unavailable  # noqa: E402
from serve_app.settings import ModelSettings  # noqa: E402
from serve_app.transport import Submit  # noqa: E402
from serve_app.types import Operation  # noqa: E402

TOKENS = 8192
MANY = LARGE_OBJECTS + 100
CHAT = [{"role": "user", "content": "a"}] * MANY
ITEMS = [{"role": "user", "content": "a"}] * MANY
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CALLS = [{"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "tool_call_id": "c", "content": "1"}] * MANY
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def setup() -> RenderSetup:
    path = str(ensure_tiny_model())
    arguments = AsyncEngineArgs(model=path, served_model_name="m", dtype="float32", max_model_len=TOKENS)
    settings = ModelSettings(name="m", path=path, tool_parser="hermes")
    return RenderSetup(arguments.create_engine_config(), serving.frontend_arguments(arguments, settings), True)


@pytest.fixture(scope="module")
def helper(setup: RenderSetup) -> Iterator[HelperProcess]:
    helper = HelperProcess("reads large requests", RENDER_PROCESS, pickle.dumps(setup))
    yield helper
    helper.end()


@pytest.fixture(scope="module")
def reader(setup: RenderSetup) -> Iterator[tuple[asyncio.Runner, Reader]]:
    """One in this process."""
    with asyncio.Runner() as runner:
        reader = Reader(setup)
        runner.run(reader.start())
        yield runner, reader


def submit(operation: Operation, **body: Any) -> Submit:
    return Submit(1, "r", operation, {"model": "m", **body}, cache_salt="salt")


READABLE = [
    submit(Operation.CHAT, messages=CHAT, max_tokens=5),
    submit(Operation.CHAT, messages=[{"role": "user", "content": [{"type": "text", "text": "a b"}] * MANY}]),
    submit(Operation.CHAT, messages=CALLS[: MANY // 2], tools=[TOOL], tool_choice="required"),
    submit(
        Operation.CHAT,
        messages=[*CHAT, {"role": "assistant", "content": "so"}],
        continue_final_message=True,
        add_generation_prompt=False,
        echo=True,
    ),
    submit(Operation.RESPONSES, input=ITEMS, instructions="be brief"),
    submit(Operation.RESPONSES, input="a " * 3000),
    submit(Operation.COMPLETION, prompt="river " * 1000, suffix=None),
    submit(Operation.COMPLETION, prompt=[5] * 3000, echo=True),
]


def ids(rendered: Rendered) -> list[int]:
    result = rendered.result
    found = (
        result[-1][0] if isinstance(result, tuple) else result[0] if isinstance(result, list) else result.engine_input
    )
    return list(found["prompt_token_ids"])


@pytest.mark.parametrize("asked", READABLE, ids=lambda asked: asked.operation)
def test_the_prompt_is_that_of_the_engine_s_own_process(
    helper: HelperProcess, reader: tuple[asyncio.Runner, Reader], asked: Submit
) -> None:
    found = pickle.loads(helper.ask(msgspec.msgpack.encode(asked)))
    runner, own = reader
    expected = runner.run(own.read(asked))
    assert isinstance(found, Rendered), found
    assert ids(found) == ids(expected)
    assert len(ids(found)) >= MANY // 4
    assert type(found.request) is type(expected.request)
    assert found.request.model_dump(exclude={"messages", "input", "request_id"}) == expected.request.model_dump(
        exclude={"messages", "input", "request_id"}
    )
    again = serving.request_of(asked, True)
    if asked.operation is Operation.CHAT:  # what is read of the history later
        assert again.messages[-1]["role"] == found.request.messages[-1]["role"]
    if asked.operation is not Operation.COMPLETION:
        assert count_history_tool_calls(found.request) == count_history_tool_calls(again)


@pytest.mark.parametrize(
    "asked",
    [
        submit(Operation.CHAT, messages=CHAT * 8),
        submit(Operation.CHAT, messages=[*CHAT, {"role": "nobody"}]),
        submit(Operation.RESPONSES, input=[*ITEMS, {"type": "no such item"}]),
        submit(Operation.RESPONSES, input=ITEMS * 8),
        submit(Operation.COMPLETION, prompt="river " * 90_000),
        submit(Operation.TOKENIZE, messages=[*CHAT, {"role": 5}]),
    ],
)
def test_an_error_is_that_of_the_engine_s_own_process(
    helper: HelperProcess, reader: tuple[asyncio.Runner, Reader], asked: Submit
) -> None:
    found = pickle.loads(helper.ask(msgspec.msgpack.encode(asked)))
    runner, own = reader
    assert isinstance(found, ErrorResponse)
    assert found.error.code == 400
    assert found == runner.run(own.read(asked))


def test_a_text_that_is_truncated_is_cut_before_it_is_tokenized(reader: tuple[asyncio.Runner, Reader]) -> None:
    """As vLLM itself does for a request that names the side; a factor of 100 otherwise."""
    runner, own = reader
    text = [{"role": "user", "content": "word " * 400_000}]

    def used_s(**body: Any) -> float:
        began = time.process_time()
        rendered = runner.run(own.read(submit(Operation.CHAT, messages=text, truncate_prompt_tokens=10, **body)))
        assert isinstance(rendered, Rendered), rendered
        assert len(ids(rendered)) == 10
        return time.process_time() - began

    used_s(truncation_side="left")  # imports
    assert used_s() < 10 * used_s(truncation_side="left")


def test_work_without_a_slot_is_answered_whole(helper: HelperProcess) -> None:
    def answer(asked: Submit) -> Any:
        return msgspec.json.decode(pickle.loads(helper.ask(msgspec.msgpack.encode(asked))))

    tokens = answer(submit(Operation.TOKENIZE, prompt="river " * 20_000))
    assert tokens["count"] == len(tokens["tokens"]) >= 20_000
    assert answer(submit(Operation.DETOKENIZE, tokens=tokens["tokens"]))["prompt"].endswith("river river ")
    assert answer(submit(Operation.INPUT_TOKENS, input=ITEMS))["input_tokens"] > MANY


@pytest.mark.long
def test_a_process_that_has_ended_is_replaced(helper: HelperProcess) -> None:
    helper.process.kill()
    helper.process.wait()
    found = pickle.loads(helper.ask(msgspec.msgpack.encode(submit(Operation.CHAT, messages=CHAT))))
    assert isinstance(found, Rendered)


@pytest.mark.long
def test_a_request_that_takes_more_memory_than_it_may_is_refused_and_the_next_is_read(setup: RenderSetup) -> None:
    small = dataclasses.replace(setup, max_more_bytes=256 * 2**20)
    helper = HelperProcess("reads large requests", RENDER_PROCESS, pickle.dumps(small))
    large = LargeRequests(lambda: helper.ask)

    async def main() -> None:
        with pytest.raises(Unavailable) as caught:  # native code that gets no memory ends its process
            await large.read(submit(Operation.TOKENIZE, prompt="word " * 1_500_000))
        frame = serving.our_refusal(caught.value, submit(Operation.TOKENIZE))
        assert (frame.status, frame.retry_after_s) == (503, RETRY_AFTER_S)
        assert isinstance(await large.read(submit(Operation.CHAT, messages=CHAT)), Rendered)

    try:
        asyncio.run(main())
    finally:
        helper.end()


class Engine:
    """Stands for vLLM's engine client: an answer of one word, and the prompts that it was asked."""

    def __init__(self, setup: RenderSetup) -> None:
        self.vllm_config = setup.config
        self.model_config = setup.config.model_config
        self.renderer = renderer_from_config(setup.config)
        self.input_processor = None
        self.errored = False
        self.prompts: list[list[int]] = []

    def check_admission(self, n: int) -> None:
        """There is room."""

    async def is_tracing_enabled(self) -> bool:
        return False

    async def check_grammar(self, constraint: object) -> None:
        """No grammar is refused."""

    async def generate(self, prompt: Any, *_: Any, **__: Any) -> AsyncGenerator[RequestOutput, None]:
        ids = list(prompt["prompt_token_ids"])
        self.prompts.append(ids)
        word = CompletionOutput(0, "word", [5], None, None, finish_reason="stop")
        yield RequestOutput("r", None, ids, None, [word], finished=True, num_cached_tokens=0)


@pytest.mark.parametrize("asked", READABLE, ids=lambda asked: asked.operation)
def test_vllm_s_serving_objects_answer_what_the_process_has_read(
    setup: RenderSetup, helper: HelperProcess, asked: Submit
) -> None:
    async def main() -> None:
        engine = Engine(setup)
        state = State()
        await init_app_state(engine, state, setup.frontend, ("generate",))  # type: ignore[arg-type]
        take_rendered(state.online_renderer)
        answers = []
        for large in (LargeRequests(lambda: helper.ask), None):
            answered = await serving.answer(engine, state, asked, True, large)  # type: ignore[arg-type]
            assert isinstance(answered, BaseModel)
            answers.append(answered.model_dump(exclude={"id", "created", "created_at", "output"}))
        assert not isinstance(answered, ErrorResponse)
        assert answers[0] == answers[1]
        assert len(engine.prompts) == 2
        assert engine.prompts[0] == engine.prompts[1]

    asyncio.run(main())


def test_a_small_request_whose_schema_costs_much_is_read_by_the_process(
    setup: RenderSetup, helper: HelperProcess
) -> None:
    kinds = [{"type": "object", "properties": {"k": {"const": n}}, "required": ["k"]} for n in range(120)]
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"oneOf": kinds}}}
    asked = submit(Operation.CHAT, messages=CHAT[:1], max_tokens=5, response_format=wanted)
    arrived: list[bytes] = []

    def ask(question: bytes) -> bytes:
        arrived.append(question)
        return helper.ask(question)

    async def main() -> None:
        engine = Engine(setup)
        state = State()
        await init_app_state(engine, state, setup.frontend, ("generate",))  # type: ignore[arg-type]
        take_rendered(state.online_renderer)
        large = LargeRequests(lambda: ask)
        assert await large.read(asked) is None
        answered = await serving.answer(engine, state, asked, True, large)  # type: ignore[arg-type]
        assert isinstance(answered, BaseModel)
        assert not isinstance(answered, ErrorResponse)
        assert len(arrived) == len(engine.prompts) == 1

    asyncio.run(main())


def test_vllm_takes_what_is_rendered_once() -> None:
    class Renderer:
        async def render_chat(self, request: str) -> str:
            return f"{request} rendered here"

        render_responses = render_completion = render_chat

    async def main() -> None:
        renderer: Any = Renderer()
        take_rendered(renderer)
        assert await renderer.render_chat("one") == "one rendered here"
        rendered_of_request.set(Rendered("two", "two rendered there"))
        assert await renderer.render_chat("two") == "two rendered there"
        assert await renderer.render_chat("three") == "three rendered here"

    asyncio.run(main())


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 100_000}}


def test_of_a_model_that_reads_media_only_those_in_content_parts_are_read_in_the_engine_s_process() -> None:
    asked: list[Submit] = []

    def ask(question: bytes) -> bytes:
        asked.append(msgspec.msgpack.decode(question, type=Submit))
        return pickle.dumps(b"answer")

    async def main() -> None:
        large = LargeRequests(lambda: ask, reads_media=True)
        with_image = {"role": "user", "content": [IMAGE]}
        assert await large.read(submit(Operation.CHAT, messages=[with_image])) is None
        assert await large.read(submit(Operation.CHAT, messages=[*CHAT, with_image])) is None
        named_so = submit(Operation.CHAT, messages=CHAT, chat_template_kwargs={"image_url": 1})
        assert await large.read(named_so) == b"answer"
        with pytest.raises(BadRequest):
            await large.read(submit(Operation.CHAT, messages=[*CHAT * MEDIA_TIMES, with_image]))
        assert asked == [named_so]
        assert await LargeRequests(lambda: ask).read(submit(Operation.CHAT, messages=[*CHAT, with_image])) == b"answer"

    asyncio.run(main())


def test_small_requests_are_not_asked_about_and_tenants_take_turns() -> None:
    asked: list[str] = []

    def ask(question: bytes) -> bytes:
        asked.append(msgspec.msgpack.decode(question, type=Submit).request_id)
        return pickle.dumps(b"answer")

    def start() -> Callable[[bytes], bytes]:
        asked.append("start")
        return ask

    async def main() -> None:
        large = LargeRequests(start)
        assert await large.read(submit(Operation.CHAT, messages=CHAT[:3])) is None
        assert await large.read(submit(Operation.EMBEDDING, input=["a"] * 3000)) is None
        assert asked == []
        tenants = ["heavy", "heavy", "heavy", "light"]
        works = [Submit(1, f"{t}{n}", Operation.CHAT, {"messages": CHAT}, cache_salt=t) for n, t in enumerate(tenants)]
        assert await asyncio.gather(*map(large.read, works)) == [b"answer"] * 4
        assert asked == ["start", "heavy0", "light3", "heavy1", "heavy2"]

    asyncio.run(main())


def test_what_its_router_has_measured_is_not_measured_again() -> None:
    def ask(question: bytes) -> bytes:
        return pickle.dumps(b"answer")

    async def main() -> None:
        large = LargeRequests(lambda: ask)
        for messages, measured, answer in (
            (CHAT, None, b"answer"),  # by a router of an earlier release: not at all
            (CHAT, False, None),
            (CHAT[:3], True, b"answer"),
        ):
            asked = Submit(1, "r", Operation.CHAT, {"messages": messages}, is_large=measured)
            assert await large.read(asked) == answer

    asyncio.run(main())
