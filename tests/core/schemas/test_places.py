"""Which schemas of a request must be enforced: those of formats, of strict tools, and of demanded ones."""

from __future__ import annotations

import json
from typing import Any

import pytest

from serve_app.core.schemas import with_enforced_schemas
from serve_app.errors import BadRequest

WRONG = {"type": "object", "properties": {"n": {"type": "integer", "multipleOf": 1000}}}


def chat_tool(**more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": WRONG, **more}}


def tool(**more: Any) -> dict[str, Any]:
    return {"type": "function", "name": "f", "parameters": WRONG, **more}


NAMED = {"type": "function", "function": {"name": "f"}}
TAG = {"type": "json_schema", "json_schema": WRONG}

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": WRONG}}},
     "response_format.json_schema.schema"),
    ({"text": {"format": {"type": "json_schema", "name": "x", "schema": WRONG}}}, "text.format.schema"),
    ({"structured_outputs": {"json": WRONG}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": json.dumps(WRONG)}}, "structured_outputs.json"),
    ({"structured_outputs": {"structural_tag": json.dumps({"type": "structural_tag", "format": TAG})}},
     "structured_outputs.structural_tag.format.json_schema"),
    ({"response_format": {"type": "structural_tag", "structures": [{"begin": "<", "schema": WRONG, "end": ">"}]}},
     "response_format.structures.0.schema"),
    ({"tools": [chat_tool()], "tool_choice": "required"}, "tools.0.function.parameters"),
    ({"tools": [chat_tool(name="g", parameters={}), chat_tool()], "tool_choice": NAMED}, "tools.1.function.parameters"),
    ({"tools": [chat_tool(strict=True)]}, "tools.0.function.parameters"),
    ({"tools": [tool()], "tool_choice": "required"}, "tools.0.parameters"),
    ({"tools": [{"function": chat_tool()["function"]}], "tool_choice": "required"}, "tools.0.function.parameters"),
    ({"tools": [{**chat_tool(), "type": None}], "tool_choice": "required"}, "tools.0.function.parameters"),
    ({"tools": [tool()], "tool_choice": {"type": "function", "name": "f"}}, "tools.0.parameters"),
    ({"tools": [{"type": "namespace", "name": "n", "tools": [tool()]}], "tool_choice": "required"},
     "tools.0.tools.0.parameters"),
    ({"tools": [tool()], "tool_choice": {"type": "allowed_tools", "mode": "required",
                                         "tools": [{"type": "function", "name": "f"}]}}, "tools.0.parameters"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "path"), REFUSED, ids=range(len(REFUSED)))
def test_a_schema_is_refused_wherever_an_answer_must_satisfy_it(body: dict[str, Any], path: str) -> None:
    with pytest.raises(BadRequest) as caught:
        with_enforced_schemas(body, tool_strict=True)
    assert caught.value.param == f"{path}.properties.n.multipleOf"


@pytest.mark.parametrize(
    ("body", "tool_strict"),
    [
        ({"tools": [chat_tool()]}, True),
        ({"tools": [chat_tool()], "tool_choice": "auto"}, True),
        ({"tools": [chat_tool(strict=True)], "tool_choice": "none"}, True),
        ({"tools": [chat_tool()], "tool_choice": "required"}, False),
        ({"tools": [chat_tool(), chat_tool(name="g", parameters={})],
          "tool_choice": {"type": "function", "function": {"name": "g"}}}, True),
        ({"response_format": {"type": "json_object"}, "structured_outputs": None, "text": {}}, True),
        ({"tools": "none", "response_format": 5, "structured_outputs": 5}, True),
    ],
)  # fmt: skip
def test_a_schema_that_no_answer_must_satisfy_passes(body: dict[str, Any], tool_strict: bool) -> None:
    made = with_enforced_schemas(body, tool_strict)
    assert list(made.get("tools", ()))[:1] == list(body.get("tools", ()))[:1]


@pytest.mark.parametrize("given", [{"json": "{"}, {"choice": []}], ids=str)
def test_what_a_grammar_cannot_be_made_of_is_refused_at_its_path(given: dict[str, Any]) -> None:
    with pytest.raises(BadRequest) as caught:
        with_enforced_schemas({"structured_outputs": given}, tool_strict=True)
    assert caught.value.param == f"structured_outputs.{next(iter(given))}"


@pytest.mark.parametrize("parameters", [{}, {"title": "FArgs"}, None])
def test_a_demanded_tool_is_strict_and_has_an_object_of_arguments(parameters: Any) -> None:
    body = {"tools": [chat_tool(parameters=parameters)], "tool_choice": "required"}
    (made,) = with_enforced_schemas(body, tool_strict=True)["tools"]
    assert made["function"]["strict"] is True
    assert made["function"]["parameters"].items() >= {"type": "object", "properties": {}}.items()
    assert body["tools"][0]["function"]["parameters"] == parameters
