"""Finds the first fault of a body that a model refuses: of each union, in the branch that fits the client's value best.

pydantic notes the faults of every branch of a union, those that the client did not mean first, and reads some lists
(`Iterable`) only when somebody asks for their entries: such a fault has a path in that list alone.

Invariant: a path is one in the body, or of a field that is missing in one of its objects. A value that the model takes,
with all lists read, has no fault, unless `by_kind` is asked for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

from pydantic import BaseModel, TypeAdapter, ValidationError, ValidationInfo

from serve_app.engine.body_schemas import (
    DICTS,
    UNIONS,
    Schema,
    SchemaCopy,
    alias_of,
    choices_of,
    nulls_left_out,
    validator_of,
)

Path: TypeAlias = tuple[str | int, ...]

KINDS = ("type", "role")  # the fields by which the objects of a union differ, in the APIs of this server
_OBJECTS = (*DICTS, "dataclass-args")
_OBJECT_ERRORS = ("dict_type", "model_type", "model_attributes_type", "dataclass_type")
_TWO_FORMS = {"lax-or-strict": "lax_schema", "json-or-python": "python_schema"}  # with the form that is read here
_MARK = "\0"  # begins our names of a union's branches, in the paths of pydantic's errors
_AS_IS = f"{_MARK}as it is"  # the branch that takes what the model's own union takes
_MISSING = "missing"  # the type of pydantic's error
_SHOULD_BE = "Input should be "


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong with a body, and where."""

    path: Path
    message: str
    is_missing: bool = False
    options: tuple[str, ...] = ()  # what may stand there, as the message says


class FaultFinder:
    """Finds the faults of bodies.

    Args:
        model: of the bodies, or a union of models. Its own functions of a whole body are left out: they have errors of
            their own.
    """

    def __init__(self, model: Any) -> None:
        adapter: TypeAdapter[Any] = TypeAdapter(model)
        schema = adapter.core_schema
        definitions = schema["definitions"] if schema["type"] == "definitions" else []
        self._definitions: dict[str, Schema] = {one["ref"]: one for one in definitions}
        self._own = SchemaCopy(lambda part, copy: None)
        self._outer = SchemaCopy(functools.partial(self._replaced, True), " outside")
        self._inner = SchemaCopy(functools.partial(self._replaced, False), " inside")
        self._whole = self._without_functions(schema["schema"] if definitions else schema)
        copies = [copy.of(one) for copy in (self._own, self._outer, self._inner) for one in definitions]
        replaced = {"type": "definitions", "schema": self._outer.of(self._whole), "definitions": copies}
        self._validator = validator_of(adapter.validator, replaced)

    def find(self, body: Mapping[str, Any], *, by_kind: bool = False) -> Fault | None:
        """The first fault; None: the model takes the body.

        Args:
            by_kind: also an object that a lenient branch takes, and that is of a kind which other branches do not know.
        """
        try:
            self._validator.validate_python(body, context=by_kind)
        except ValidationError as error:
            faults = _resolved([_Line.of(one) for one in error.errors(include_url=False, include_input=False)], 0)
            return min(faults, key=_order, default=None)
        return None

    def _without_functions(self, schema: Schema) -> Schema:
        """The schema of a body without the functions around it."""
        while schema["type"].startswith("function-"):
            schema = schema["schema"]
        if schema["type"] == "model":
            return {**schema, "schema": self._without_functions(schema["schema"])}
        if schema["type"] == "union":
            return {**schema, "choices": [self._without_functions(one) for one in choices_of(schema)]}
        return schema

    def _replaced(self, is_outer: bool, schema: Schema, copy: Callable[[Schema], Schema]) -> Schema | None:
        """What stands in place of a part of the schema; None: a copy of it. `is_outer`: it is in no branch of a union
        of objects."""
        if schema.get("type") == "generator":
            entries = {"items_schema": copy(schema["items_schema"])} if "items_schema" in schema else {}
            return {"type": "list", "strict": True, "fail_fast": True, **entries}
        if schema.get("type") == "list":
            entries = {name: copy(part) for name, part in schema.items()}
            return {**entries, "strict": True, "fail_fast": True}  # an object is no list of its names
        if schema.get("type") in UNIONS and "choices" in schema:
            return self._union(is_outer, schema, copy)
        return None

    def _union(self, is_outer: bool, schema: Schema, copy: Callable[[Schema], Schema]) -> Schema:
        given = self._flat(schema)
        branches = [self._branch(one) for one in given]
        has_objects = sum(one.is_object for one in branches) > 1
        takes_own = has_objects and is_outer and schema is not self._whole
        if takes_own:
            copy = self._inner.of
        choices = [(copy(one), f"{_MARK}{number}") for number, one in enumerate(given)]
        if has_objects:
            choices = [
                ({"type": "function-before", "function": _gate(branches, number), "schema": one}, name)
                for number, (one, name) in enumerate(choices)
            ]
        if takes_own:
            own = self._own.of({name: part for name, part in schema.items() if name != "ref"})
            read = {"type": "with-info", "function": _read_as_it_is}
            choices.insert(0, ({"type": "function-after", "function": read, "schema": own}, _AS_IS))
        kept = {name: part for name, part in schema.items() if name == "ref"}
        return {"type": "union", "mode": "left_to_right", "choices": choices, **kept}

    def _flat(self, schema: Schema) -> list[Schema]:
        """The branches of a union, and of those that are unions themselves."""
        found = list[Schema]()
        for choice in choices_of(schema):
            resolved = self._definitions[choice["schema_ref"]] if choice["type"] == "definition-ref" else choice
            found += self._flat(resolved) if resolved["type"] in UNIONS else [choice]
        return found

    def _branch(self, schema: Schema) -> _Branch:
        """What tells whether a value is meant for this branch."""
        inner = self._unwrapped(schema)
        fields = inner.get("fields")
        if inner["type"] not in _OBJECTS or fields is None:
            return _Branch()
        named = fields.items() if isinstance(fields, dict) else [(one["name"], one) for one in fields]
        by_name = {alias_of(one, name): self._unwrapped(one["schema"]) for name, one in named}
        kinds = {name: self._values(by_name[name]) for name in KINDS if name in by_name}
        return _Branch(True, frozenset(by_name), kinds, nulls_left_out(inner))

    def _unwrapped(self, schema: Schema) -> Schema:
        """The schema within functions, defaults, and references to definitions."""
        while True:
            if schema["type"] == "definition-ref":
                schema = self._definitions[schema["schema_ref"]]
            elif schema["type"] in _TWO_FORMS:
                schema = schema[_TWO_FORMS[schema["type"]]]
            elif "schema" in schema and isinstance(schema["schema"], dict):
                schema = schema["schema"]
            else:
                return schema

    def _values(self, schema: Schema) -> tuple[Any, ...] | None:
        """The values that a field may have; None: any text, or not known."""
        if schema["type"] in UNIONS:
            of_each = [self._values(self._unwrapped(one)) for one in self._flat(schema)]
            return None if None in of_each else tuple(value for values in of_each for value in values or ())
        return tuple(schema["expected"]) if schema["type"] == "literal" else None


