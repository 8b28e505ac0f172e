"""One schema that says what two say: for keywords that stand beside each other, where the grammar reads only one.

Invariant: a value that satisfies the result satisfies both. What cannot be said by one schema raises `CannotJoin`.

Schemas are in the form of `rewrite`: one of `$ref`, `const`, `enum`, `anyOf`, or keywords of types.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from serve_app.core.schemas.keywords import KEYWORDS, TYPES, is_number, speaks_of

Schema = Any  # an object, or a boolean

_LARGER = frozenset(("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties"))
_SMALLER = frozenset(("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"))
_OF_OBJECTS = frozenset(("properties", "additionalProperties"))
_OF_ARRAYS = frozenset(("prefixItems", "items"))
_ALL_TYPES = tuple(name for name in TYPES if name != "integer")
_MAX_DEPTH = 32  # of references that are followed while one schema is joined


class CannotJoin(Exception):
    """`keyword`: the one that two schemas have in ways that no one schema can say."""

    def __init__(self, keyword: str) -> None:
        super().__init__(keyword)
        self.keyword = keyword


def keywords_of(schema: Schema) -> dict[str, Any]:
    """The keywords of a schema, without what only describes it."""
    return {name: value for name, value in schema.items() if name in KEYWORDS} if isinstance(schema, dict) else {}


def types_of(schema: Mapping[str, Any]) -> tuple[str, ...]:
    """The types that a schema names, else all."""
    named = schema.get("type", _ALL_TYPES)
    return (named,) if isinstance(named, str) else tuple(named)


def with_types(schema: Mapping[str, Any], types: tuple[str, ...]) -> dict[str, Any]:
    """The schema for values of these types alone, with the keywords that speak of them."""
    known = frozenset(types)
    kept = {name: value for name, value in schema.items() if name not in KEYWORDS or speaks_of(name, known)}
    kept.pop("type", None)
    if set(types) != set(_ALL_TYPES):
        kept["type"] = types[0] if len(types) == 1 else list(types)
    return kept


def values_of(schema: Schema) -> list[Any] | None:
    """The values that a schema lists; None: it lists none."""
    if not isinstance(schema, dict):
        return None
    listed: list[Any] | None = [schema["const"]] if "const" in schema else schema.get("enum")
    return listed


def any_of(schemas: list[Schema]) -> Schema:
    """One of several, those that accept nothing left out."""
    left = [schema for schema in schemas if schema is not False]
    if not left:
        return False
    return left[0] if len(left) == 1 else {"anyOf": left}


def type_of(value: Any) -> str:
    """The narrowest type of a value."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if is_number(value):
        return "integer" if value == int(value) else "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


def has_type(value: Any, types: tuple[str, ...]) -> bool:
    type_name = type_of(value)
    return type_name in types or (type_name == "integer" and "number" in types)


