"""Errors name the field as the client sent it, not as vLLM calls it."""

from __future__ import annotations

from typing import Any

import pytest

from serve_app.engine.client_names import MAX_SEARCHED, field_path, grammar_field, in_client_words

BODY: dict[str, Any] = {
    "messages": [{"role": "user", "content": 3}],
    "response_format": {"type": "bogus"},
    "input": 3,
    "max_output_tokens": 0,
    "stop": [""],
}


@pytest.mark.parametrize(
    ("location", "is_missing", "path"),
    [
        (("messages", 0, "ChatCompletionDeveloperMessageParam", "content", "str"), False, "messages.0.content"),
        (("messages", 0, "ChatCompletionDeveloperMessageParam", "name"), True, "messages.0.name"),
        (("response_format", "function-wrap[f()]", "type"), False, "response_format.type"),
        (("input", "list[constrained-int]", 0), False, "input"),
        (("messages", 7, "x"), False, "messages"),
        (("tools",), True, "tools"),
        ((), False, None),
    ],
)
def test_a_path_has_no_names_of_vllm_s_classes(
    location: tuple[str | int, ...], is_missing: bool, path: str | None
) -> None:
    assert field_path(location, None, BODY, is_missing=is_missing) == path


PARTS: list[Any] = [{"type": "text", "text": "a"}, {"type": "image", "url": {}}, "b"]


@pytest.mark.parametrize(
    ("location", "value", "is_missing", "path"),
    [
        (("url", "address"), {}, True, "messages.1.content.1.url.address"),
        (("detail",), PARTS[1], True, "messages.1.content.1.detail"),
        ((2, "ImageParam"), "b", False, "messages.1.content.2"),
        (("messages", 0, "content"), 3, False, "messages.0.content"),
        (("detail",), {"type": "video"}, True, "detail"),
    ],
)
def test_an_error_of_a_part_that_was_read_by_itself_names_its_place_in_the_body(
    location: tuple[str | int, ...], value: Any, is_missing: bool, path: str
) -> None:
    body = {"messages": [{"role": "user", "content": 3}, {"role": "user", "content": PARTS}]}
    assert field_path(location, value, body, is_missing=is_missing) == path