class _Branch(NamedTuple):
    """A branch of a union. `kinds`: by field of `KINDS` that it has, the values that this may have; None: any text.
    `needless`: fields that are as absent if they are null."""

    is_object: bool = False
    names: frozenset[str] = frozenset()
    kinds: Mapping[str, tuple[Any, ...] | None] = {}
    needless: frozenset[str] = frozenset()


class _OtherBranch(ValueError):
    """A value is for another branch."""


class _WrongKind(ValueError):
    """A value is for no branch. `path`: of its field at fault."""

    def __init__(self, path: Path, expected: tuple[str, ...]) -> None:
        super().__init__(path, expected)
        self.path = path
        self.expected = expected


def _best(branches: list[_Branch], value: Any) -> list[int]:
    """The numbers of the branches that fit a value best. Raises _WrongKind: it is for none of them."""
    if not isinstance(value, dict):
        others = [number for number, one in enumerate(branches) if not one.is_object]
        if not others:
            raise _WrongKind((), ("an object",))
        return others
    left = [number for number, one in enumerate(branches) if one.is_object]
    for name in KINDS:
        if name in value:
            left = _of_kind(branches, left, name, value[name])
    known = {number: len(branches[number].names & value.keys()) for number in left}
    return [number for number in left if known[number] == max(known.values())]


def _of_kind(branches: list[_Branch], left: list[int], name: str, given: Any) -> list[int]:
    """Those of the branches whose field `name` may have the value `given`. Raises as `_best`."""
    if given is None and any(name in branches[number].needless for number in left):
        return [n for n in left if name not in branches[n].kinds or name in branches[n].needless]
    values = {number: branches[number].kinds[name] for number in left if name in branches[number].kinds}
    fitting = [n for n, allowed in values.items() if (isinstance(given, str) if allowed is None else given in allowed)]
    expected = dict.fromkeys(repr(value) for allowed in values.values() for value in allowed or ())
    if expected and not fitting:
        raise _WrongKind((name,), tuple(expected))
    return fitting or left


