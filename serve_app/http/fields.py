"""The fields of a body and of a query: known names only, and a refusal that names the field."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, TypeVar
from urllib.parse import parse_qsl

from pydantic import BaseModel, ValidationError

from serve_app.errors import BadRequest

SHOWN_NAME_CHARS = 40  # of an unknown field or parameter, in the error

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
        field, reason = ".".join(map(str, first["loc"])), first["msg"]
        if first["type"] == "extra_forbidden":
            reason = f"there is no such field; there are {', '.join(fields.model_fields)}"
        raise BadRequest(f"`{field}`: {reason}", param=field) from None


def query_words(query: bytes, known: Collection[str]) -> dict[str, str]:
    """The parameters of a URL; of one given twice, the last.

    Raises:
        BadRequest: one that is not `known`.
    """
    words = dict(parse_qsl(query.decode("latin-1"), keep_blank_values=True))
    for name in words:
        if name not in known:
            shown = name[:SHOWN_NAME_CHARS]
            raise BadRequest(f"{shown!r} is no parameter of this route: {', '.join(known)}", param=shown)
    return words


def query_number(words: Mapping[str, str], name: str, default: int, most: int) -> int:
    """A parameter that is a whole number from 1 to `most`. Raises BadRequest."""
    text = words.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) <= len(str(most)) and 1 <= int(text) <= most):
        raise BadRequest(f"`{name}` must be a whole number from 1 to {most}", param=name)
    return int(text)
