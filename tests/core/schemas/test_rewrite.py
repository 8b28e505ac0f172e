"""Which schemas pass, which are said in other words, and which are refused by what name."""

from __future__ import annotations

from typing import Any

import pytest

from serve_app.core.schemas.rewrite import enforced
from serve_app.errors import BadRequest
from tests.core.schemas.ordinary import ORDINARY, Part

PATH = "response_format.json_schema.schema"


def refused(schema: Any, **more: Any) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        enforced(schema, PATH, **more)
    return caught.value


@pytest.mark.parametrize("name", ORDINARY)
def test_the_schemas_of_common_libraries_pass(name: str) -> None:
    assert enforced(ORDINARY[name], PATH)


def test_what_is_enforced_as_it_is_stays_the_client_s_own() -> None:
    for schema in (Part.model_json_schema(), {"type": "string", "enum": ["a"], "description": "x"}, {}, True):
        assert enforced(schema, PATH) is schema


def test_annotations_and_unknown_keywords_pass() -> None:
    describes = {
        "title": "n",
        "description": "n",
        "default": 3,
        "examples": [3],
        "$comment": "n",
        "deprecated": True,
        "readOnly": True,
        "x-order": 1,
        "discriminator": {"propertyName": "n"},
    }
    schema = {"type": "integer", "minimum": 1, **describes}
    assert enforced(schema, PATH) is schema


@pytest.mark.parametrize(
    ("schema", "param"),
    [
        ({"properties": {"n": {"type": "integer", "multipleOf": 1000}}}, "properties.n.multipleOf"),
        ({"items": {"anyOf": [{"type": "null"}, {"type": "array", "uniqueItems": True}]}}, "items.anyOf.1.uniqueItems"),
        ({"$ref": "#/$defs/n", "$defs": {"n": {"not": {"const": 1}}}}, "$defs.n.not"),
        ({"allOf": [{"type": "object"}, {"if": {}, "then": {}}]}, "allOf.1.if"),
        ({"properties": {"n": {"type": "string", "minLength": -1}}}, "properties.n.minLength"),
        ({"properties": {"n": {"type": "text"}}}, "properties.n.type"),
        ({"properties": {"n": {"enum": []}}}, "properties.n.enum"),
        ({"properties": {"n": 5}}, "properties"),
        ({"properties": {"n": {"$ref": "#/$defs/none"}}}, "properties.n.$ref"),
        ({"properties": {"n": {"const": 2**64}}}, "properties.n.const"),
        ({"additionalProperties": {"contains": {}}}, "additionalProperties.contains"),
        ({"prefixItems": [{}, {"pattern": "(?=a)"}]}, "prefixItems.1.pattern"),
        ({"pattern": "a["}, "pattern"),
        ({"pattern": "(a"}, "pattern"),
        ({"pattern": "a)"}, "pattern"),
    ],
)
def test_a_refusal_names_the_path_that_the_client_sent(schema: dict[str, Any], param: str) -> None:
    assert refused(schema).param == f"{PATH}.{param}"


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "uniqueItems": False},
        {"type": "integer", "multipleOf": 1},
        {"type": "string", "then": {"const": "a"}},
        {"type": "string", "uniqueItems": True, "multipleOf": 5},
    ],
)
def test_a_keyword_that_says_nothing_where_it_stands_passes(schema: dict[str, Any]) -> None:
    assert enforced(schema, PATH)["type"] == schema["type"]


@pytest.mark.parametrize("pointer", ["#/$defs/a~1b%20c", "#/$defs/a~1b c", "#/properties/m/items", "#/allOf/0", "#"])
def test_a_reference_may_name_any_part_of_the_schema(pointer: str) -> None:
    schema = {
        "properties": {"n": {"$ref": pointer}, "m": {"items": {"type": "integer"}}},
        "$defs": {"a/b c": {"type": "integer"}},
        "allOf": [{"type": "object"}],
    }
    reference = enforced(schema, PATH)["properties"]["n"]["$ref"]
    assert reference.rpartition("/")[2] in enforced(schema, PATH)["$defs"]


