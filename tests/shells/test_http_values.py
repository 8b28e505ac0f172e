"""Values that would harm an engine everybody shares are refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from serve_app.errors import BadRequest
from serve_app.http.body import decode
from serve_app.http.values import MAX_ENTRIES, check_shapes
from serve_app.settings import HttpSettings

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


HEAVY = {"type": "array", "minItems": 10**9}


@pytest.mark.parametrize(
    ("body", "path"),
    [
        ({"structured_outputs": {"json": HEAVY}}, "structured_outputs.json.minItems"),
        ({"structured_outputs": {"json": json.dumps(HEAVY)}}, "structured_outputs.json.minItems"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": HEAVY}}},
            "response_format.json_schema.schema.minItems",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": HEAVY}}}}]},
            "tools.0.function.parameters.properties.a.minItems",
        ),
        ({"text": {"format": {"type": "json_schema", "schema": HEAVY}}}, "text.format.schema.minItems"),
        ({"structured_outputs": {"json": {"minItems": 1e9}}}, "structured_outputs.json.minItems"),
    ],
)
def test_schemas_that_are_dear_to_build_are_refused_wherever_they_stand(body: dict[str, Any], path: str) -> None:
    with pytest.raises(BadRequest) as caught:
        check_shapes(body, BOUNDS.max_json_values)
    assert caught.value.param == path


@pytest.mark.parametrize("value", [None, 5, "text", {}, True])
def test_messages_that_are_no_array_are_refused_by_name(value: Any) -> None:
    with pytest.raises(BadRequest) as caught:
        check_shapes({"messages": value}, BOUNDS.max_json_values)
    assert caught.value.param == "messages"


@pytest.mark.parametrize("value", [5, "text", [], True])
def test_structured_outputs_that_are_no_object_are_refused_by_name(value: Any) -> None:
    with pytest.raises(BadRequest) as caught:
        check_shapes({"structured_outputs": value}, BOUNDS.max_json_values)
    assert caught.value.param == "structured_outputs"


@pytest.mark.parametrize("field", sorted(MAX_ENTRIES))
def test_lists_longer_than_their_bound_are_refused_by_name(field: str) -> None:
    most = MAX_ENTRIES[field]
    full: Any = {str(n): 1 for n in range(most)} if field == "logit_bias" else [str(n) for n in range(most)]
    check_shapes({field: full}, BOUNDS.max_json_values)
    more: Any = full | {"more": 1} if field == "logit_bias" else [*full, "more"]
    with pytest.raises(BadRequest, match=f"`{field}` may have {most} entries") as caught:
        check_shapes({field: more}, BOUNDS.max_json_values)
    assert caught.value.param == field


def test_a_schema_that_comes_as_text_has_the_bound_of_a_body() -> None:
    text = '{"enum":[' + "1," * BOUNDS.max_json_values + "1]}"
    with pytest.raises(BadRequest, match="values") as caught:
        check_shapes({"structured_outputs": {"json": text}}, BOUNDS.max_json_values)
    assert caught.value.param == "structured_outputs.json"


def test_ordinary_schemas_pass() -> None:
    schema = {"type": "array", "minItems": 3, "items": {"type": "string", "minLength": 1}}
    check_shapes(
        {"messages": [], "structured_outputs": {"json": schema}, "response_format": {"schema": schema}},
        BOUNDS.max_json_values,
    )
    check_shapes({"structured_outputs": None, "structured_outputs.json": "not json"}, BOUNDS.max_json_values)
    check_shapes({"structured_outputs": {"json": "{not json"}}, BOUNDS.max_json_values)
