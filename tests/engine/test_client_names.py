"""Errors name the field as the client sent it, not as vLLM calls it."""

from __future__ import annotations

from typing import Any

import pytest

from serve_app.engine.client_names import field_path, in_client_words

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
    assert field_path(location, BODY, is_missing=is_missing) == path


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
            ("the prompt is too long", "documents"),
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
    ],
)
def test_a_field_has_the_client_s_name(
    message: str, param: str | None, body: dict[str, Any], expected: tuple[str, str | None]
) -> None:
    assert in_client_words(message, param, body) == expected
