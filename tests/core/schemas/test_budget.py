"""Schemas that cost much to read: what an event loop reads, what a helper reads, and what nobody reads."""

from __future__ import annotations

from typing import Any

import pytest

from serve_app.core.schemas import SchemaBudget, TooManyParts, small_budget, with_enforced_schemas
from tests.core.schemas.ordinary import ORDINARY


def asked(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


def kind(name: str) -> dict[str, Any]:
    return {"type": "object", "properties": {"kind": {"const": name}}, "required": ["kind"]}


def titled(number: int) -> dict[str, Any]:
    """One that the grammar builder takes for another of these."""
    return {"type": "object", "properties": {"title": {"const": number}}}


COMPARED = {"oneOf": [kind(str(number)) for number in range(120)]}
MARKED = {"type": "object", "properties": {f"p{number}": titled(number) for number in range(200)}}
PART = {"type": "object", "properties": {f"a{number}": {"type": "string"} for number in range(50)}}
WRITTEN = {
    "$defs": {"a": PART},
    "type": "object",
    "properties": {f"p{number}": {"$ref": "#/$defs/a", "required": ["a1"]} for number in range(9)},
}
ENDLESS = {
    "allOf": [{"anyOf": [{"type": "object", "properties": {f"p{a}_{b}": {}}} for b in range(8)]} for a in range(8)]
}


@pytest.mark.parametrize("name", ORDINARY)
def test_an_event_loop_reads_ordinary_schemas(name: str) -> None:
    with_enforced_schemas(asked(ORDINARY[name]), True, small_budget())


@pytest.mark.parametrize("schema", [COMPARED, MARKED])
def test_what_costs_more_than_an_event_loop_has_is_read_with_more(schema: Any) -> None:
    with pytest.raises(TooManyParts) as caught:
        with_enforced_schemas(asked(schema), True, small_budget())
    assert (caught.value.code, caught.value.param) == ("grammar_too_complex", "response_format.json_schema.schema")
    assert with_enforced_schemas(asked(schema), True)


def test_what_costs_too_much_for_anybody_is_refused() -> None:
    with pytest.raises(TooManyParts):
        with_enforced_schemas(asked(ENDLESS), True)


def test_all_schemas_of_a_request_share_one_budget() -> None:
    function = {"name": "f", "parameters": {"type": "object", "properties": {"a": kind("a"), "b": kind("b")}}}
    tools = [{"type": "function", "function": {**function, "name": f"f{number}"}} for number in range(3000)]
    with pytest.raises(TooManyParts):
        with_enforced_schemas({"tools": tools, "tool_choice": "required"}, True, small_budget())
    assert with_enforced_schemas({"tools": tools[:20], "tool_choice": "required"}, True, small_budget())


def test_what_is_written_many_times_counts_as_often() -> None:
    assert with_enforced_schemas(asked(WRITTEN), True)
    with pytest.raises(TooManyParts, match="values"):
        with_enforced_schemas(asked(WRITTEN), True, SchemaBudget(values=500))
