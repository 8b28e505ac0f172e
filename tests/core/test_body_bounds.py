"""Which prompts are refused before anything reads them: those that no model of that length could hold."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.core.body_bounds import (
    ENTRIES_PER_TOKEN,
    LARGE_OBJECTS,
    LARGE_TEXT_CHARS,
    MAX_TOKEN_BYTES,
    SPARE_BYTES,
    SPARE_ENTRIES,
    TOO_LONG,
    body_size,
    check_prompt,
    is_large,
)
from serve_app.errors import BadRequest
from serve_app.types import Operation

TOKENS = 512  # of the model
ENTRIES = ENTRIES_PER_TOKEN * TOKENS + SPARE_ENTRIES
TEXT = "x" * (MAX_TOKEN_BYTES * TOKENS + SPARE_BYTES)
MESSAGE = {"role": "user", "content": "a"}
PART = {"type": "text", "text": "a"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + TEXT}}

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
fields = st.sampled_from(["messages", "input", "prompt", "tools", "documents", "queries", "truncation", "tokens"])


def check(operation: Operation, body: dict[str, Any], max_model_len: int) -> None:
    check_prompt(operation, body, body_size(operation, body), max_model_len)


def has_media(body: dict[str, Any]) -> bool:
    return body_size(Operation.CHAT, body).has_media


@pytest.mark.parametrize(
    ("operation", "path", "value"),
    [
        (Operation.CHAT, "messages", [MESSAGE] * (ENTRIES + 1)),
        (Operation.CHAT, "messages", [{"role": "user", "content": [PART] * ENTRIES}]),
        (Operation.CHAT, "messages", [MESSAGE, {"role": "assistant", "tool_calls": [{}] * ENTRIES}]),
        (Operation.CHAT, "messages", [{"role": "user", "content": TEXT}]),
        (Operation.CHAT, "messages", [{"role": "user", "content": [{"type": "text", "text": TEXT}]}]),
        (Operation.CHAT, "tools", [{"type": "function", "function": {"name": "f", "description": TEXT}}]),
        (Operation.CHAT, "tools", [{"type": "function"}] * (ENTRIES + 1)),
        (Operation.CHAT, "documents", [{"text": TEXT}]),
        (Operation.CHAT, "chat_template_kwargs", {"system": TEXT + "x"}),
        (Operation.RESPONSES, "input", [{"role": "user", "content": ""}] * (ENTRIES + 1)),
        (Operation.RESPONSES, "input", [{"type": "reasoning", "summary": [{"text": ""}] * ENTRIES}]),
        (Operation.RESPONSES, "input", TEXT + "x"),
        (Operation.RESPONSES, "instructions", TEXT + "x"),
        (Operation.INPUT_TOKENS, "input", [{"role": "user", "content": ""}] * (ENTRIES + 1)),
        (Operation.COMPLETION, "prompt", "é" * (len(TEXT) // 2 + 1)),
        (Operation.COMPLETION, "prompt.1", ["a", TEXT + "x"]),
        (Operation.COMPLETION, "prompt", [1] * (TOKENS + SPARE_ENTRIES + 1)),
        (Operation.COMPLETION, "prompt.1", [[1], [1] * (TOKENS + SPARE_ENTRIES + 1)]),
        (Operation.EMBEDDING, "input.1", ["a", TEXT + "x"]),
        (Operation.EMBEDDING, "messages.0", [[MESSAGE] * (ENTRIES + 1)]),
        (Operation.RERANK, "documents.1", ["a", TEXT + "x"]),
        (Operation.TOKENIZE, "prompt", TEXT + "x"),
        (Operation.TOKENIZE, "messages", [MESSAGE] * (ENTRIES + 1)),
        (Operation.DETOKENIZE, "tokens", [1] * (TOKENS + SPARE_ENTRIES + 1)),
        # a name of a medium is text where no content part of this type has it
        (Operation.CHAT, "chat_template_kwargs", {"image_url": TEXT}),
        (Operation.CHAT, "tools", [{"function": {"parameters": {"type": "image_url", "image_url": TEXT}}}]),
        (Operation.CHAT, "messages", [{"role": "user", "content": [{**PART, "image_url": TEXT}]}]),
        (Operation.CHAT, "messages", [{"role": "user", "content": [{**PART, "file_data": TEXT}]}]),
        (Operation.CHAT, "messages", [{"role": "user", "content": "a", "x": [{"image_url": TEXT}]}]),
        (Operation.CHAT, "tools", [{"function": {"parameters": {"properties": {TEXT: 1}}}}]),
    ],
)
def test_a_prompt_that_no_model_of_this_length_holds_is_refused_by_path(
    operation: Operation, path: str, value: Any
) -> None:
    field = path.split(".")[0]
    with pytest.raises(BadRequest) as caught:
        check(operation, {"model": "tiny", field: value}, TOKENS)
    assert (caught.value.param, caught.value.code) == (path, TOO_LONG)
    assert str(TOKENS) in caught.value.message
    check(operation, {"model": "tiny", field: value}, 2**63 - 1)  # no engine has reported its length yet


@pytest.mark.parametrize(
    ("operation", "body"),
    [
        (Operation.CHAT, {"messages": [MESSAGE] * TOKENS}),
        (Operation.CHAT, {"messages": [{"role": "user", "content": [PART]}] * TOKENS}),
        (Operation.CHAT, {"messages": [{"role": "user", "content": ""}] * SPARE_ENTRIES}),
        (Operation.CHAT, {"messages": [{"role": "user", "content": [IMAGE, PART]}]}),
        (Operation.RESPONSES, {"input": [{"type": "reasoning", "summary": [], "encrypted_content": TEXT * 2}]}),
        (Operation.COMPLETION, {"prompt": " " * (MAX_TOKEN_BYTES * TOKENS)}),
        (Operation.COMPLETION, {"prompt": [TEXT] * 4}),
        (Operation.COMPLETION, {"prompt": TEXT * 2, "truncate_prompt_tokens": -1}),
        (Operation.COMPLETION, {"prompt": [1] * 2 * TOKENS, "truncate_prompt_tokens": 10}),
        (Operation.RESPONSES, {"input": TEXT * 2, "truncation": "auto"}),
        (Operation.RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": TEXT}]}]}),
        (Operation.RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_file", "file_data": TEXT}]}]}),
        (Operation.RESPONSES, {"input": [{"type": "function_call_output", "output": [{"image_url": TEXT}]}]}),
        (Operation.SCORE, {"data_1": {"content": [IMAGE]}, "data_2": [{"content": [IMAGE, PART]}]}),
        (Operation.RERANK, {"query": "a", "documents": [TEXT * 2], "max_tokens_per_doc": 8}),
        (Operation.EMBEDDING, {"input": [TEXT] * 4}),
        (Operation.EMBEDDING, {"input": ["a"] * (ENTRIES + 1)}),  # the bound of inputs is another one
        (Operation.RERANK, {"query": "a", "documents": [TEXT] * 4, "truncate_prompt_tokens": 8}),
        (Operation.CHAT, {"messages": [MESSAGE], "metadata": {"a": TEXT * 2}}),  # nothing reads it
    ],
)
def test_a_prompt_that_may_fit_passes(operation: Operation, body: dict[str, Any]) -> None:
    check(operation, body, TOKENS)


@pytest.mark.parametrize(
    ("operation", "field", "body"),
    [
        (Operation.CHAT, "messages", {"max_tokens_per_doc": 1}),
        (Operation.CHAT, "messages", {"truncation": "auto"}),
        (Operation.COMPLETION, "prompt", {"truncation": "auto"}),
        (Operation.RESPONSES, "input", {"truncate_prompt_tokens": 1}),
        (Operation.TOKENIZE, "prompt", {"truncate_prompt_tokens": 1}),
        (Operation.EMBEDDING, "input", {"max_tokens_per_query": 1}),
        (Operation.RERANK, "documents", {"max_tokens_per_query": 1}),
        (Operation.RERANK, "documents", {"max_tokens_per_doc": 0}),
    ],
)
def test_only_what_truncates_this_prompt_removes_its_bound(
    operation: Operation, field: str, body: dict[str, Any]
) -> None:
    value: Any = [{"role": "user", "content": TEXT}] if field == "messages" else TEXT + "x"
    with pytest.raises(BadRequest) as caught:
        check(operation, {field: value, **body}, TOKENS)
    assert caught.value.param == field


@given(st.sampled_from(list(Operation)), st.dictionaries(fields, json_values, max_size=4))
def test_a_body_of_any_shape_is_scanned_and_a_small_one_passes(operation: Operation, body: dict[str, Any]) -> None:
    check(operation, body, 1)
    assert not body_size(operation, body).is_large()
    assert not has_media(body)


@pytest.mark.parametrize(
    ("operation", "body", "large"),
    [
        (Operation.CHAT, {"messages": [MESSAGE] * 400}, False),
        (Operation.CHAT, {"messages": [MESSAGE] * (LARGE_OBJECTS + 1)}, True),
        (Operation.RESPONSES, {"input": [MESSAGE] * 400}, True),  # an item costs twice as much
        (Operation.CHAT, {"messages": [{"role": "user", "content": [PART] * LARGE_OBJECTS}]}, True),
        (Operation.CHAT, {"messages": [MESSAGE], "tools": [{"a": {}}] * LARGE_OBJECTS}, True),
        (Operation.COMPLETION, {"prompt": "a" * (LARGE_TEXT_CHARS - 16)}, False),
        (Operation.COMPLETION, {"prompt": "a" * (LARGE_TEXT_CHARS + 1)}, True),
        (Operation.COMPLETION, {"prompt": [1] * 100_000}, False),
        (Operation.COMPLETION, {"prompt": [1] * 200_000}, True),
        (Operation.TOKENIZE, {"prompt": ["a" * 1000] * 100}, True),
        (Operation.CHAT, {"messages": [{"role": "user", "content": ["a"] * 1_000}]}, False),
        (Operation.CHAT, {"messages": [{"role": "user", "content": ["a"] * 5_000}]}, True),
        (Operation.CHAT, {"messages": [{"role": "user", "content": [None] * 5_000}]}, True),
        (Operation.CHAT, {"messages": [MESSAGE], "chat_template_kwargs": {"a" * LARGE_TEXT_CHARS: 1}}, True),
        (Operation.CHAT, {"messages": [MESSAGE], "chat_template_kwargs": {"image_url": TEXT}}, True),
        (Operation.CHAT, {"messages": [{"role": "user", "content": [IMAGE]}], "stream": True}, False),
        (Operation.RESPONSES, {"input": [{"type": "reasoning", "summary": [], "encrypted_content": TEXT}]}, False),
    ],
)
def test_a_body_is_large_by_its_objects_and_its_text(operation: Operation, body: dict[str, Any], large: bool) -> None:
    assert body_size(operation, {"model": "tiny", **body}).is_large() is large


def test_a_body_is_large_many_times_by_as_many_objects() -> None:
    body = {"messages": [MESSAGE] * (LARGE_OBJECTS * 3)}
    assert body_size(Operation.CHAT, body).is_large(2)
    assert not body_size(Operation.CHAT, body).is_large(4)


def test_media_are_found_in_content_parts_alone() -> None:
    assert has_media({"messages": [MESSAGE, {"role": "user", "content": [PART, IMAGE]}]})
    assert has_media({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]})
    assert has_media({"input": [{"type": "function_call_output", "output": [{"image_url": "x"}]}]})
    assert has_media({"documents": [{"content": [IMAGE]}]})
    assert has_media({"messages": [[{"role": "user", "content": [IMAGE]}]]})
    assert not has_media({"messages": [MESSAGE], "tools": [{"type": "function"}]})
    assert not has_media({"messages": [MESSAGE], "chat_template_kwargs": {"image_url": 1}})
    assert not has_media({"messages": [MESSAGE], "metadata": {"content": [IMAGE]}})
    assert not has_media({"messages": [{"role": "user", "content": [{**PART, "image_url": 1}]}]})


@pytest.mark.parametrize("count", [1, 511, 512, 513, 20_000])
@pytest.mark.parametrize(
    ("operation", "field"),
    [(Operation.CHAT, "messages"), (Operation.RESPONSES, "input"), (Operation.EMBEDDING, "messages")],
)
def test_a_look_that_stops_early_finds_what_a_whole_one_does(operation: Operation, field: str, count: int) -> None:
    for entry in ({"role": "user", "content": "a"}, [1, 2], "a", 7):
        body = {"model": "tiny", field: [entry] * count}
        assert is_large(operation, body) is body_size(operation, body).is_large()
