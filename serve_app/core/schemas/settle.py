"""The keywords of one place, once everything that stood beside them is joined: in the form that the grammar enforces.

Invariant: nothing in the result hides a keyword of it from the grammar builder.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from serve_app.core.schemas.join import Schema, keywords_of, types_of, values_of, with_types
from serve_app.core.schemas.keywords import FORMATS, HINTS, KEYWORDS, PATTERNS, TYPES
from serve_app.core.schemas.patterns import as_enforced, why_ignored
from serve_app.errors import BadRequest

MAX_INTEGER = 2**63 - 1  # of a number in a schema: the grammar builder rounds larger ones


def refuse(path: str, keyword: str, why: str) -> NoReturn:
    """Refuse a keyword at a path. Raises BadRequest."""
    name = f"{path}.{keyword}"
    raise BadRequest(f"`{keyword}` cannot be enforced at `{name}`: {why}", param=name)


def settled(made: Mapping[str, Any], path: str) -> Schema:
    """The schema of a place that has keywords of types alone; False: no value satisfies it. Raises BadRequest."""
    types = types_of(made)
    if "type" not in made:  # the grammar would accept any value
        spoken_of = {name for keyword in keywords_of(made) for name in KEYWORDS[keyword].types}
        types = tuple(name for name in TYPES if name in spoken_of and not (name == "integer" and "number" in spoken_of))
    schema = with_types(made, types)
    left = [name for name in types if _is_possible(name, schema)]
    if not left:
        return False
    if len(left) < len(types):
        schema = with_types(schema, tuple(left))
    if "string" in left:
        _settle_string(schema, path)
    if "integer" in left or "number" in left:
        _settle_number(schema, "integer" in left and "number" not in left, path)
    empty = [
        name
        for name, settle in (("array", _settle_array), ("object", lambda schema: _settle_object(schema, path)))
        if name in left and not settle(schema)
    ]
    if empty:
        rest = tuple(name for name in left if name not in empty)
        return with_types(schema, rest) if rest else False
    return schema


def _is_possible(name: str, schema: Mapping[str, Any]) -> bool:
    """Whether the bounds leave any value of this type."""
    if name in ("integer", "number"):
        low = schema.get("minimum", -math.inf)
        high = schema.get("maximum", math.inf)
        above = schema.get("exclusiveMinimum", -math.inf)
        below = schema.get("exclusiveMaximum", math.inf)
        if name == "integer":
            first = max(_whole(low, math.ceil), _whole(above, math.floor) + 1)
            return first <= min(_whole(high, math.floor), _whole(below, math.ceil) - 1)
        return bool(max(low, above) < min(high, below) or (low == high and above < low < below))
    count = {"string": "Length", "array": "Items", "object": "Properties"}.get(name)
    return count is None or bool(schema.get(f"min{count}", 0) <= schema.get(f"max{count}", math.inf))


def _whole(bound: float, rounded: Callable[[float], int]) -> float:
    return bound if math.isinf(bound) else rounded(bound)


def _settle_string(schema: dict[str, Any], path: str) -> None:
    named = schema.get("format")
    if named in HINTS or (named is not None and "pattern" in schema):
        # that a text is an email is for whom it may concern; what it looks like is an assertion
        del schema["format"]
    elif named is not None and named not in FORMATS:
        refuse(path, "format", f"{named!r} is none of {', '.join(sorted(FORMATS))}")
    if "pattern" in schema and (why := why_ignored(schema["pattern"])) is not None:
        refuse(path, "pattern", why)
    for length in ("minLength", "maxLength"):
        for beside in ("pattern", "format"):
            if length in schema and beside in schema:
                refuse(path, length, f"the grammar ignores it beside `{beside}`")
        if length in schema:
            schema[length] = int(schema[length])
    if schema.get("format") in PATTERNS:
        schema["pattern"] = PATTERNS[schema.pop("format")]
    if "pattern" in schema:
        schema["pattern"] = as_enforced(schema["pattern"])


def _settle_number(schema: dict[str, Any], integers: bool, path: str) -> None:
    for name in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
        if name in schema and not -MAX_INTEGER - 1 <= schema[name] <= MAX_INTEGER:
            refuse(path, name, "it has more than 64 bits")
    if integers:
        _to_whole(schema, "minimum", "exclusiveMinimum", math.ceil)
        _to_whole(schema, "maximum", "exclusiveMaximum", math.floor)


def _to_whole(schema: dict[str, Any], bound: str, exclusive: str, rounded: Callable[[float], int]) -> None:
    """Bounds that are no integers, of integers: the next one inside."""
    if isinstance(schema.get(bound), float):
        schema[bound] = rounded(schema[bound])
    beyond = schema.get(exclusive)
    if isinstance(beyond, float):
        if beyond.is_integer():
            schema[exclusive] = int(beyond)
        else:
            del schema[exclusive]
            inside = rounded(beyond)
            schema[bound] = (max if rounded is math.ceil else min)(schema.get(bound, inside), inside)


def _settle_array(schema: dict[str, Any]) -> bool:
    """Whether any array satisfies it."""
    for name in ("minItems", "maxItems"):
        if name in schema:
            schema[name] = int(schema[name])
    prefix = schema.get("prefixItems", [])
    if True in prefix:
        schema["prefixItems"] = prefix = [{} if one is True else one for one in prefix]
    length = next((place for place, one in enumerate(prefix) if one is False), len(prefix))
    length = min(length, schema.get("maxItems", length))
    if length < len(prefix):  # the grammar wants all of them
        schema["prefixItems"] = prefix[:length]
        schema["items"] = False
        if not length:
            del schema["prefixItems"]
    if schema.get("items") is False:
        return bool(schema.get("minItems", 0) <= length)
    if "items" not in schema and length < schema.get("minItems", 0):
        schema["items"] = {}  # without it the grammar has none
    return True


def _settle_object(schema: dict[str, Any], path: str) -> bool:
    """Whether any object satisfies it."""
    _settle_names(schema, path)
    rest = schema.get("additionalProperties")
    patterns = schema.get("patternProperties", {})
    required = schema.get("required", [])
    if len(patterns) > 1:
        refuse(path, "patternProperties", "a name may match two patterns")
    for pattern in patterns:
        if (why := why_ignored(pattern)) is not None:
            refuse(path, "patternProperties", why)
    if patterns:
        schema["patternProperties"] = patterns = {as_enforced(name): one for name, one in patterns.items()}
    if False in patterns.values() and rest in (None, False):  # nothing else is accepted, either
        del schema["patternProperties"]
        patterns = {}
        schema["additionalProperties"] = rest = False
    elif False in patterns.values():
        refuse(path, "patternProperties", "`additionalProperties` accepts what the pattern forbids")
    if patterns and (schema.get("properties") or required):
        refuse(path, "patternProperties", "a name of `properties` or `required` may match the pattern")
    lacking = [name for name in required if name not in schema.get("properties", {})]
    if lacking:
        added = dict.fromkeys(lacking, True if rest is None else rest)
        schema["properties"] = {**schema.get("properties", {}), **added}
    if any(schema["properties"][name] is False for name in required):
        return False
    impossible = [name for name, one in schema.get("properties", {}).items() if one is False]
    if impossible and rest not in (None, False):
        refuse(path, "properties", f"`{impossible[0]}` may not be there, and `additionalProperties` accepts it")
    if impossible:
        schema["properties"] = {name: one for name, one in schema["properties"].items() if one is not False}
    least = schema.get("minProperties", 0)
    if rest is None and not patterns and "propertyNames" not in schema and least > len(schema.get("properties", {})):
        schema["additionalProperties"] = rest = True  # without it the grammar has none
    if least > 1 and (rest not in (None, False) or patterns or "propertyNames" in schema):
        refuse(path, "minProperties", "above 1, the grammar counts a name that comes twice as two")
    for name in ("minProperties", "maxProperties"):
        if name in schema:
            schema[name] = int(schema[name])
    if rest is False and not patterns and least > len(schema.get("properties", {})):
        return False
    return bool(len(required) <= schema.get("maxProperties", math.inf))


def _settle_names(schema: dict[str, Any], path: str) -> None:
    """`propertyNames` as the grammar knows it: of names that are listed, properties; else one `pattern` or lengths."""
    names = schema.get("propertyNames")
    rest = schema.get("additionalProperties", True)
    if names is None:
        return
    beside = schema.get("properties") or schema.get("patternProperties") or schema.get("required")
    listed = [] if names is False else values_of(names)
    if names is True or (names and keywords_of(names) in ({}, {"type": "string"})) or (rest is False and not beside):
        del schema["propertyNames"]
    elif beside:
        refuse(path, "propertyNames", "not beside `properties`, `patternProperties` or `required`")
    elif listed is not None:
        del schema["propertyNames"]
        schema["properties"] = {name: rest for name in listed if isinstance(name, str)}
        schema["additionalProperties"] = False
    elif "$ref" in names or "anyOf" in names or types_of(names) != ("string",):
        refuse(path, "propertyNames", "it must be a text with a `pattern`, or an `enum`")
