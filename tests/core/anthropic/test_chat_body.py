"""A Messages request is translated to the chat that it is, or refused by the path of its first fault."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.core.anthropic import chat_body, client_words
from serve_app.core.anthropic.chat_body import FOUND_TOOL, READ_FIELDS
from serve_app.errors import BadRequest
from serve_app.types import Operation

USER = {"role": "user", "content": "hi"}
BODY = {"model": "m", "max_tokens": 5, "messages": [USER]}
TOOL = {"name": "weather", "description": "The weather.", "input_schema": {"type": "object", "properties": {}}}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "QUJD"}}
IMAGE_PART = {"type": "image_url", "image_url": {"url": "data:image/png;base64,QUJD"}}

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.sampled_from(["text", "image", "tool_use"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
blocks = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "image", "thinking", "tool_use", "tool_result"])},
    optional=dict.fromkeys(("text", "source", "thinking", "id", "name", "input", "content"), json_values),
)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system"])},
        optional={"content": json_values | st.lists(blocks, max_size=3)},
    ),
    max_size=3,
)
bodies = st.dictionaries(st.sampled_from(sorted(READ_FIELDS)), json_values | messages, max_size=6)


def chat(operation: Operation = Operation.MESSAGES, **more: Any) -> dict[str, Any]:
    return chat_body(operation, {**BODY, **more})


def turns(*contents: Any, role: str = "user") -> list[dict[str, Any]]:
    """The chat's messages for one turn with this content for each."""
    found = chat(messages=[{"role": role, "content": content} for content in contents])
    return list(found["messages"])


def refused(body: dict[str, Any], operation: Operation = Operation.MESSAGES) -> str | None:
    with pytest.raises(BadRequest) as caught:
        chat_body(operation, body)
    assert caught.value.param is not None
    assert caught.value.param in caught.value.message
    return caught.value.param


def test_a_plain_request_is_a_plain_chat() -> None:
    assert chat(temperature=0.5, top_k=3, stop_sequences=["."]) == {
        "model": "m", "messages": [USER], "max_tokens": 5, "temperature": 0.5, "top_k": 3, "stop": ["."],
    }  # fmt: skip


def test_a_stream_reports_its_tokens_from_its_beginning() -> None:
    options = chat(stream=True)["stream_options"]
    assert options == {"include_usage": True, "continuous_usage_stats": True}
    assert "stream_options" not in chat(stream=False)


@pytest.mark.parametrize("system", ["Be brief.", [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]])
def test_the_system_prompt_is_the_first_message(system: Any) -> None:
    assert chat(system=system)["messages"] == [{"role": "system", "content": "Be brief."}, USER]


def test_what_differs_in_each_request_of_an_agent_is_left_out_of_its_system_prompt() -> None:
    header = {"type": "text", "text": "x-anthropic-billing-header: cch=1a2b"}
    assert chat(system=[header, {"type": "text", "text": "Be brief."}])["messages"][0]["content"] == "Be brief."


def test_marks_of_a_cache_and_of_the_user_have_no_effect() -> None:
    marked = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}
    assert chat(messages=[{"role": "user", "content": [marked]}], metadata={"user_id": "u"}) == chat()


@pytest.mark.parametrize("content", ["It is", [{"type": "text", "text": "It is"}]])
def test_a_last_turn_of_the_model_is_continued(content: Any) -> None:
    begun = {"role": "assistant", "content": content}
    for operation in (Operation.MESSAGES, Operation.MESSAGE_TOKENS):
        found = chat(operation, messages=[USER, begun])
        assert found["messages"][-1] == {"role": "assistant", "content": "It is"}
        assert (found["continue_final_message"], found["add_generation_prompt"]) == (True, False)


@pytest.mark.parametrize(
    "last",
    [USER, {"role": "assistant", "content": ""}, {"role": "system", "content": "Be brief."},
     {"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "thinking", "thinking": "Which?"}]},
     {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "weather", "input": {}}]}],
)  # fmt: skip
def test_another_last_turn_is_answered(last: dict[str, Any]) -> None:
    found = chat(messages=[USER, {"role": "assistant", "content": "It is"}, last])
    assert "continue_final_message" not in found


def test_a_turn_of_text_and_images_has_a_part_for_each() -> None:
    by_url = {"type": "image", "source": {"type": "url", "url": "https://a/b.png"}}
    (turn,) = turns([{"type": "text", "text": "See:"}, IMAGE, by_url])
    assert turn["content"] == [
        {"type": "text", "text": "See:"},
        IMAGE_PART,
        {"type": "image_url", "image_url": {"url": "https://a/b.png"}},
    ]


def test_calls_and_their_results_are_messages_of_a_chat() -> None:
    call = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Rome"}}
    thought = {"type": "thinking", "thinking": "Which?", "signature": "s"}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "20"}, IMAGE]}
    found = chat(
        messages=[
            USER,
            {"role": "assistant", "content": [thought, {"type": "text", "text": "I look."}, call]},
            {"role": "user", "content": [result, {"type": "text", "text": "And now?"}]},
        ]
    )
    function = {"name": "weather", "arguments": '{"city": "Rome"}'}
    assert found["messages"][1:] == [
        {
            "role": "assistant",
            "reasoning": "Which?",
            "tool_calls": [{"id": "t1", "type": "function", "function": function}],
            "content": "I look.",
        },
        {"role": "tool", "tool_call_id": "t1", "content": "20"},
        {"role": "user", "content": [IMAGE_PART]},
        {"role": "user", "content": "And now?"},
    ]


