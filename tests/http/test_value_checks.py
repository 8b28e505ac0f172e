"""Values that would harm an engine everybody shares are refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from serve_app.core.grammar_bounds import MAX_GRAMMAR_BYTES
from serve_app.errors import BadRequest
from serve_app.http.body import decode
from serve_app.http.contract import check_values
from serve_app.settings import HttpSettings
from serve_app.types import Operation

BOUNDS = HttpSettings()


@pytest.mark.parametrize(
    ("body", "path"),
    [
        ({"top_k": 2**70}, "top_k"),
        ({"seed": -(2**63) - 1}, "seed"),
        ({"logit_bias": {"5": 2**64}}, "logit_bias.5"),
        ({"stop_token_ids": [1, 2**64]}, "stop_token_ids.1"),
    ],
)
def test_integers_beyond_64_bits_are_refused_by_path(body: dict[str, Any], path: str) -> None:
    with pytest.raises(BadRequest) as caught:
        decode(json.dumps(body).encode(), BOUNDS)
    assert caught.value.param == path


def test_long_digits_in_text_and_integers_that_fit_are_welcome() -> None:
    body = {"prompt": "9" * 40, "seed": 2**63, "temperature": 1e30, "low": -(2**63)}
    assert decode(json.dumps(body).encode(), BOUNDS) == body


@pytest.mark.parametrize("value", [None, 5, "text", {}, True])
def test_messages_that_are_no_array_are_refused_by_name(value: Any) -> None:
    with pytest.raises(BadRequest) as caught:
        check_values(Operation.CHAT, {"messages": value})
    assert caught.value.param == "messages"


@pytest.mark.parametrize("operation", [Operation.RESPONSES, Operation.INPUT_TOKENS])
def test_a_reference_without_an_id_is_refused_where_it_is(operation: Operation) -> None:
    body = {"input": [{"role": "user", "content": "a"}, {"type": "item_reference", "id": 1}]}
    with pytest.raises(BadRequest) as caught:
        check_values(operation, body)
    assert caught.value.param == "input.1.id"


@pytest.mark.parametrize(
    ("operation", "body", "path"),
    [
        (Operation.CHAT, {"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            Operation.CHAT,
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
            "response_format.json_schema.schema",
        ),
        (
            Operation.COMPLETION,
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": None}}},
            "response_format.json_schema.schema",
        ),
        (Operation.RESPONSES, {"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
        (Operation.RESPONSES, {"text": {"format": {"type": "json_schema", "schema": None}}}, "text.format.schema"),
    ],
)
def test_a_format_without_its_schema_is_refused_by_path(operation: Operation, body: dict[str, Any], path: str) -> None:
    with pytest.raises(BadRequest) as caught:
        check_values(operation, body)
    assert caught.value.param == path
    assert caught.value.message == f"`{path}` is missing"


@pytest.mark.parametrize(
    "body",
    [
        {"response_format": {"type": "json_object"}, "text": {"format": {"type": "text"}}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}}},
        {"text": {"format": {"type": "json_schema", "name": "a", "schema": {}}}},
        {"response_format": {"type": "json_schema", "json_schema": 5}, "text": {"verbosity": "low"}},  # the engine's
    ],
)
def test_other_formats_are_the_engine_s_to_check(body: dict[str, Any]) -> None:
    check_values(Operation.CHAT, body)


@pytest.mark.parametrize("value", [5, "text", [], True])
def test_structured_outputs_that_are_no_object_are_refused_by_name(value: Any) -> None:
    with pytest.raises(BadRequest) as caught:
        check_values(Operation.CHAT, {"structured_outputs": value})
    assert caught.value.param == "structured_outputs"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("structured_outputs", {"choice": ["abcdefghijkl"] * 100_000}),
        ("structured_outputs", {"regex": "a" * MAX_GRAMMAR_BYTES}),
        ("structured_outputs", {"json": '{"enum":[' + "1," * 200_000 + "1]}"}),
        ("response_format", {"type": "json_schema", "json_schema": {"schema": {"enum": ["abcdefghijkl"] * 50_000}}}),
        ("text", {"format": {"type": "json_schema", "schema": {"enum": ["abcdefghijkl"] * 50_000}}}),
    ],
)
def test_a_grammar_no_engine_could_afford_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(BadRequest) as caught:
        check_values(Operation.CHAT, {field: value})
    assert (caught.value.param, caught.value.code) == (field, "grammar_too_complex")


def test_ordinary_schemas_pass() -> None:
    schema = {"type": "array", "minItems": 3, "items": {"type": "string", "minLength": 1}}
    check_values(
        Operation.CHAT,
        {"messages": [], "structured_outputs": {"json": schema}, "response_format": {"schema": schema}},
    )
    check_values(Operation.CHAT, {"structured_outputs": None, "structured_outputs.json": "not json"})
    check_values(Operation.CHAT, {"structured_outputs": {"json": "{not json"}})
