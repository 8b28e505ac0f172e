"""One turn of an agent by Anthropic's SDK: thoughts, a call, its result, an answer; one session in the receipts."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest

from serve_app.settings import ModelSettings, SimulatedSettings
from tests.fakes.asgi_client import ADMIN_KEY, Client, started
from tests.fakes.engines import MODEL, FakeCluster, run
from tests.http.test_app_receipts import receipts
from tests.requires import requires

requires("vllm")  # with it comes Anthropic's SDK

import anthropic  # noqa: E402
from anthropic.types import Message  # noqa: E402

ARGUMENTS = {"path": "notes.txt"}
SCRIPT = [
    {"reasoning": "It is in the notes.", "text": "I read them.", "calls": [{"name": "read", "arguments": ARGUMENTS}]},
    {"text": "They say hello."},
]
AGENT = ModelSettings(
    name=MODEL,
    engine="simulated",
    max_num_seqs=4,
    simulated=SimulatedSettings.model_validate({"script": SCRIPT, "decode_step_s": 0.001}),
)
QUESTION: Any = {"role": "user", "content": "What is in the notes?"}
# As a coding agent sends it.
ASKED: dict[str, Any] = {
    "model": MODEL,
    "max_tokens": 2048,
    "system": [{"type": "text", "text": "You read files.", "cache_control": {"type": "ephemeral"}}],
    "tools": [{"name": "read", "description": "Read a file.", "input_schema": {"type": "object"}}],
    "thinking": {"type": "adaptive"},
    "metadata": {"user_id": '{"session_id": "s-1"}'},
    "extra_headers": {"anthropic-beta": "interleaved-thinking-2025-05-14"},
    "extra_query": {"beta": "true"},
}


@contextlib.asynccontextmanager
async def sdk(client: Client) -> AsyncIterator[anthropic.AsyncAnthropic]:
    transport = httpx2.ASGITransport(client.edge)
    async with (
        httpx2.AsyncClient(transport=transport) as inner,
        anthropic.AsyncAnthropic(api_key=ADMIN_KEY, base_url="http://here", http_client=inner, max_retries=0) as made,
    ):
        yield made


async def whole(made: anthropic.AsyncAnthropic, messages: list[Any]) -> Message:
    answer: Message = await made.messages.create(**ASKED, messages=messages)
    return answer


async def streamed(made: anthropic.AsyncAnthropic, messages: list[Any]) -> Message:
    async with made.messages.stream(**ASKED, messages=messages) as stream:
        return await stream.get_final_message()


@pytest.mark.parametrize("answered", [whole, streamed])
def test_a_turn_with_a_tool_is_thought_called_and_answered_in_one_session(answered: Any) -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client = await started(cluster, "r1")
        async with sdk(client) as made:
            first = await answered(made, [QUESTION])
            thought, text, call = first.content
            assert (thought.type, thought.thinking, text.text) == ("thinking", "It is in the notes.", "I read them.")
            assert (call.name, call.input, first.stop_reason) == ("read", ARGUMENTS, "tool_use")
            result = {"type": "tool_result", "tool_use_id": call.id, "content": "hello"}
            turns = [QUESTION, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
            second = await answered(made, turns)
            assert (second.content[0].text, second.stop_reason) == ("They say hello.", "end_turn")
            asked = {name: ASKED[name] for name in ("model", "system", "tools")}
            counted = await made.messages.count_tokens(**asked, messages=turns)
            assert counted.input_tokens == second.usage.input_tokens > first.usage.input_tokens
        found = [one for one in receipts(client) if one.output_tokens]
        assert [one.session_id for one in found] == ["s-1", "s-1"]

    run(scenario, AGENT)
