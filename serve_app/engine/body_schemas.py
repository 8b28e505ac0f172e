"""How bodies are read: copies of the schemas of pydantic's models, which end at the first wrong entry of a list or an
object, and to which null asks for nothing.

Invariant: a field that an object may lack, and that may not be null, is as absent if it is null. A null that is a value
stays: in a schema of an answer, in what any value may be.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

Schema: TypeAlias = Any  # pydantic's core schema: dictionaries in dictionaries

UNIONS = ("union", "tagged-union")
DICTS = ("typed-dict", "model-fields")
_COLLECTIONS = frozenset(("list", "tuple", "set", "frozenset", "dict"))  # pydantic's kinds that can end at an error


def as_bodies_are_read(schema: Schema) -> Schema:
    """The schema whose lists and objects end at their first wrong entry, and for which null asks for nothing."""
    return SchemaCopy(lambda part, copy: None).of(schema)


def validator_of(like: Any, schema: Schema) -> Any:
    """pydantic's validator, of the class of `like`, without the validators that inner models have made already."""
    return type(like)(schema, _use_prebuilt=False)


class SchemaCopy:
    """Copies of a schema's parts, whose collections end at their first wrong entry, and whose objects lack the fields
    that are null and need not be there. A schema repeats the same parts, by identity.

    Args:
        replaced: what stands in place of a part, made with copies of its own parts; None: a copy of it.
        suffix: of the names of definitions, of which a schema may have several copies.
    """

    def __init__(
        self, replaced: Callable[[Schema, Callable[[Schema], Schema]], Schema | None], suffix: str = ""
    ) -> None:
        self._replaced = replaced
        self._suffix = suffix
        self._known: dict[int, Schema] = {}

    def of(self, schema: Schema) -> Schema:
        if isinstance(schema, list | tuple):
            return type(schema)(map(self.of, schema))
        if not isinstance(schema, dict):
            return schema
        if id(schema) not in self._known:
            found = self._replaced(schema, self.of)
            if found is None:
                found = {name: self.of(part) for name, part in schema.items()}
                if str(found.get("type")) in _COLLECTIONS:  # a field may be named so, too
                    found["fail_fast"] = True
            for name in ("ref", "schema_ref"):
                if isinstance(found.get(name), str):
                    found[name] += self._suffix
            if found.get("type") in DICTS and (names := nulls_left_out(schema)):
                reference = {"ref": found.pop("ref")} if "ref" in found else {}
                read = {"type": "no-info", "function": functools.partial(_without_nulls, names)}
                found = {"type": "function-before", "function": read, "schema": found, **reference}
            self._known[id(schema)] = found
        return self._known[id(schema)]


def nulls_left_out(schema: Schema) -> frozenset[str]:
    """The fields of an object that it may lack, and that may not be null."""
    fields = schema["fields"]
    named = fields.items() if isinstance(fields, dict) else [(one["name"], one) for one in fields]
    return frozenset(
        alias_of(one, name) for name, one in named if _may_be_absent(one) and not _takes_null(one["schema"])
    )


def _may_be_absent(field: Schema) -> bool:
    return field.get("required") is False or bool(field["schema"]["type"] == "default")


def _takes_null(schema: Schema) -> bool:
    """Whether null is a value of its own for a schema, without those that it refers to."""
    if schema["type"] in UNIONS:
        return any(map(_takes_null, choices_of(schema)))
    if schema["type"] not in ("nullable", "none", "any") and isinstance(schema.get("schema"), dict):
        return _takes_null(schema["schema"])
    return schema["type"] in ("nullable", "none", "any")


def _without_nulls(names: frozenset[str], value: Any) -> Any:
    """An object without those of its fields that are null; any other value."""
    if not isinstance(value, dict) or None not in value.values():
        return value
    return {name: one for name, one in value.items() if one is not None or name not in names}


def choices_of(schema: Schema) -> list[Schema]:
    """The branches of a union, without their names."""
    choices = schema["choices"]
    given = choices.values() if isinstance(choices, dict) else choices
    return [one[0] if isinstance(one, tuple) else one for one in given]


def alias_of(field: Schema, name: str) -> str:
    """The name of a field in a body."""
    alias = field.get("validation_alias")
    return alias if isinstance(alias, str) else name
