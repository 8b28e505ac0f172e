"""Says a schema in a form that the grammar enforces, or refuses it by the keyword that no such form has.

Each place gets exactly one of `$ref`, `const`, `enum`, `anyOf`, or keywords of its types (`keywords` says why); what
stands beside it is joined with it (`join`). A reference stays one, and names a schema under `$defs` or `definitions`.

Invariant: a value that the grammar of the result accepts satisfies the schema. A schema without a `type` whose keywords
speak of some types accepts only values of these; an object without `additionalProperties` has only what it declares.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from serve_app.core.schemas.budget import SchemaBudget
from serve_app.core.schemas.distinct import distinct
from serve_app.core.schemas.join import CannotJoin, Joiner, Schema, any_of, keywords_of, plain, types_of, values_of
from serve_app.core.schemas.keywords import KEYWORDS, Enforcement, is_number, speaks_of
from serve_app.core.schemas.settle import MAX_INTEGER, refuse, settled
from serve_app.errors import BadRequest

_ESCAPED_BYTES = re.compile(r"(?:%[0-9a-fA-F]{2})+")  # of a pointer in a URL
_DEFINITIONS = ("$defs", "definitions")
_ONE_OF_ITS_KIND = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
_SAYS_NOTHING: dict[str, Callable[[Any, Mapping[str, Any]], bool]] = {
    "uniqueItems": lambda value, beside: value is False,
    "multipleOf": lambda value, beside: value == 1 and types_of(beside) == ("integer",),
    "minContains": lambda value, beside: "contains" not in beside,
    "maxContains": lambda value, beside: "contains" not in beside,
    "if": lambda value, beside: "then" not in beside and "else" not in beside,
    "then": lambda value, beside: "if" not in beside,
    "else": lambda value, beside: "if" not in beside,
    "not": lambda value, beside: value is False,
    "dependentRequired": lambda value, beside: value == {},
    "dependentSchemas": lambda value, beside: value == {},
    "dependencies": lambda value, beside: value == {},
}


def enforced(
    schema: Any,
    path: str,
    *,
    is_object: bool = False,
    met: dict[str, str] | None = None,
    budget: SchemaBudget | None = None,
) -> Any:
    """The schema as the grammar enforces it; the same one, if it is enforced as it is.

    Args:
        path: of the schema in the client's body.
        is_object: its values are objects whatever it says; one that says nothing has no properties.
        met: as of `distinct`, where one grammar is made of several schemas.
        budget: of the request; None: that of one schema.

    Raises:
        BadRequest: `param` is the path of the keyword that cannot be enforced. TooManyParts: see `budget`.
    """
    left = SchemaBudget() if budget is None else budget
    made = _Rewriting(schema, path, left).whole(is_object)
    made = distinct(made, {} if met is None else met, lambda: left.spend(path))
    return schema if made == schema else made


def _decoded(escaped: re.Match[str]) -> str:
    return bytes.fromhex(escaped[0].replace("%", "")).decode(errors="replace")


class _Rewriting:
    def __init__(self, root: Any, path: str, budget: SchemaBudget) -> None:
        self._root = root
        self._path = path
        self._budget = budget
        self._targets: dict[str, Schema] = {}  # by the pointer of a reference
        self._open: set[str] = set()  # pointers that are being read
        self._wanted: dict[str, tuple[str, str]] = {}  # by pointer: the container and the name of its definition
        self._pointers: dict[str, str] = {}  # by the reference that is made of it
        self._joiner = Joiner(lambda reference: self._target(self._pointers[reference]), self._spend)

    def whole(self, is_object: bool) -> Schema:
        made = self._part(self._root, self._path)
        if made is False:
            raise BadRequest(f"no value satisfies `{self._path}`", param=self._path)
        if is_object:
            made = self._object(made)
        done: dict[str, dict[str, Schema]] = {}
        while left := [pointer for pointer in self._wanted if pointer not in done.get("", {})]:
            for pointer in left:
                container, name = self._wanted[pointer]
                if self._target(pointer) is False:
                    raise BadRequest(f"no value satisfies `{pointer}` of `{self._path}`", param=self._path)
                done.setdefault(container, {})[name] = done.setdefault("", {})[pointer] = self._target(pointer)
        self._refuse_empty_circles()
        kept = {name: value for name, value in done.items() if name}
        whole = made | kept if isinstance(made, dict) else made
        self._check_size(whole)
        return whole

    def _check_size(self, made: Schema) -> None:
        """Refuse one whose parts, which it may have many times, are too many once they are written."""
        left = [made]
        while left:
            node = left.pop()
            self._budget.write(self._path)
            if isinstance(node, dict | list):
                left += node.values() if isinstance(node, dict) else node

    def _object(self, made: Schema) -> Schema:
        described = {name: value for name, value in made.items() if name not in KEYWORDS} if made is not True else {}
        if made is True or not keywords_of(made):
            return {**described, "type": "object", "properties": {}}
        try:
            joined = self._joiner.join(made, {"type": "object"}) if not self._is_object(made) else made
        except CannotJoin as error:
            refuse(self._path, error.keyword, "a tool's arguments are an object")
        if joined is False:
            raise BadRequest(
                f"`{self._path}` accepts no object, and a tool's arguments are one", param=f"{self._path}.type"
            )
        return {**described, **joined} if joined is not made else made

    def _is_object(self, made: Schema) -> bool:
        """Whether a schema accepts objects alone, as it stands."""
        if not isinstance(made, dict):
            return False
        if "$ref" in made:
            return self._joiner.excludes(made, {"type": ["null", "boolean", "number", "string", "array"]})
        if "anyOf" in made:
            return all(map(self._is_object, made["anyOf"]))
        values = values_of(made)
        return types_of(made) == ("object",) if values is None else all(isinstance(value, dict) for value in values)

    def _spend(self) -> None:
        self._budget.spend(self._path)

    def _target(self, pointer: str) -> Schema:
        """The schema that a reference names, in its new form. Raises CannotJoin: it is being made."""
        if pointer not in self._targets:
            if pointer in self._open:
                raise CannotJoin("$ref")
            self._open.add(pointer)
            found, path = self._found(pointer)
            self._targets[pointer] = self._part(found, path)
            self._open.discard(pointer)
        return self._targets[pointer]

    def _found(self, pointer: str) -> tuple[Any, str]:
        """What a pointer names, and its path. Raises LookupError."""
        found = self._root
        path = self._path
        for part in pointer.split("/")[1:]:
            name: Any = _ESCAPED_BYTES.sub(_decoded, part).replace("~1", "/").replace("~0", "~")
            if isinstance(found, list):
                name = int(name)
            found = found[name]
            path = f"{path}.{name}"
        if not isinstance(found, dict | bool):
            raise LookupError(pointer)
        return found, path

    def _reference(self, reference: str, path: str) -> Schema:
        if reference != "#" and not reference.startswith("#/"):
            refuse(path, "$ref", "it must name a part of this schema, `#/...`")
        try:
            found, _ = self._found(reference)
        except (LookupError, TypeError, ValueError):
            refuse(path, "$ref", f"there is no `{reference}` in this schema")
        if isinstance(found, bool):
            return found
        if reference not in self._wanted:
            container = _DEFINITIONS[0]
            name = self._new_name()
            parts = reference.split("/")
            if len(parts) == 3 and parts[1] in _DEFINITIONS and not {"%", "~"} & set(parts[2]):
                container = parts[1]
                name = parts[2]
            self._wanted[reference] = (container, name)
        container, name = self._wanted[reference]
        made = f"#/{container}/{name}"
        self._pointers[made] = reference
        return {"$ref": made}

    def _new_name(self) -> str:
        given = self._root.get(_DEFINITIONS[0])
        theirs = given if isinstance(given, dict) else {}
        numbers = range(len(self._wanted), len(self._wanted) + len(theirs) + 1)
        return next(name for name in (f"part-{number}" for number in numbers) if name not in theirs)

    def _refuse_empty_circles(self) -> None:
        """Refuse references that lead back to themselves, and to nothing else."""
        for start in self._wanted:
            seen = {start}
            at = start
            while isinstance(self._targets[at], dict) and "$ref" in self._targets[at]:
                at = self._pointers[self._targets[at]["$ref"]]
                if at in seen:
                    refuse(self._path, "$ref", f"`{start}` only leads back to itself")
                seen.add(at)

    def _part(self, schema: Any, path: str, settled: bool = True) -> Schema:
        """The schema at a path. `settled`: it is not joined with others."""
        self._spend()
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise BadRequest(f"`{path}` must be a schema: an object, true or false", param=path)
        types = self._checked_types(schema, path)
        known = {name: value for name, value in schema.items() if name in KEYWORDS and speaks_of(name, types)}
        for name, value in list(known.items()):
            keyword = KEYWORDS[name]
            if not keyword.shape(value):
                raise BadRequest(f"`{path}.{name}` must be {keyword.right}", param=f"{path}.{name}")
            if keyword.enforcement is Enforcement.REFUSED:
                says_nothing = _SAYS_NOTHING.get(name)
                if says_nothing is None or not says_nothing(value, known):
                    refuse(path, name, keyword.why)
                del known[name]
        described = {
            name: value
            for name, value in schema.items()
            if name not in _DEFINITIONS and not (name in KEYWORDS and speaks_of(name, types))
        }
        made = self._joined(self._pieces(known, path), known, described, path)
        if settled:
            made = self._settled(made, path)
        return {**described, **made} if isinstance(made, dict) and described else made

    def _checked_types(self, schema: Mapping[str, Any], path: str) -> frozenset[str]:
        named = schema.get("type")
        keyword = KEYWORDS["type"]
        if "type" in schema and not keyword.shape(named):
            raise BadRequest(f"`{path}.type` must be {keyword.right}", param=f"{path}.type")
        return frozenset(types_of(schema))

    def _pieces(self, known: Mapping[str, Any], path: str) -> list[Schema]:
        """What stands beside each other at a place, each in the form of its own, without `oneOf`."""
        typed = {name: value for name, value in known.items() if name not in _ONE_OF_ITS_KIND}
        beside = len(known) > len(typed)
        alone = len(known) == 1
        pieces: list[Schema] = [self._typed(typed, path, beside)] if typed else []
        if "$ref" in known:
            pieces.append(self._reference(known["$ref"], path))
        for name in ("const", "enum"):
            if name in known:
                self._check_numbers(known[name], f"{path}.{name}")
                pieces.append({name: known[name]})
        for number, part in enumerate(known.get("allOf", ())):
            pieces.append(self._part(part, f"{path}.allOf.{number}", settled=False))
        if "anyOf" in known:
            branches = [self._part(one, f"{path}.anyOf.{at}", settled=alone) for at, one in enumerate(known["anyOf"])]
            pieces.append({"anyOf": branches})
        return pieces

    def _joined(
        self, pieces: list[Schema], known: Mapping[str, Any], described: Mapping[str, Any], path: str
    ) -> Schema:
        if "oneOf" not in known and len(pieces) == 1:
            return pieces[0]
        joined: Schema = {}
        try:
            for piece in pieces:
                joined = self._joiner.join(joined, piece)
            for name in ("enum", "const"):
                if known.keys() == {"type", name} and len(values_of(joined) or ()) == len(values_of(known) or ()):
                    return dict(known)  # the grammar ignores the type, which says nothing more
            if "oneOf" in known:
                joined = self._exclusive(joined, known["oneOf"], described, path)
        except CannotJoin as error:
            hidden = next(name for name in reversed(_ONE_OF_ITS_KIND) if name in known)
            refuse(path, hidden, f"with what stands beside it, or in it, `{error.keyword}` is said twice")
        return joined

    def _exclusive(self, beside: Schema, one_of: list[Any], described: Mapping[str, Any], path: str) -> Schema:
        """`oneOf` as `anyOf`, where no value satisfies two of its schemas. A `discriminator` names a property that
        OpenAPI requires."""
        alone = not keywords_of(beside)
        parts = [self._part(one, f"{path}.oneOf.{number}", settled=alone) for number, one in enumerate(one_of)]
        parts = [self._joiner.join(beside, part) for part in parts]
        discriminator = described.get("discriminator")
        named = discriminator.get("propertyName") if isinstance(discriminator, dict) else None
        if not self._exclude_each_other(parts) and isinstance(named, str):
            parts = [self._joiner.join(part, {"type": "object", "required": [named]}) for part in parts]
        if not self._exclude_each_other(parts):
            refuse(
                path,
                "oneOf",
                "a value may satisfy two of its schemas: use `anyOf`, or require a property with another"
                " `const` in each",
            )
        return any_of(parts)

    def _exclude_each_other(self, parts: list[Schema]) -> bool:
        listed = [plain(value) for part in parts for value in values_of(part) or ()]
        others = [part for part in parts if values_of(part) is None]
        values: Schema = {"enum": [value for part in parts for value in values_of(part) or ()]}
        return len(set(listed)) == len(listed) and all(
            self._joiner.excludes(one, other)
            for number, one in enumerate(others)
            for other in [*others[number + 1 :], *([values] if listed else [])]
        )

    def _check_numbers(self, value: Any, path: str) -> None:
        """Refuse numbers that the grammar builder rounds."""
        if isinstance(value, dict | list):
            for member in value.values() if isinstance(value, dict) else value:
                self._check_numbers(member, path)
        elif is_number(value) and isinstance(value, int) and not -MAX_INTEGER - 1 <= value <= MAX_INTEGER:
            raise BadRequest(f"`{path}`: {value} has more than 64 bits", param=path)

    def _typed(self, known: Mapping[str, Any], path: str, beside: bool) -> dict[str, Any]:
        """The keywords of types, with the schemas in them."""
        made = dict(known)
        if isinstance(made.get("items"), list):  # of drafts before 2020
            prefix = made.pop("items")
            if "additionalItems" in made:
                made["items"] = made.pop("additionalItems")
            if prefix:
                made["prefixItems"] = prefix
        made.pop("additionalItems", None)
        for rest, whole in (("unevaluatedItems", "items"), ("unevaluatedProperties", "additionalProperties")):
            value = made.pop(rest, True)
            if value is not True and whole not in made:
                if beside:
                    refuse(path, rest, "not beside `$ref`, `allOf`, `anyOf` or `oneOf`")
                made[whole] = value
        for name, at in (("items", "items"), ("additionalProperties", "additionalProperties")):
            if name in made:
                made[name] = self._part(made[name], f"{path}.{at}")
        if "propertyNames" in made:
            made["propertyNames"] = self._part(made["propertyNames"], f"{path}.propertyNames")
        if "prefixItems" in made:
            where = "prefixItems" if "prefixItems" in known else "items"
            made["prefixItems"] = [
                self._part(one, f"{path}.{where}.{number}") for number, one in enumerate(made["prefixItems"])
            ]
        for name in ("properties", "patternProperties"):
            if name in made:
                made[name] = {one: self._part(value, f"{path}.{name}.{one}") for one, value in made[name].items()}
        return made

    def _settled(self, made: Schema, path: str) -> Schema:
        """A joined schema whose keywords are all enforced where they stand."""
        if not isinstance(made, dict):
            return made
        if "anyOf" in made:
            kept = any_of([self._settled(one, path) for one in made["anyOf"]])
            return {**made, **kept} if isinstance(kept, dict) and "anyOf" in kept else kept
        if not keywords_of(made) or "$ref" in made or values_of(made) is not None:
            return made
        return settled(made, path)
