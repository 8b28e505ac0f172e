"""What is wrong with a configuration: every mistake of it at once, with near names for unknown keys.

Invariant: a path names the key as the file has it, `models.0.replicas.min_replicas`.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any, get_args

import pydantic
from pydantic import BaseModel

from serve_app.settings.field_words import counterpart

# pydantic's own words are Python's: "a valid tuple", "a valid dictionary or instance of ModelSettings"
WANTED = {"tuple_type": "a list is wanted, - or [...]", "model_type": "a mapping is wanted, key: value"}
NEAR = 0.6  # difflib's own cutoff: `max_num_seq` and `kv_cache` are near, `num_gpus` is not


@dataclass(frozen=True, slots=True)
class Mistake:
    """One mistake. `advice`: of an unknown key, which key may be meant; None: not known, or another mistake."""

    path: str
    message: str
    is_unknown_key: bool = False
    advice: str | None = None


def mistakes(error: pydantic.ValidationError, root: type[BaseModel]) -> list[Mistake]:
    """All mistakes that pydantic found in a mapping for `root`."""
    found = []
    for one in error.errors():
        path = ".".join(str(part) for part in one["loc"] if part != "[key]") or "configuration"
        if one["type"] != "extra_forbidden":
            found.append(Mistake(path, WANTED.get(one["type"], one["msg"].removeprefix("Value error, "))))
            continue
        section = root
        for part in one["loc"][:-1]:  # positions, and the keys of a mapping, are no fields
            field = section.model_fields.get(str(part))
            section = (_section_of(field.annotation) if field else None) or section
        name = str(one["loc"][-1])
        near = nearest(name, section.model_fields)
        advice = counterpart(name) or (f"did you mean {near}?" if near is not None else None)
        found.append(Mistake(path, "; ".join(filter(None, ["unknown key", advice])), True, advice))
    return found


def nearest(name: str, known: Any) -> str | None:
    """The name among `known` that is most like this one; None: none is like it."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=NEAR)), None)


def _section_of(annotation: Any) -> type[BaseModel] | None:
    """The section within an annotation like `tuple[ModelSettings, ...]`; None: there is none."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for one in get_args(annotation) if (found := _section_of(one)) is not None), None)