def _gate(branches: list[_Branch], number: int) -> Schema:
    """Lets a value into a branch, if this is one of those that fit best."""

    def gate(value: Any) -> Any:
        if number not in _best(branches, value):
            raise _OtherBranch
        return value

    return {"type": "no-info", "function": gate}


def _read_as_it_is(value: Any, info: ValidationInfo) -> Any:
    """The value, if all that is read late in it can be read; raises ValidationError."""
    if info.context:
        raise _OtherBranch
    _read(value)
    return value


def late_fault(value: Any, path: Path = ()) -> Fault | None:
    """The first fault of a valid body that shows only when its lists are read; a list cannot be read again."""
    if isinstance(value, BaseModel):
        value = dict(value)
    if isinstance(value, Iterator):
        try:
            value = list(value)
        except ValidationError as error:
            fault = _Line.of(error.errors(include_url=False, include_input=False)[0]).fault
            return replace(fault, path=(*path, *fault.path))
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = (late_fault(one, (*path, name)) for name, one in entries)
    return next((one for one in found if one is not None), None)


def _read(value: Any) -> None:
    if isinstance(value, dict):
        value = value.values()
    if isinstance(value, Iterable) and not isinstance(value, str | bytes | BaseModel):
        for item in value:
            _read(item)


@dataclass(frozen=True, slots=True)
class _Line:
    """An error of pydantic: `place` has the names of our branches between the parts of the path."""

    place: Path
    fault: Fault
    is_known: bool = field(default=True)  # not an error of a branch that is left out

    @classmethod
    def of(cls, error: Any) -> _Line:
        place: Path = error["loc"]
        path = tuple(part for part in place if not _is_branch(part) and part != "[key]")
        raised = error.get("ctx", {}).get("error")
        is_known = not isinstance(raised, _OtherBranch) and _AS_IS not in place
        if isinstance(raised, _WrongKind):
            expected = raised.expected
            return cls(place, Fault((*path, *raised.path), _one_of(expected), options=expected), is_known)
        message = "Input should be an object" if error["type"] in _OBJECT_ERRORS else error["msg"]
        options = (message.removeprefix(_SHOULD_BE),) if message.startswith(_SHOULD_BE) else ()
        return cls(place, Fault(path, message, error["type"] == _MISSING, options), is_known)


def _one_of(options: tuple[str, ...]) -> str:
    *others, last = options
    return _SHOULD_BE + (f"{', '.join(others)} or {last}" if others else last)


def _is_branch(part: str | int) -> bool:
    return isinstance(part, str) and part.startswith(_MARK)


def _resolved(lines: list[_Line], depth: int) -> list[Fault]:
    """The faults of a value at this depth of the errors' places."""
    faults = list[Fault]()
    inner = dict[str | int, list[_Line]]()
    for line in lines:
        if not line.is_known:
            continue
        if len(line.place) == depth:
            faults.append(line.fault)
        else:
            inner.setdefault(line.place[depth], []).append(line)
    found = {part: _resolved(of_part, depth + 1) for part, of_part in inner.items()}
    branches = [one for part, one in found.items() if one and _is_branch(part)]
    for part, faults_of_part in found.items():
        if not _is_branch(part):
            faults += faults_of_part
    return faults + (_of_best_branch(branches) if branches else [])


def _order(fault: Fault) -> tuple[bool, int, bool]:
    """What is wrong comes first; of what is missing, that which is deepest, since a model may be filled in before it is
    read, and of one object its kind."""
    depth = len(fault.path) if fault.is_missing else 0
    return fault.is_missing, -depth, not fault.is_missing or fault.path[-1] not in KINDS


def _of_best_branch(branches: list[list[Fault]]) -> list[Fault]:
    """The faults of the branch that fits best; where several fit as well and have a fault at one place, it says what
    each of them takes."""
    best = min(map(_misfit, branches))
    equal = [faults for faults in branches if _misfit(faults) == best]
    first, *others = equal[0]
    named = [option for faults in equal if faults[0].path == first.path for option in faults[0].options]
    options = tuple(dict.fromkeys(named))
    return [replace(first, message=_one_of(options), options=options), *others] if first.options else equal[0]


def _misfit(faults: list[Fault]) -> tuple[Any, ...]:
    """How badly a branch fits: that it lacks something is better than that something is wrong, a fault deep in the
    value better than one at its top, one late in a list better than an early one."""
    wrong = [fault.path for fault in faults if not fault.is_missing]
    depth = min(map(len, wrong), default=0)
    entries = [-part for part in (wrong or [faults[0].path])[0] if isinstance(part, int)]
    return bool(wrong), -depth, entries, len(wrong), len(faults)