def test_two_plain_objects_become_one() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    other = {"properties": {"a": {"minimum": 3}, "b": {"type": "string"}}, "required": ["b"]}
    assert enforced({"allOf": [schema, other]}, PATH) == {
        "type": "object",
        "properties": {"a": {"type": "integer", "minimum": 3}, "b": {"type": "string"}},
        "required": ["a", "b"],
    }


def test_a_closed_object_has_no_property_of_the_other() -> None:
    closed = {"type": "object", "properties": {"a": {}}, "additionalProperties": False}
    assert refused({"allOf": [closed, {"required": ["b"]}]}).param == PATH


def test_a_pattern_of_names_that_may_not_be_there_leaves_none() -> None:
    closed = enforced({"type": "object", "patternProperties": {"^a$": False}}, PATH)
    assert closed == {"type": "object", "additionalProperties": False}
    open_schema = {"type": "object", "patternProperties": {"^a$": False}, "additionalProperties": {"type": "null"}}
    assert refused(open_schema).param == f"{PATH}.patternProperties"


def test_schemas_of_one_of_must_exclude_each_other() -> None:
    reported = {"type": "object", "properties": {"t": {"const": "a"}}}
    other = {"type": "object", "properties": {"t": {"const": "b"}}}
    assert refused({"oneOf": [reported, other]}).param == f"{PATH}.oneOf"  # an object without `t` satisfies both
    assert enforced({"oneOf": [{**reported, "required": ["t"]}, other]}, PATH)
    discriminated = {"oneOf": [reported, other], "discriminator": {"propertyName": "t"}}
    assert all(one["required"] == ["t"] for one in enforced(discriminated, PATH)["anyOf"])


@pytest.mark.parametrize(
    ("parameters", "made"),
    [
        (True, {"type": "object", "properties": {}}),
        ({}, {"type": "object", "properties": {}}),
        ({"title": "FArgs"}, {"title": "FArgs", "type": "object", "properties": {}}),
        ({"type": "object"}, {"type": "object"}),
        ({"type": ["object", "null"], "properties": {"a": {}}}, {"type": "object", "properties": {"a": {}}}),
        ({"anyOf": [{"type": "object"}, {"type": "null"}]}, {"type": "object"}),
        ({"enum": [{"a": 1}, 5, [1]]}, {"enum": [{"a": 1}]}),
    ],
)
def test_the_arguments_of_a_tool_are_an_object(parameters: Any, made: dict[str, Any]) -> None:
    assert enforced(parameters, "tools.0.function.parameters", is_object=True) == made


@pytest.mark.parametrize("parameters", [False, {"type": "object", "properties": {"a": False}, "required": ["a"]}])
def test_a_tool_whose_arguments_can_have_no_value_is_refused_in_plain_words(parameters: Any) -> None:
    with pytest.raises(BadRequest, match="no value satisfies") as caught:
        enforced(parameters, "tools.0.function.parameters", is_object=True)
    assert caught.value.param == "tools.0.function.parameters"


@pytest.mark.parametrize("parameters", [{"type": "array"}, {"const": 5}, {"type": "integer", "title": "n"}])
def test_a_tool_whose_arguments_cannot_be_an_object_is_refused(parameters: Any) -> None:
    with pytest.raises(BadRequest) as caught:
        enforced(parameters, "tools.0.function.parameters", is_object=True)
    assert str(caught.value.param).startswith("tools.0.function.parameters")


def test_a_schema_that_multiplies_itself_is_refused_before_it_costs_anything() -> None:
    def joined(level: int) -> list[dict[str, Any]]:
        return [{"$ref": f"#/$defs/n{level + 1}", bound: level} for bound in ("minItems", "maxItems")]

    levels = {f"n{level}": {"type": "array", "prefixItems": joined(level)} for level in range(30)}
    assert refused({"$ref": "#/$defs/n0", "$defs": {**levels, "n30": {"type": "array"}}}).code == "grammar_too_complex"
