"""The fields of a body and of a query: known names only, and a refusal that names the field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, TypeVar, get_args
from urllib.parse import parse_qsl

from pydantic import BaseModel, ValidationError

from serve_app.errors import BadRequest

SHOWN_NAME_CHARS = 40  # of an unknown field or parameter, in the error
TIME_EXAMPLE = "2027-01-31T00:00:00Z"

F = TypeVar("F", bound=BaseModel)


def parse_fields(fields: type[F], body: Mapping[str, Any]) -> F:
    """The body as these fields.

    Raises:
        BadRequest: the first wrong field, by its dotted path.
    """
    try:
        return fields.model_validate(body)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        reason = first["msg"].removeprefix("Value error, ")
        if first["type"] == "extra_forbidden":
            known = ", ".join(_model_at(fields, first["loc"][:-1]).model_fields)
            reason = f"there is no such field; there are {known}"
        elif first["type"] in ("model_type", "dict_type"):
            reason = "Input should be an object"
        raise BadRequest(f"`{field}`: {reason}", param=field) from None


def _model_at(fields: type[BaseModel], place: tuple[int | str, ...]) -> type[BaseModel]:
    """The fields of an object in a body, whose own fields are `fields`."""
    for name in place:
        kind = fields.model_fields[str(name)].annotation
        fields = next(one for one in (kind, *get_args(kind)) if isinstance(one, type) and issubclass(one, BaseModel))
    return fields


def query_pairs(query: bytes, known: Sequence[str]) -> list[tuple[str, str]]:
    """The parameters of a URL, each with its value.

    Raises:
        BadRequest: one that is not `known`, or has a NUL, which no database can look for.
    """
    pairs = parse_qsl(query.decode("latin-1"), keep_blank_values=True)
    for name, value in pairs:
        if name not in known:
            shown = name[:SHOWN_NAME_CHARS]
            raise BadRequest(f"{shown!r} is no parameter of this route: {', '.join(known)}", param=shown)
        if "\0" in value:
            raise BadRequest(f"`{name}` has a NUL", param=name)
    return pairs


def query_words(query: bytes, known: Sequence[str]) -> dict[str, str]:
    """The same; of a parameter given twice, the last. Raises as `query_pairs`."""
    return dict(query_pairs(query, known))


def query_number(words: Mapping[str, str], name: str, default: int, most: int) -> int:
    """A parameter that is a whole number from 1 to `most`. Raises BadRequest."""
    text = words.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) <= len(str(most)) and 1 <= int(text) <= most):
        raise BadRequest(f"`{name}` must be a whole number from 1 to {most}", param=name)
    return int(text)


def time_of(text: str, name: str) -> float:
    """A time in ISO 8601 with its offset, in seconds since 1970 UTC. `name`: of the field or parameter. Raises
    BadRequest."""
    try:
        time = datetime.fromisoformat(text)
        if time.tzinfo is None:
            raise ValueError
        return time.timestamp()
    except (ValueError, OverflowError):
        reason = f"`{name}` must be a time with its offset from UTC, such as {TIME_EXAMPLE}"
        raise BadRequest(reason, param=name) from None
