"""How big a request is told to be: slots, bytes, tokens, and the key of its prefix."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.core.body_bounds import BYTES_PER_TOKEN
from serve_app.core.score_inputs import INPUT_FIELDS, score_inputs
from serve_app.errors import BadRequest
from serve_app.http import request_size
from serve_app.settings import HttpSettings
from serve_app.types import Operation

BOUNDS = HttpSettings(max_sequences=8)
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
messages = st.lists(
    st.fixed_dictionaries(
        {}, optional={"role": json_values, "content": json_values, "tool_calls": json_values, "text": json_values}
    ),
    max_size=3,
)
score_fields = ["queries", "documents", "text_1", "text_2", "query"]
field_names = st.sampled_from(
    ["n", "prompt", "input", "messages", "instructions", "tools", "max_tokens", "max_output_tokens", *score_fields]
)
bodies = st.dictionaries(field_names, json_values | messages | st.lists(messages, max_size=2), max_size=6)
operations = st.sampled_from(list(Operation))


def count(operation: Operation, body: dict[str, Any]) -> int:
    """Its sequences."""
    if operation.is_scoring:
        return request_size.text_count(score_inputs(operation, body), BOUNDS)
    return request_size.sequence_count(operation, body, BOUNDS)


@pytest.mark.parametrize(
    ("operation", "body", "expected"),
    [
        (Operation.CHAT, {}, 1),
        (Operation.CHAT, {"n": None}, 1),
        (Operation.CHAT, {"n": 8}, 8),
        (Operation.COMPLETION, {"prompt": "x"}, 1),
        (Operation.COMPLETION, {"prompt": ["a", "b"], "n": 3}, 6),
        (Operation.COMPLETION, {"prompt": [1, 2, 3], "n": 2}, 2),
        (Operation.COMPLETION, {"prompt": [[1], [2, 3]]}, 2),
        (Operation.RESPONSES, {"input": "x", "n": 99}, 1),
        (Operation.EMBEDDING, {"input": ["a"] * 8, "n": 99}, 8),
        (Operation.EMBEDDING, {"input": [1] * 99}, 1),
        (Operation.EMBEDDING, {"messages": [{"role": "user", "content": "x"}] * 99}, 1),
        (Operation.EMBEDDING, {"input": 5, "messages": [[{"role": "user", "content": "x"}]] * 3}, 3),
        (Operation.SCORE, {"queries": "a", "documents": ["b"] * 99, "n": 9}, 100),
        (Operation.SCORE, {"text_1": ["a"] * 9, "text_2": ["b"] * 9}, 18),
        (Operation.SCORE, {"data_1": {"content": []}, "data_2": "b", "items": None}, 2),
        (Operation.RERANK, {"query": "a", "documents": "b", "queries": 5}, 2),
        (Operation.TOKENIZE, {"prompt": ["a"] * 99}, 0),
        (Operation.DETOKENIZE, {"tokens": [1] * 99}, 0),
    ],
)
def test_slots_are_n_times_prompts(operation: Operation, body: dict[str, Any], expected: int) -> None:
    assert count(operation, body) == expected


@pytest.mark.parametrize(
    ("operation", "body", "field"),
    [
        (Operation.CHAT, {"n": 9}, "n"),
        (Operation.CHAT, {"n": 10**4000}, "n"),
        (Operation.CHAT, {"n": 0}, "n"),
        (Operation.CHAT, {"n": -1}, "n"),
        (Operation.CHAT, {"n": True}, "n"),
        (Operation.CHAT, {"n": 2.0}, "n"),
        (Operation.CHAT, {"n": "2"}, "n"),
        (Operation.COMPLETION, {"prompt": ["a"] * 9}, "prompt"),
        (Operation.COMPLETION, {"prompt": [[1]] * 9}, "prompt"),
        (Operation.COMPLETION, {"prompt": ["a"] * 3, "n": 3}, "n"),
        (Operation.COMPLETION, {"prompt": []}, "prompt"),
        (Operation.EMBEDDING, {"input": ["a"] * 2049}, "input"),
        (Operation.EMBEDDING, {"input": "x", "messages": [[{}]] * 2049}, "messages"),
        (Operation.SCORE, {"queries": "a", "documents": ["b"] * 2048}, "documents"),
        (Operation.SCORE, {"text_1": ["a"] * 1025, "text_2": ["b"] * 1025}, "text_2"),
        (Operation.RERANK, {"query": "a", "documents": ["b"] * 2048}, "documents"),
        (Operation.RERANK, {"query": "a", "documents": []}, "documents"),
    ],
)
def test_more_sequences_than_allowed_are_refused_by_name(
    operation: Operation, body: dict[str, Any], field: str
) -> None:
    with pytest.raises(BadRequest) as caught:
        count(operation, body)
    assert caught.value.param == field
    assert len(caught.value.message) < 200


@given(operations, bodies)
def test_sizes_of_any_body_are_reported_without_an_error(operation: Operation, body: dict[str, Any]) -> None:
    assert request_size.prompt_bytes(operation, body) >= 0
    assert len(request_size.prefix_key(operation, body)) in (0, 32)
    try:
        assert 0 <= count(operation, body) <= BOUNDS.max_sequences
    except BadRequest as error:
        scores = {name for names in INPUT_FIELDS.values() for name in names}
        assert error.param is not None  # noqa: PT017
        assert error.param.split(".")[0] in {"n", "prompt", "input", "messages", *scores}  # noqa: PT017


@given(st.text(st.characters(exclude_categories=("Cs",)), max_size=50), st.text(max_size=20))
def test_text_counts_in_bytes_however_the_prompt_is_written(text: str, other: str) -> None:
    size = len(text.encode())
    parts = [{"type": "text", "text": text}, {"type": "image_url", "image_url": {"url": "data:" + "A" * 1000}}]
    plain, split_up = ({"messages": [{"role": "user", "content": content}]} for content in (text, parts))
    medium = request_size.MEDIA_TOKENS * BYTES_PER_TOKEN
    plain_size = request_size.prompt_bytes(Operation.CHAT, plain)
    assert request_size.prompt_bytes(Operation.CHAT, split_up) == plain_size + medium
    assert (
        request_size.prompt_bytes(Operation.CHAT, plain) - request_size.prompt_bytes(Operation.CHAT, BODY) == size - 2
    )
    assert request_size.prompt_bytes(Operation.COMPLETION, {"prompt": text}) == size
    assert request_size.prompt_bytes(Operation.COMPLETION, {"prompt": [text, text]}) == 2 * size
    assert request_size.prompt_bytes(Operation.EMBEDDING, {"input": text}) == size
    assert request_size.prompt_bytes(Operation.RESPONSES, {"input": text, "instructions": text}) == 2 * size
    pairs = {"text_1": text, "text_2": [text, text]}
    assert request_size.prompt_bytes(Operation.SCORE, pairs) == 3 * size  # each text is embedded once
    shown = {"query": {"content": parts}, "documents": [text, {"content": parts}]}
    shown_size = 3 * size + 2 * request_size.MESSAGE_BYTES + 2 * medium
    assert request_size.prompt_bytes(Operation.RERANK, shown) == shown_size


def test_tools_and_tool_calls_count_and_token_ids_count_as_four_bytes() -> None:
    reasoning = {"type": "reasoning", "summary": [], "encrypted_content": "x" * 10_000}
    assert request_size.prompt_bytes(Operation.RESPONSES, {"input": [reasoning]}) == request_size.MESSAGE_BYTES
    bare = request_size.prompt_bytes(Operation.CHAT, BODY)
    assert request_size.prompt_bytes(Operation.CHAT, {**BODY, "tools": [{"a": 1}]}) == bare + len('[{"a":1}]')
    called = {"messages": [*BODY["messages"], {"role": "assistant", "tool_calls": [{"id": "c"}]}]}
    assert request_size.prompt_bytes(Operation.CHAT, called) > bare + len('[{"id":"c"}]')
    assert request_size.prompt_bytes(Operation.COMPLETION, {"prompt": [1, 2, 3]}) == 12
    assert request_size.prompt_bytes(Operation.COMPLETION, {"prompt": [[1, 2, 3], [4]]}) == 16


LONG_TEXT = "x" * 400_000


@pytest.mark.parametrize(
    ("operation", "more"),
    [
        (Operation.CHAT, {"documents": [{"title": "t", "text": LONG_TEXT}]}),
        (Operation.CHAT, {"chat_template_kwargs": {"notes": [LONG_TEXT]}}),
        (Operation.CHAT, {"tools": [{"function": {"description": LONG_TEXT}}]}),
        (Operation.CHAT, {"messages": [{"role": "user", "content": "hi", "anything": {"deep": [LONG_TEXT]}}]}),
        (Operation.CHAT, {"messages": [{"role": "assistant", "reasoning_content": LONG_TEXT}]}),
        (Operation.CHAT, {"messages": [{"role": "user", "content": [{"type": "refusal", "refusal": LONG_TEXT}]}]}),
        (Operation.CHAT, {"messages": [{"role": "tool", "content": [{"content": [{"text": LONG_TEXT}]}]}]}),
        (Operation.RESPONSES, {"input": [{"type": "function_call_output", "output": [{"text": LONG_TEXT}]}]}),
        (Operation.RESPONSES, {"input": [{"type": "reasoning", "summary": [{"text": LONG_TEXT}]}]}),
        (Operation.EMBEDDING, {"input": "x", "chat_template_kwargs": {"notes": LONG_TEXT}}),
        (Operation.RERANK, {"query": "x", "documents": ["y"], "instruction": LONG_TEXT}),
        (Operation.DETOKENIZE, {"tokens": [1] * 100_000}),
        (Operation.CHAT, {"messages": [{"role": "user", "content": [{"image_url": {"url": "u"}}] * 100}]}),
    ],
)
def test_all_that_may_reach_the_model_s_input_counts(operation: Operation, more: dict[str, Any]) -> None:
    size = request_size.prompt_bytes(operation, {**BODY, **more})
    assert 400_000 <= size <= 440_000


def test_a_medium_counts_as_a_fixed_number_of_tokens_however_long_it_is() -> None:
    part = {"type": "input_audio", "input_audio": {"data": LONG_TEXT}}
    sizes = [
        request_size.prompt_bytes(Operation.CHAT, {"messages": [{"role": "user", "content": [part] * count}]})
        for count in (0, 1, 9)
    ]
    medium = request_size.MEDIA_TOKENS * BYTES_PER_TOKEN
    assert [size - sizes[0] for size in sizes] == [0, medium, 9 * medium]


def test_every_medium_of_vllm_s_content_parts_is_known() -> None:
    parts = set(pytest.importorskip("vllm.renderers.chat_utils").MM_PARSER_MAP)
    texts = {"text", "thinking", "input_text", "output_text", "refusal", "tool_reference"}
    assert parts - texts <= set(request_size.MEDIA_FIELDS)


def test_what_never_reaches_the_model_s_input_counts_as_nothing() -> None:
    schema = {"type": "json_schema", "json_schema": {"description": LONG_TEXT}}
    more = {"response_format": schema, "metadata": {"note": LONG_TEXT}, "stop": [LONG_TEXT], "user": LONG_TEXT}
    bare = request_size.prompt_bytes(Operation.CHAT, BODY)
    assert request_size.prompt_bytes(Operation.CHAT, {**BODY, **more, "temperature": 0.5, "stream": True}) == bare


@pytest.mark.parametrize(
    ("body", "bound"),
    [
        ({}, None),
        ({"max_tokens": 7, "n": 3}, 7),
        ({"max_tokens": 7, "max_completion_tokens": 5}, 5),
        ({"max_tokens": -7}, 0),
        ({"max_tokens": "7"}, None),
    ],
)
def test_the_client_s_bound_is_the_first_that_is_a_number(body: dict[str, Any], bound: int | None) -> None:
    assert request_size.output_bound(body) == bound


def turns(*contents: Any, system: str = "S") -> dict[str, Any]:
    roles = ["user", "assistant"] * len(contents)
    tail = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]
    return {"messages": [{"role": "system", "content": system}, *tail]}


def key_of(body: dict[str, Any], operation: Operation = Operation.CHAT) -> str:
    return request_size.prefix_key(operation, body)


def test_a_conversation_keeps_its_key_from_turn_to_turn_and_no_other_has_it() -> None:
    first = key_of(turns("a"))
    assert first == key_of(turns("a", "b", "c")) == key_of(turns([{"type": "text", "text": "a"}]))
    assert (
        len(
            {
                first,
                key_of(turns("b")),
                key_of(turns("a", system="T")),
                key_of({"messages": turns("a")["messages"][1:]}),
            }
        )
        == 4
    )


def test_only_the_beginning_of_a_long_prompt_makes_its_key() -> None:
    long = "x" * 5000
    assert key_of({"prompt": long + "a"}, Operation.COMPLETION) == key_of(
        {"prompt": [long + "b"]}, Operation.COMPLETION
    )
    assert key_of({"prompt": "a" + long}, Operation.COMPLETION) != key_of({"prompt": "b" + long}, Operation.COMPLETION)
    ids = list(range(5000))
    assert key_of({"prompt": [*ids, 1]}, Operation.COMPLETION) == key_of({"prompt": [ids, [2]]}, Operation.COMPLETION)
    assert key_of(turns(long + "a")) == key_of(turns([{"text": long}, {"text": "b"}]))


def test_responses_have_a_key_of_instructions_and_input() -> None:
    bodies = [{"input": "a"}, {"input": "b"}, {"input": "a", "instructions": "i"}]
    assert len({key_of(body, Operation.RESPONSES) for body in bodies}) == 3


@pytest.mark.parametrize("operation", [Operation.EMBEDDING, Operation.SCORE, Operation.TOKENIZE])
def test_what_has_no_prefix_to_reuse_has_no_key(operation: Operation) -> None:
    assert key_of({"input": "x", "prompt": "x", **BODY}, operation) == ""
    assert key_of({}) == ""
