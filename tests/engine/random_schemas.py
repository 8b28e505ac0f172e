"""Small schemas at random, of every keyword, as hypothesis draws them."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

NAMES = st.sampled_from(["a", "b", "title", "default"])
COUNTS = st.integers(0, 3)
BOUNDS = st.one_of(st.integers(-3, 12), st.sampled_from([0.5, -1.5, 2.0, 0.15]))
VALUES = st.recursive(
    st.sampled_from([None, True, False, 0, 1, 1.0, -2, 0.5, "", "a", "ab"]),
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(NAMES, inner, max_size=2)),
    max_leaves=3,
)
TYPES = st.sampled_from(["null", "boolean", "integer", "number", "string", "array", "object"])
PATTERNS = st.sampled_from(["^a+$", "^[ab]{1,2}$", "a", "^(?!a)b$", "^a$|^b", "^[^a]$", "x^", "\\bx"])
REFERENCES = st.sampled_from(["#/$defs/a", "#/$defs/b", "#"])


def _of(keywords: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.dictionaries(st.sampled_from(sorted(keywords)), st.none(), max_size=3).flatmap(
        lambda chosen: st.fixed_dictionaries({name: keywords[name] for name in chosen})
    )


def _levels(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    lists = st.lists(inner, min_size=1, max_size=3)
    named = st.dictionaries(NAMES, inner, max_size=3)
    objects = {
        "properties": named,
        "required": st.lists(NAMES, max_size=2, unique=True),
        "additionalProperties": inner,
        "unevaluatedProperties": inner,
        "patternProperties": st.dictionaries(PATTERNS, inner, max_size=2),
        "propertyNames": st.one_of(inner, PATTERNS.map(lambda pattern: {"pattern": pattern})),
        "minProperties": COUNTS,
        "maxProperties": COUNTS,
        "dependentRequired": st.dictionaries(NAMES, st.lists(NAMES, max_size=1), max_size=1),
    }
    arrays = {
        "items": inner,
        "prefixItems": lists,
        "unevaluatedItems": inner,
        "minItems": COUNTS,
        "maxItems": COUNTS,
        "uniqueItems": st.booleans(),
        "contains": inner,
    }
    joined = {"anyOf": lists, "oneOf": lists, "allOf": lists, "$ref": REFERENCES, "not": inner, "if": inner}
    typed = [
        st.builds(lambda kind, rest: {"type": kind, **rest}, st.just("object"), _of(objects)),
        st.builds(lambda kind, rest: {"type": kind, **rest}, st.just("array"), _of(arrays)),
        _of(objects),
        _of(arrays),
        _of(joined),
        st.builds(lambda first, other: {**first, **other}, _of(objects), _of({name: joined[name] for name in joined})),
        st.builds(
            lambda first, other, kinds: {**first, **other, "type": kinds},
            _of(objects),
            _of(arrays),
            st.lists(TYPES, min_size=1, max_size=3, unique=True),
        ),
    ]
    return st.one_of(typed)


_SCALARS = st.one_of(
    st.booleans(),
    st.builds(lambda kind: {"type": kind}, TYPES),
    st.builds(
        lambda kind, rest: {"type": kind, **rest},
        st.sampled_from(["integer", "number", ["integer", "null"]]),
        _of(
            {
                "minimum": BOUNDS,
                "maximum": BOUNDS,
                "exclusiveMinimum": BOUNDS,
                "exclusiveMaximum": BOUNDS,
                "multipleOf": st.sampled_from([1, 2, 0.5]),
            }
        ),
    ),
    st.builds(
        lambda rest, kind: {**rest, **kind},
        _of(
            {"minLength": COUNTS, "maxLength": COUNTS, "pattern": PATTERNS, "format": st.sampled_from(["date", "foo"])}
        ),
        st.sampled_from([{}, {"type": "string"}, {"type": ["string", "integer"]}]),
    ),
    st.builds(lambda values: {"enum": values}, st.lists(VALUES, min_size=1, max_size=3)),
    st.builds(lambda values, kind: {"enum": values, "type": kind}, st.lists(VALUES, min_size=1, max_size=3), TYPES),
    st.builds(lambda value: {"const": value}, VALUES),
)
_PARTS = st.recursive(_SCALARS, _levels, max_leaves=6)
SCHEMAS = st.builds(
    lambda schema, definitions: {**schema, "$defs": definitions} if isinstance(schema, dict) else schema,
    _PARTS,
    st.fixed_dictionaries({"a": _PARTS, "b": _PARTS}),
)