class Joiner:
    """Joins schemas.

    Args:
        target: the schema that a `$ref` names.
        spend: called for each schema that is made; raises when there are too many.
    """

    def __init__(self, target: Callable[[str], Schema], spend: Callable[[], None]) -> None:
        self._target = target
        self._spend = spend
        self._depth = 0
        self._listed: dict[int, tuple[list[Any], frozenset[str]]] = {}  # by identity of the list, which is kept

    def join(self, schema: Schema, other: Schema) -> Schema:
        """What both say. Raises CannotJoin."""
        self._spend()
        if schema is False or other is False:
            return False
        if not keywords_of(other) and isinstance(schema, dict):
            return schema
        if not keywords_of(schema) or keywords_of(schema) == keywords_of(other):
            return other
        for left, right in ((schema, other), (other, schema)):
            if "anyOf" in left:
                return any_of([self.join(each, right) for each in left["anyOf"]])
        for left, right in ((schema, other), (other, schema)):
            if "$ref" in left:
                return self._followed(left["$ref"], self.join, right)
        for left, right in ((schema, other), (other, schema)):
            values = values_of(left)
            if values is not None:
                kept = [value for value in values if self.fits(value, right)]
                return {"enum": kept} if kept else False
        return self._typed(schema, other)

    def fits(self, value: Any, schema: Schema) -> bool:
        """Whether a value satisfies a schema. Raises CannotJoin: that takes more than is known here."""
        self._spend()
        if isinstance(schema, bool):
            return schema
        if "$ref" in schema:
            return bool(self._followed(schema["$ref"], lambda target, of: self.fits(of, target), value))
        if "anyOf" in schema:
            return any(self.fits(value, each) for each in schema["anyOf"])
        values = values_of(schema)
        if values is not None:
            return plain(value) in self._plain_values(values)
        return has_type(value, types_of(schema)) and all(
            self._holds(keyword, given, value, schema)
            for keyword, given in keywords_of(schema).items()
            if has_type(value, KEYWORDS[keyword].types)
        )

    def excludes(self, schema: Schema, other: Schema) -> bool:
        """Whether no value satisfies both, as far as it is known here."""
        self._spend()
        if schema is False or other is False:
            return True
        if schema is True or other is True:
            return False
        for left, right in ((schema, other), (other, schema)):
            if "anyOf" in left:
                return all(self.excludes(each, right) for each in left["anyOf"])
        for left, right in ((schema, other), (other, schema)):
            if "$ref" in left:
                if self._depth > _MAX_DEPTH:
                    return False
                return bool(self._followed(left["$ref"], self.excludes, right))
        for left, right in ((schema, other), (other, schema)):
            values = values_of(left)
            if values is not None:
                try:
                    return not any(self.fits(value, right) for value in values)
                except CannotJoin:
                    return False
        common = common_types(types_of(schema), types_of(other))
        return not common or (common == ("object",) and self._excludes_objects(schema, other))

    def _plain_values(self, values: list[Any]) -> frozenset[str]:
        if id(values) not in self._listed:
            self._listed[id(values)] = (values, frozenset(map(plain, values)))
        return self._listed[id(values)][1]

    def _excludes_objects(self, schema: Schema, other: Schema) -> bool:
        """Whether a property that one of them requires has no value that both accept."""
        for name in {*schema.get("required", ()), *other.get("required", ())}:
            own = schema.get("properties", {})
            others = other.get("properties", {})
            if name in own and name in others and self.excludes(own[name], others[name]):
                return True
        return False

    def _followed(self, reference: str, then: Callable[[Schema, Any], Any], of: Any) -> Any:
        if self._depth > _MAX_DEPTH:
            raise CannotJoin("$ref")
        self._depth += 1
        try:
            return then(self._target(reference), of)
        finally:
            self._depth -= 1

    def _holds(self, keyword: str, given: Any, value: Any, schema: Mapping[str, Any]) -> bool:
        simple: dict[str, Callable[[], bool]] = {
            "minimum": lambda: value >= given,
            "maximum": lambda: value <= given,
            "exclusiveMinimum": lambda: value > given,
            "exclusiveMaximum": lambda: value < given,
            "minLength": lambda: len(value) >= given,
            "maxLength": lambda: len(value) <= given,
            "minItems": lambda: len(value) >= given,
            "maxItems": lambda: len(value) <= given,
            "minProperties": lambda: len(value) >= given,
            "maxProperties": lambda: len(value) <= given,
            "required": lambda: all(name in value for name in given),
            "properties": lambda: all(self.fits(value[name], each) for name, each in given.items() if name in value),
            "additionalProperties": lambda: all(
                self.fits(each, given) for name, each in value.items() if name not in schema.get("properties", {})
            ),
            "prefixItems": lambda: all(map(self.fits, value, given)),
            "items": lambda: all(self.fits(each, given) for each in value[len(schema.get("prefixItems", ())) :]),
        }
        if keyword not in simple or "patternProperties" in schema:
            raise CannotJoin(keyword)
        return simple[keyword]()

    def _typed(self, schema: Mapping[str, Any], other: Mapping[str, Any]) -> Schema:
        types = common_types(types_of(schema), types_of(other))
        if not types:
            return False
        schema = with_types(schema, types)
        other = with_types(other, types)
        joined = dict(schema)
        for keyword, value in keywords_of(other).items():
            if keyword == "type" or keyword in _OF_OBJECTS or keyword in _OF_ARRAYS:
                continue
            if keyword not in schema or schema[keyword] == value:
                joined[keyword] = value
            elif keyword in _LARGER or keyword in _SMALLER:
                joined[keyword] = (max if keyword in _LARGER else min)(schema[keyword], value)
            elif keyword == "required":
                joined[keyword] = list(dict.fromkeys([*schema[keyword], *value]))
            else:
                raise CannotJoin(keyword)
        return joined | self._objects(schema, other) | self._arrays(schema, other)

    def _objects(self, left: Mapping[str, Any], right: Mapping[str, Any]) -> dict[str, Any]:
        """The properties of both. A property that one of them does not declare is an additional one there."""
        joined: dict[str, Any] = {}
        names = dict.fromkeys([*left.get("properties", ()), *right.get("properties", ())])
        declares = names or "additionalProperties" in {**left, **right}
        if declares and ("patternProperties" in left or "patternProperties" in right):
            raise CannotJoin("patternProperties")
        if names:
            joined["properties"] = {
                name: self.join(*(_property(schema, name) for schema in (left, right))) for name in names
            }
        rests = [schema["additionalProperties"] for schema in (left, right) if "additionalProperties" in schema]
        if rests:
            joined["additionalProperties"] = self.join(rests[0], rests[-1])
        return joined

    def _arrays(self, left: Mapping[str, Any], right: Mapping[str, Any]) -> dict[str, Any]:
        joined: dict[str, Any] = {}
        length = max(len(schema.get("prefixItems", ())) for schema in (left, right))
        if length:
            joined["prefixItems"] = [
                self.join(*(_item(schema, place) for schema in (left, right))) for place in range(length)
            ]
        rests = [schema["items"] for schema in (left, right) if "items" in schema]
        if rests:
            joined["items"] = self.join(rests[0], rests[-1])
        return joined


def common_types(types: tuple[str, ...], other: tuple[str, ...]) -> tuple[str, ...]:
    """The types of both; an integer is a number, too."""
    both = [name for name in types if name in other or (name == "integer" and "number" in other)]
    return tuple(both + [name for name in other if name == "integer" and "number" in types and name not in both])


def _property(schema: Mapping[str, Any], name: str) -> Schema:
    return schema.get("properties", {}).get(name, schema.get("additionalProperties", True))


def _item(schema: Mapping[str, Any], place: int) -> Schema:
    prefix = schema.get("prefixItems", ())
    return prefix[place] if place < len(prefix) else schema.get("items", True)


def plain(value: Any) -> str:
    """A text that is the same for equal values: 1 is 1.0, and true is not 1."""
    return json.dumps(_with_one_kind_of_number(value), sort_keys=True)


def _with_one_kind_of_number(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _with_one_kind_of_number(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_with_one_kind_of_number(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