@pytest.mark.parametrize(
    ("message", "param", "body", "expected"),
    [
        (
            "max_tokens must be at least 1, got 0. (parameter=max_tokens, value=0)",
            "max_tokens",
            {"max_output_tokens": 0},
            ("max_output_tokens must be at least 1, got 0.", "max_output_tokens"),
        ),
        ("max_tokens is wrong", "max_tokens", {"max_tokens": 0}, ("max_tokens is wrong", "max_tokens")),
        (
            "too many logprobs",
            "logprobs",
            {"logprobs": True, "top_logprobs": 9},
            ("too many top_logprobs", "top_logprobs"),
        ),
        (
            "stop cannot contain an empty string.",
            None,
            {"stop": [""]},
            ("stop cannot contain an empty string.", "stop"),
        ),
        (
            "Model 'm' does not support Matryoshka embeddings; dimensions must be unset (received dimensions=8).",
            None,
            {"input": "a", "dimensions": 8},
            (
                "Model 'm' does not support Matryoshka embeddings; dimensions must be unset (received dimensions=8).",
                "dimensions",
            ),
        ),
        ("the prompt is too long", "input_tokens", {"input": "x"}, ("the prompt is too long", "input")),
        (
            "the prompt is too long",
            "input_tokens",
            {"query": "xx", "documents": ["y", "yyy"]},
            ("the prompt is too long", "documents.1"),
        ),
        ("too long", "input_tokens", {"text_1": "xx", "text_2": ["y"]}, ("too long", "text_1")),
        ("too long", "input_tokens", {"messages": [{"a": 1}], "documents": [{"b": 2}]}, ("too long", "messages")),
        (
            "n must be 1 when using greedy sampling, got 2.",
            None,
            {"n": 2, "temperature": 0},
            ("n must be 1 when using greedy sampling, got 2.", "n"),
        ),
        ("no field at all", None, {"stop": [""]}, ("no field at all", None)),
        (
            "your prompt contains 9 characters (parameter=input_text, value=9)",
            "input_text",
            {"prompt": ["a", "b " * 9]},
            ("your prompt contains 9 characters", "prompt.1"),
        ),
        ("too long", "input_text", {"messages": [{"role": "user"}], "user": "a" * 99}, ("too long", "messages")),
        ("too long", "input_tokens", {"prompt": [[1], [1, 2, 3], [2]]}, ("too long", "prompt.1")),
        ("too long", "input_tokens", {"prompt": [1, 2, 3]}, ("too long", "prompt")),
        (
            "Unsupported chat content part type: 'a'. (parameter=type, value=a)",
            "type",
            {"tools": [{"type": "b"}], "messages": [{"content": "c"}, {"content": [{"type": "d"}, {"type": "a"}]}]},
            (
                "messages.1.content.1.type: Unsupported chat content part type: 'a'.",
                "messages.1.content.1.type",
            ),
        ),
        (
            "assistant tool_calls entries must be objects. (parameter=tool_calls)",
            "tool_calls",
            {"messages": [{"role": "user"}, {"role": "assistant", "tool_calls": [5]}]},
            ("messages.1.tool_calls: assistant tool_calls entries must be objects.", "messages.1.tool_calls"),
        ),
        (
            "Unsupported input item type: photo (parameter=input)",
            "input",
            {"input": [{"role": "user"}, {"type": "photo"}]},
            ("input.1.type: Unsupported input item type: photo", "input.1.type"),
        ),
        (
            "Unsupported input_type 'poem'. Supported values: query",
            None,
            {"texts": ["a"], "input_type": "poem"},
            ("input_type: Unsupported input_type 'poem'. Supported values: query", "input_type"),
        ),
        (
            "Input of 9 tokens exceeds max_tokens=8 with truncate=NONE.",
            None,
            {"texts": ["a"], "max_tokens": 8},
            ("max_tokens: Input of 9 tokens exceeds max_tokens=8 with truncate=NONE.", "max_tokens"),
        ),
        (
            "Encrypted content is not supported. (parameter=input)",
            "input",
            {"input": [{"type": "reasoning"}, {"type": "reasoning", "encrypted_content": "a"}]},
            ("input.1.encrypted_content: Encrypted content is not supported.", "input.1.encrypted_content"),
        ),
        (
            "The decoder prompt cannot be empty",
            None,
            {"prompt": [""]},
            ("prompt.0: The decoder prompt cannot be empty", "prompt.0"),
        ),
        (
            "The decoder prompt cannot be empty",
            None,
            {"prompt": []},
            ("prompt: The decoder prompt cannot be empty", "prompt"),
        ),
        (
            "Token id 99 is out of vocabulary",
            None,
            {"prompt": [[1], [2, 99]]},
            ("prompt.1.1: Token id 99 is out of vocabulary", "prompt.1.1"),
        ),
        (
            "Token id -1 is out of vocabulary (parameter=tokens)",
            "tokens",
            {"tokens": [3, -1]},
            ("tokens.1: Token id -1 is out of vocabulary", "tokens.1"),
        ),
        (
            "At most 0 image(s) may be provided in one prompt.",
            None,
            {"messages": [{"content": [{"type": "text"}, {"type": "image_url", "image_url": {"url": "a"}}]}]},
            ("messages.0.content.1: At most 0 image(s) may be provided in one prompt.", "messages.0.content.1"),
        ),
        (
            "You must use one kind of structured outputs constraint but none are specified: {'json': None, 'a': None}",
            None,
            {"messages": [], "structured_outputs": {}},
            (
                "structured_outputs: You must use one kind of structured outputs constraint but none are specified",
                "structured_outputs",
            ),
        ),
        (
            "You can only use one kind of constraints for structured outputs ('json', 'regex' or 'choice').",
            None,
            {"structured_outputs": {"regex": "a", "choice": ["a"]}},
            (
                "structured_outputs: You can only use one kind of constraints for structured outputs"
                " ('json', 'regex' or 'choice').",
                "structured_outputs",
            ),
        ),
        (
            "Cannot set both `continue_final_message` and `add_generation_prompt` to True.",
            None,
            {"add_generation_prompt": True, "continue_final_message": True},
            (
                "Cannot set both `continue_final_message` and `add_generation_prompt` to True.",
                "continue_final_message",
            ),
        ),
        (
            "logprobs: not a boolean",
            "logprobs",
            {"logprobs": 5, "top_logprobs": 1},
            ("logprobs: not a boolean", "logprobs"),
        ),
        (
            "MultiModalParam is not supported for M",
            None,
            {"text_1": "a", "text_2": ["b", {"content": [{"type": "text", "text": "c"}]}]},
            ("text_2.1: MultiModalParam is not supported for M", "text_2.1"),
        ),
        ("roles must alternate", "messages", {"messages": []}, ("messages: roles must alternate", "messages")),
        ("only user messages", "messages", {"input": []}, ("input: only user messages", "input")),
        ("is wrong (parameter=made_up)", "made_up", {"prompt": "a"}, ("is wrong", "made_up")),
    ],
)
def test_a_field_has_the_client_s_name(
    message: str, param: str | None, body: dict[str, Any], expected: tuple[str, str | None]
) -> None:
    assert in_client_words(message, param, body) == expected


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"structured_outputs": {"regex": "[", "json": None}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "a", "whitespace_pattern": "b"}}, "structured_outputs"),
        ({"structured_outputs": {}, "tools": [{}]}, "tools"),
        ({"messages": []}, None),
    ],
)
def test_what_becomes_a_grammar_has_a_path(body: dict[str, Any], field: str | None) -> None:
    assert grammar_field(body) == field


def test_a_place_is_searched_for_no_longer_than_other_requests_can_wait() -> None:
    part = {"content": [{"type": "a"}]}
    body = {"messages": [{"content": "b"}] * MAX_SEARCHED + [part]}
    message = "Unsupported chat content part type: 'a'."
    assert in_client_words(message, "type", body) == (message, "type")
    assert in_client_words(message, "type", {"messages": [part]})[1] == "messages.0.content.0.type"