def test_a_tool_that_a_search_has_found_is_named_in_the_result() -> None:
    found = [{"type": "tool_reference", "tool_name": "weather"}, {"type": "text", "text": "One."}]
    (turn,) = turns([{"type": "tool_result", "tool_use_id": "t1", "content": found}])
    assert turn == {"role": "tool", "tool_call_id": "t1", "content": f"{FOUND_TOOL.format('weather')}\nOne."}
    assert chat(tools=[{**TOOL, "defer_loading": True}]) == chat(tools=[TOOL])
    nameless = [{"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "tool_reference"}]}]
    body = {**BODY, "messages": [{"role": "user", "content": nameless}]}
    assert refused(body) == "messages.0.content.0.content.0.tool_name"


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "weather"}, {"type": "function", "function": {"name": "weather"}}),
    ],
)
def test_a_choice_of_tools_is_the_chat_s(choice: dict[str, Any], expected: Any) -> None:
    found = chat(tools=[TOOL], tool_choice={**choice, "disable_parallel_tool_use": True})
    assert (found["tool_choice"], found["parallel_tool_calls"]) == (expected, False)
    (tool,) = found["tools"]
    assert tool["function"] == {
        "name": "weather", "description": "The weather.", "parameters": TOOL["input_schema"],
    }  # fmt: skip


def test_a_schema_an_effort_and_a_budget_of_thinking_are_the_chat_s() -> None:
    schema = {"type": "object"}
    config = {"effort": "low", "format": {"type": "json_schema", "schema": schema}}
    found = chat(max_tokens=4096, output_config=config, thinking={"type": "enabled", "budget_tokens": 2048})
    assert found["response_format"]["json_schema"]["schema"] == schema
    assert (found["reasoning_effort"], found["thinking_token_budget"]) == ("low", 2048)
    assert chat(thinking={"type": "disabled"})["reasoning_effort"] == "none"
    assert chat(thinking={"type": "adaptive"}) == chat()


def test_the_class_comes_with_the_request() -> None:
    assert chat(service_tier="standard_only") == chat()
    assert chat(service_tier="auto", priority="low") == {**chat(), "service_tier": "auto", "priority": "low"}


def test_a_count_of_tokens_needs_no_bound_of_the_answer() -> None:
    asked = {"model": "m", "messages": [USER], "tools": [TOOL]}
    assert "max_tokens" not in chat_body(Operation.MESSAGE_TOKENS, asked)
    assert refused(asked) == "max_tokens"


def block(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": fields.pop("role", "user"), "content": [fields]}]}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": ["hi"]}, "messages.0"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages.0.role"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": 1}]}, "messages.0.content"),
        (block(), "messages.0.content.0.type"),
        (block(type="text"), "messages.0.content.0.text"),
        (block(type="document", source={}), "messages.0.content.0.type"),
        (block(type="image", source={"type": "file"}), "messages.0.content.0.source.type"),
        (block(type="image", source={"type": "base64", "data": "a"}), "messages.0.content.0.source.media_type"),
        (block(type="tool_use", role="assistant", id="a", name="b"), "messages.0.content.0.input"),
        (block(type="tool_use", id="a", name="b", input={}), "messages.0.content.0.type"),
        (block(type="tool_result"), "messages.0.content.0.tool_use_id"),
        ({"system": 1}, "system"),
        ({"stream": "yes"}, "stream"),
        ({"stop_sequences": "."}, "stop_sequences"),
        ({"stop_sequences": [""]}, "stop_sequences.0"),
        ({"tools": [{"name": "a"}]}, "tools.0.input_schema"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"thinking": {"type": "on"}}, "thinking.type"),
        ({"thinking": {"type": "enabled", "budget_tokens": 10}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking.budget_tokens"),  # not below max_tokens
        ({"output_config": {"effort": "huge"}}, "output_config.effort"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"mcp_servers": [{"name": "a"}]}, "mcp_servers"),
        ({"container": "c"}, "container"),
    ],
)
def test_a_fault_is_refused_by_its_path(fields: dict[str, Any], param: str) -> None:
    assert refused({**BODY, **fields}) == param


@given(bodies)
def test_any_body_is_translated_or_refused_and_never_changed(body: dict[str, Any]) -> None:
    before = copy.deepcopy(body)
    params = set[str | None]()
    try:
        chat_body(Operation.MESSAGES, body)
    except BadRequest as error:
        params.add(error.param)
    assert None not in params
    assert body == before


@pytest.mark.parametrize(
    ("of_chat", "of_client"),
    [
        ("messages.3.content.0: no image", "messages: no image"),
        ("`stop` may have 4 entries, it has 5", "`stop_sequences` may have 4 entries, it has 5"),
        ("tools.2.function.parameters.properties.a", "tools.2.input_schema.properties.a"),
        ("response_format.json_schema.schema.items", "output_config.format.schema.items"),
        ("it does not stop: why", "it does not stop: why"),
    ],
)
def test_errors_of_the_chat_have_the_client_s_names(of_chat: str, of_client: str) -> None:
    assert client_words(of_chat) == of_client
