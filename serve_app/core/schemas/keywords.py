"""What the grammar builder of vLLM 0.32 (xgrammar 0.2.8) makes of each keyword of JSON Schema.

It reads one of `$ref`, `const`, `enum`, `anyOf`, `oneOf`, `allOf`, `type` at a place, the first of these that is there,
and ignores what stands beside it; of `type` it reads the keywords of that type. A keyword without a `type` is ignored
in part. `tests/engine/test_schema_grammars.py` compares this table with the installed builder.

A keyword that is not here says nothing about a value (`title`, `default`, `discriminator`, `x-...`) and passes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

STRING = ("string",)
NUMBER = ("integer", "number")
ARRAY = ("array",)
OBJECT = ("object",)
TYPES = ("null", "boolean", *NUMBER, *STRING, *ARRAY, *OBJECT)
EVERY: tuple[str, ...] = ()


class Enforcement(Enum):
    ENFORCED = "enforced"  # where nothing beside it hides it; `rewrite` sees to that
    REWRITTEN = "rewritten"  # the grammar ignores it, or reads it in another sense; said in other words it is enforced
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Keyword:
    """`types`: of the values that it speaks of, others satisfy it; empty: of all. `shape`: whether its own value is
    right, and in words what is right. `why`: what the grammar lacks."""

    types: tuple[str, ...]
    enforcement: Enforcement
    shape: Callable[[Any], bool]
    right: str
    why: str = ""


def _is_schema(value: Any) -> bool:
    return isinstance(value, dict | bool)


def _is_schemas(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_schema, value))


def _is_named_schemas(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_schema, value.values()))


def _is_count(value: Any) -> bool:
    return is_number(value) and value >= 0 and value == int(value)


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < float("inf")


def _is_types(value: Any) -> bool:
    names = value if isinstance(value, list) else [value]
    return bool(names) and all(isinstance(name, str) and name in TYPES for name in names)


_SCHEMA = (_is_schema, "a schema")
_SCHEMAS = (lambda value: _is_schemas(value) and bool(value), "an array of schemas, not empty")
_NAMED = (_is_named_schemas, "an object of schemas")
_COUNT = (_is_count, "a whole number, 0 or more")
_VALUE = (is_number, "a number")
_TEXT = (_is_text, "a text")
_NAMES = (_is_names, "an array of names")
_ANY: tuple[Callable[[Any], bool], str] = (lambda value: True, "")

_NO_SUBTRACTION = "a grammar says what may come, and cannot take away what another schema accepts"
_NO_MEMORY = "a grammar does not compare one part of a value with another"

KEYWORDS: Mapping[str, Keyword] = {
    "type": Keyword(EVERY, Enforcement.ENFORCED, _is_types, f"one or several of {', '.join(TYPES)}"),
    "enum": Keyword(
        EVERY, Enforcement.ENFORCED, lambda value: isinstance(value, list) and bool(value), "an array, not empty"
    ),
    "const": Keyword(EVERY, Enforcement.ENFORCED, *_ANY),
    "$ref": Keyword(EVERY, Enforcement.ENFORCED, *_TEXT),
    "anyOf": Keyword(EVERY, Enforcement.ENFORCED, *_SCHEMAS),
    # where its schemas exclude each other it is `anyOf`, and the grammar reads it so in any case
    "oneOf": Keyword(EVERY, Enforcement.REWRITTEN, *_SCHEMAS),
    # of one schema it is enforced, of several it accepts any value
    "allOf": Keyword(EVERY, Enforcement.REWRITTEN, *_SCHEMAS),
    "not": Keyword(EVERY, Enforcement.REFUSED, *_SCHEMA, _NO_SUBTRACTION),
    "if": Keyword(EVERY, Enforcement.REFUSED, *_SCHEMA, _NO_SUBTRACTION),
    "then": Keyword(EVERY, Enforcement.REFUSED, *_SCHEMA, _NO_SUBTRACTION),
    "else": Keyword(EVERY, Enforcement.REFUSED, *_SCHEMA, _NO_SUBTRACTION),
    "$dynamicRef": Keyword(EVERY, Enforcement.REFUSED, *_TEXT, "use `$ref`"),
    "$recursiveRef": Keyword(EVERY, Enforcement.REFUSED, *_TEXT, "use `$ref`"),
    "minLength": Keyword(STRING, Enforcement.ENFORCED, *_COUNT),  # not beside `pattern` or `format`
    "maxLength": Keyword(STRING, Enforcement.ENFORCED, *_COUNT),  # not beside `pattern` or `format`
    "pattern": Keyword(STRING, Enforcement.ENFORCED, *_TEXT),  # of the whole text, without lookaround (`patterns`)
    "format": Keyword(STRING, Enforcement.ENFORCED, *_TEXT),  # those of `FORMATS`, not beside `pattern`
    "minimum": Keyword(NUMBER, Enforcement.ENFORCED, *_VALUE),
    "maximum": Keyword(NUMBER, Enforcement.ENFORCED, *_VALUE),
    "exclusiveMinimum": Keyword(NUMBER, Enforcement.ENFORCED, *_VALUE),
    "exclusiveMaximum": Keyword(NUMBER, Enforcement.ENFORCED, *_VALUE),
    "multipleOf": Keyword(NUMBER, Enforcement.REFUSED, *_VALUE, "a grammar does not compute"),
    "items": Keyword(  # an array, the form of drafts before 2020, becomes `prefixItems`
        ARRAY,
        Enforcement.ENFORCED,
        lambda value: _is_schema(value) or _is_schemas(value),
        "a schema, or an array of them",
    ),
    "prefixItems": Keyword(ARRAY, Enforcement.ENFORCED, *_SCHEMAS),
    "additionalItems": Keyword(ARRAY, Enforcement.REWRITTEN, *_SCHEMA),
    "unevaluatedItems": Keyword(ARRAY, Enforcement.REWRITTEN, *_SCHEMA),
    "minItems": Keyword(ARRAY, Enforcement.ENFORCED, *_COUNT),
    "maxItems": Keyword(ARRAY, Enforcement.ENFORCED, *_COUNT),
    "uniqueItems": Keyword(ARRAY, Enforcement.REFUSED, *_ANY, _NO_MEMORY),
    "contains": Keyword(ARRAY, Enforcement.REFUSED, *_SCHEMA, _NO_MEMORY),
    "minContains": Keyword(ARRAY, Enforcement.REFUSED, *_COUNT, _NO_MEMORY),
    "maxContains": Keyword(ARRAY, Enforcement.REFUSED, *_COUNT, _NO_MEMORY),
    "properties": Keyword(OBJECT, Enforcement.ENFORCED, *_NAMED),
    "required": Keyword(OBJECT, Enforcement.ENFORCED, *_NAMES),  # ignored for a name that `properties` lacks
    "additionalProperties": Keyword(OBJECT, Enforcement.ENFORCED, *_SCHEMA),
    "unevaluatedProperties": Keyword(OBJECT, Enforcement.REWRITTEN, *_SCHEMA),
    "patternProperties": Keyword(OBJECT, Enforcement.ENFORCED, *_NAMED),  # one pattern, without `properties`
    "propertyNames": Keyword(OBJECT, Enforcement.ENFORCED, *_SCHEMA),  # without `properties`
    "minProperties": Keyword(OBJECT, Enforcement.ENFORCED, *_COUNT),  # above 1 of declared properties alone
    "maxProperties": Keyword(OBJECT, Enforcement.ENFORCED, *_COUNT),
    "dependentRequired": Keyword(OBJECT, Enforcement.REFUSED, *_ANY, _NO_MEMORY),
    "dependentSchemas": Keyword(OBJECT, Enforcement.REFUSED, *_ANY, _NO_MEMORY),
    "dependencies": Keyword(OBJECT, Enforcement.REFUSED, *_ANY, _NO_MEMORY),
}

# Formats of texts that the grammar knows.
FORMATS = frozenset(("email", "date", "time", "date-time", "duration", "ipv4", "ipv6", "hostname", "uuid", "uri"))
FORMATS |= {"uri-reference", "uri-template", "json-pointer", "relative-json-pointer"}
# Of these the grammar is wider than the format: it has a 31st of April, a second 60 and an octet `007`. A date is one
# that a calendar of the years 1 to 9999 has, a time one without a leap second, as clients' own types are.
_YEAR = r"(?:[1-9]\d{3}|0[1-9]\d{2}|00[1-9]\d|000[1-9])"
_DAY_OF_ANY_YEAR = (
    r"(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|02-(?:0[1-9]|1\d|2[0-8]))"
)
_FOURTH = "(?:0[48]|[2468][048]|[13579][26])"  # numbers of two digits above 0 that 4 divides
_DATE = rf"(?:{_YEAR}-{_DAY_OF_ANY_YEAR}|(?:\d\d{_FOURTH}|{_FOURTH}00)-02-29)"
_MINUTE = r"(?:[01]\d|2[0-3]):[0-5]\d"
_TIME = rf"{_MINUTE}:[0-5]\d(?:\.\d+)?(?:Z|[+\-]{_MINUTE})"
_OCTET = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
PATTERNS = {"date": _DATE, "time": _TIME, "date-time": f"{_DATE}T{_TIME}", "ipv4": rf"(?:{_OCTET}\.){{3}}{_OCTET}"}
# Formats that any text has: they say how it is shown, or what it is for.
HINTS = frozenset(("password", "path", "binary"))


def speaks_of(keyword: str, types: frozenset[str]) -> bool:
    """Whether a keyword says anything about values of these types."""
    constrained = KEYWORDS[keyword].types
    return not constrained or not types.isdisjoint(constrained)
