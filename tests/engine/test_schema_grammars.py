"""What xgrammar's grammars accept, against what the schemas say: nothing that passes our check is ignored there."""

from __future__ import annotations

import itertools
import json
import math
import random
import re
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from vllm.v1.structured_output.backend_xgrammar import has_xgrammar_unsupported_json_features

from serve_app.core.schemas.keywords import KEYWORDS, Enforcement
from serve_app.core.schemas.rewrite import enforced
from serve_app.errors import BadRequest
from tests.core.schemas.ordinary import ORDINARY
from tests.effort import examples
from tests.engine.random_schemas import SCHEMAS
from tests.engine.schema_grammars import accepts, drawn

TEXTS = 8  # of each schema

# A value that each keyword forbids, though its grammar accepts it: alone, or beside what hides it.
IGNORED: list[tuple[str, dict[str, Any], str]] = [
    ("multipleOf", {"type": "number", "multipleOf": 0.5}, "0.3"),
    ("multipleOf", {"type": "integer", "multipleOf": 1025}, "3"),
    ("uniqueItems", {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, "[1,1]"),
    ("contains", {"type": "array", "items": {"type": "integer"}, "contains": {"const": 5}}, "[1]"),
    ("minContains", {"type": "array", "items": {}, "minContains": 1, "contains": {"const": 5}}, "[1]"),
    ("maxContains", {"type": "array", "items": {}, "maxContains": 1, "contains": {"const": 5}}, "[5,5]"),
    ("not", {"type": "integer", "not": {"const": 5}}, "5"),
    ("if", {"type": "integer", "if": {"const": 5}, "then": False}, "5"),
    ("dependentRequired", {"properties": {"a": {}, "b": {}}, "dependentRequired": {"a": ["b"]}}, '{"a":1}'),
    ("dependentSchemas", {"properties": {"a": {}, "b": {}}, "dependentSchemas": {"a": False}}, '{"a":1}'),
    ("dependencies", {"properties": {"a": {}, "b": {}}, "dependencies": {"a": ["b"]}}, '{"a":1}'),
    ("maxLength", {"type": "string", "pattern": "^a+$", "maxLength": 2}, '"aaa"'),
    ("maxLength", {"type": "string", "format": "date", "maxLength": 2}, '"2024-01-31"'),
    ("format", {"type": "string", "format": "colour"}, '"a"'),
    ("pattern", {"type": "string", "pattern": "^(?!a)[a-z]+$"}, '"a"'),
    ("pattern", {"type": "string", "pattern": "a$b"}, '"ab"'),
    ("pattern", {"type": "string", "pattern": '^"$'}, '"""'),
    ("pattern", {"type": "string", "pattern": "^é.$"}, '"é""'),
    ("oneOf", {"oneOf": [{"type": "integer"}, {"type": "number"}]}, "1"),
    (
        "patternProperties",
        {"type": "object", "patternProperties": {"^x": {"type": "integer"}, "x$": {"type": "string"}}},
        '{"x":1}',
    ),
    ("minProperties", {"type": "object", "additionalProperties": True, "minProperties": 2}, '{"a":1,"a":1}'),
    ("propertyNames", {"properties": {"aa": {}, "b": {}}, "propertyNames": {"minLength": 2}}, '{"b":1}'),
    ("$ref", {"type": "object", "properties": {"a": {"$ref": "https://example.com/a"}}}, '{"a":1}'),
]

# What the grammar builder would ignore, or does not take, and what is enforced once it is said in other words.
REWRITTEN: list[tuple[dict[str, Any], str | None, str]] = [
    ({"allOf": [{"type": "integer"}, {"minimum": 3}]}, "1", "3"),
    (
        {
            "allOf": [
                {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
                {"type": "object", "properties": {"b": {"type": "string"}}, "required": ["b"]},
            ]
        },
        '"x"',
        '{"a":1,"b":"x"}',
    ),
    ({"type": "object", "properties": {"a": {}}, "required": ["b"]}, '{"a":1}', '{"a":1,"b":2}'),
    ({"type": "object", "properties": {"a": {}}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, "1", '{"a":1}'),
    ({"$ref": "#/$defs/n", "maximum": 3, "$defs": {"n": {"type": "integer"}}}, "5", "2"),
    ({"enum": ["a", 1], "type": "string"}, "1", '"a"'),
    ({"minLength": 2}, "1", '"ab"'),
    ({"required": ["a"]}, "1", '{"a":1}'),
    ({"type": "array", "minItems": 2}, None, "[1,2]"),
    ({"type": "array", "items": [{"type": "integer"}, {"type": "string"}], "minItems": 2}, None, '[1,"a"]'),
    ({"type": "array", "prefixItems": [{"type": "integer"}, {}], "maxItems": 1}, None, "[1]"),
    ({"type": "integer", "minimum": 2.5}, None, "3"),
    ({"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"type": "integer"}}}, None, "3"),
    ({"type": "string", "pattern": r"^x(?:\.\d+)?$"}, '"x5"', '"x.55"'),
    ({"type": "object", "patternProperties": {"^x(yz+)?$": {"type": "integer"}}}, '{"xz":1}', '{"xyz":1,"x":2}'),
    ({"type": "string", "format": "date"}, '"2023-02-29"', '"2024-02-29"'),
    ({"type": "string", "format": "date-time"}, '"2023-11-31T00:00:00Z"', '"2023-11-30T23:59:59.123456+05:30"'),
    ({"type": "string", "format": "date-time"}, '"0000-01-01T00:00:00Z"', '"0001-01-01T00:00:00Z"'),
    ({"type": "string", "format": "time"}, '"23:59:60Z"', '"23:59:59-00:00"'),
    ({"type": "string", "format": "ipv4"}, '"10.0.0.007"', '"255.199.99.0"'),
    ({"type": "string", "format": "uuid", "pattern": "^a$"}, '"123e4567-e89b-12d3-a456-426614174000"', '"a"'),
    (
        {
            "type": "object",
            "properties": {
                "a": {"type": "object", "properties": {"title": {"type": "integer"}}},
                "b": {"type": "object", "properties": {"title": {"type": "string"}}},
            },
        },
        '{"b":{"title":1}}',
        '{"b":{"title":"x"}}',
    ),
]


@pytest.mark.parametrize(
    ("keyword", "schema", "forbidden"), IGNORED, ids=[f"{at}-{one[0]}" for at, one in enumerate(IGNORED)]
)
def test_what_the_grammar_ignores_is_refused_by_keyword_and_path(
    keyword: str, schema: dict[str, Any], forbidden: str
) -> None:
    assert accepts(schema, forbidden)

    with pytest.raises(BadRequest) as refused:
        enforced({"type": "object", "properties": {"n": schema}}, "response_format.json_schema.schema")

    path = "response_format.json_schema.schema.properties.n"
    assert refused.value.param in (f"{path}.{keyword}", f"{path}.properties.a.{keyword}")
    assert f"`{keyword}`" in refused.value.message


REPETITIONS = ("", "?", "*", "+", "{2}", "{1,2}")


@pytest.mark.parametrize("last", REPETITIONS)
@pytest.mark.parametrize("first", REPETITIONS)
def test_a_group_that_need_not_be_there_is_there_as_a_whole(first: str, last: str) -> None:
    """The grammar builder's `?` lets repetitions at the ends of a group stand by themselves."""
    texts = ["".join(letters) for length in range(5) for letters in itertools.product("ab", repeat=length)]
    for pattern in (f"(a{first}b{last})?", f"(?:a{first}b{last})??a", f"b(a{first}b{last}|ba{first})?"):
        rewritten = enforced({"type": "string", "pattern": pattern}, "text.format.schema")
        assert [text for text in texts if accepts(rewritten, json.dumps(text))] == [
            text for text in texts if re.fullmatch(pattern, text)
        ], pattern


@pytest.mark.parametrize(("schema", "forbidden", "allowed"), REWRITTEN, ids=range(len(REWRITTEN)))
def test_what_other_keywords_can_express_is_enforced(
    schema: dict[str, Any], forbidden: str | None, allowed: str
) -> None:
    if forbidden is None:
        with pytest.raises(RuntimeError):
            accepts(schema, allowed)
    else:
        assert accepts(schema, forbidden)

    made = enforced(schema, "schema")

    assert accepts(made, allowed)
    assert forbidden is None or not accepts(made, forbidden)


@pytest.mark.parametrize("name", ORDINARY)
def test_a_grammar_is_built_of_every_ordinary_schema(name: str) -> None:
    made = enforced(ORDINARY[name], "schema")

    assert not has_xgrammar_unsupported_json_features(made)  # vLLM's own refusal, which names no keyword
    for text in drawn(made, random.Random(1), TEXTS):
        assert jsonschema.Draft202012Validator(made).is_valid(json.loads(text))


def test_every_refused_keyword_is_one_that_the_grammar_ignores() -> None:
    hidden = {"then", "else", "$dynamicRef", "$recursiveRef"}  # beside `if`; of anchors
    refused = {name for name, keyword in KEYWORDS.items() if keyword.enforcement is Enforcement.REFUSED}

    assert refused - hidden <= {keyword for keyword, *_ in IGNORED}


def is_finite(value: Any) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return all(map(is_finite, inner)) and not (isinstance(value, float) and math.isinf(value))


@settings(max_examples=examples(150), deadline=None, suppress_health_check=list(HealthCheck))
@given(SCHEMAS, st.integers(0, 1000))
def test_what_the_grammar_of_a_schema_accepts_satisfies_the_schema(schema: Any, seed: int) -> None:
    """Every schema that passes can be built, and each text that its grammar gives is a value that it allows."""
    try:
        made = enforced(schema, "schema")
    except BadRequest as refusal:
        event(str(refusal.param).rpartition(".")[2])
        return
    for text in drawn(made, random.Random(seed), TEXTS):
        value = json.loads(text)
        assert not is_finite(value) or jsonschema.Draft202012Validator(schema).is_valid(value), (made, text)
