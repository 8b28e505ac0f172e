"""Keeps the grammar builder from taking one schema for another.

It knows the schemas that it has met by a text that leaves out what describes them: `title`, `default` and the like. It
leaves these names out of `properties` and of values, too, so of two objects whose only difference is the type of their
property `title`, the second gets the grammar of the first.

Invariant: schemas with the same such text accept the same values; a mark that says nothing sets the others apart.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

MARK = "x-distinct"
_LEFT_OUT = frozenset(
    ["title", "default", "description", "examples", "deprecated", "readOnly", "writeOnly", "$comment", "$schema"]
)  # by the grammar builder, wherever they are
_NAMED = frozenset(("properties", "patternProperties", "$defs", "definitions"))
_LISTED = frozenset(("anyOf", "prefixItems"))
_SINGLE = frozenset(("items", "additionalProperties", "propertyNames"))


def distinct(schema: Any, met: dict[str, str], spend: Callable[[], None]) -> Any:
    """The schema with marks where it needs them; the same one if it needs none.

    Args:
        met: the schemas met so far, those of other tools too, by the builder's text of them.
        spend: called for each text that is made.
    """
    if not _may_be_confused(schema):
        return schema
    made = _marked(schema, met, spend)
    return schema if made == schema else made


def _may_be_confused(value: Any) -> bool:
    """Whether a name that is left out stands anywhere but beside keywords."""
    left = [value]
    while left:
        node = left.pop()
        if isinstance(node, dict):
            for name, inner in node.items():
                if name in _NAMED and isinstance(inner, dict) and not _LEFT_OUT.isdisjoint(inner):
                    return True
                if name in ("const", "enum") and isinstance(inner, dict | list):
                    return True
            left += node.values()
        elif isinstance(node, list):
            left += node
    return False


def _marked(schema: Any, met: dict[str, str], spend: Callable[[], None]) -> Any:
    if not isinstance(schema, dict):
        return schema
    made = dict(schema)
    for name, inner in schema.items():
        if name in _NAMED:
            made[name] = {one: _marked(value, met, spend) for one, value in inner.items()}
        elif name in _LISTED:
            made[name] = [_marked(one, met, spend) for one in inner]
        elif name in _SINGLE:
            made[name] = _marked(inner, met, spend)
    whole = _text(_undescribed(made))
    mark = 0
    spend()
    while met.setdefault(_text(_as_the_builder_sees(made)), whole) != whole:
        mark += 1
        spend()
        made[MARK] = mark
    return made


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _as_the_builder_sees(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _as_the_builder_sees(inner) for name, inner in value.items() if name not in _LEFT_OUT}
    return [_as_the_builder_sees(one) for one in value] if isinstance(value, list) else value


def _undescribed(schema: Any) -> Any:
    """A schema without what describes it, and without marks."""
    if not isinstance(schema, dict):
        return schema
    made = {}
    for name, inner in schema.items():
        if name in _LEFT_OUT or name == MARK:
            continue
        if name in _NAMED:
            inner = {one: _undescribed(value) for one, value in inner.items()}
        elif name in _LISTED:
            inner = [_undescribed(one) for one in inner]
        elif name in _SINGLE:
            inner = _undescribed(inner)
        made[name] = inner
    return made
