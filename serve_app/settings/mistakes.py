"""What is wrong with a configuration: every mistake of it at once, with near names for unknown keys.

Invariant: a path names the key as the file has it, `models.0.replicas.min_replicas`.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from typing import Any, get_args

import pydantic
from pydantic import BaseModel

from serve_app.settings.field_words import counterpart
from serve_app.settings.variables import Place, Resolved, masked, with_names
from serve_app.settings.wrong_values import NEAR, describe
from serve_app.settings.yaml_file import YamlFile

_PLACE = re.compile(r"([a-z_]+(?:\.[a-z0-9_]+)*): ")  # of a key, at the beginning of a message


@dataclass(frozen=True, slots=True)
class Mistake:
    """One mistake.

    Args:
        advice: what to write instead; None: not known.
        line: of the file; None: there is no file.
    """

    path: str
    message: str
    is_unknown_key: bool = False
    advice: str | None = None
    line: int | None = None

    @property
    def located(self) -> str:
        """The message with its line."""
        return self.message if self.line is None or self.is_unknown_key else f"line {self.line}: {self.message}"


@dataclass(frozen=True, slots=True)
class FileSource:
    """Where a mapping comes from: its file, and what its variables stand for."""

    file: YamlFile
    resolved: Resolved

    def mistakes(self) -> list[Mistake]:
        """Of the file before its values are looked at: keys that stand twice, variables that cannot be resolved."""
        found = [(place, why) for place, why in (*self.file.doubles, *self.resolved.wrong)]
        return [Mistake(path_of(place), why, line=self.file.line_of(place)) for place, why in found]


def mistakes(error: pydantic.ValidationError, root: type[BaseModel], source: FileSource | None = None) -> list[Mistake]:
    """All mistakes that pydantic found in a mapping for `root`."""
    found = []
    for details in error.errors():
        place = tuple(part for part in details["loc"] if part != "[key]")
        if details["type"] == "extra_forbidden":
            found.append(_unknown_key(place, root))
            continue
        text = None if source is None else _named(source, place)
        value = text if isinstance(text, str) else details["input"]  # `${NAME}`, and never what it stands for
        written = None if source is None else source.file.written(place)
        message, advice = describe(details["type"], place, value, details.get("ctx", {}), details["msg"], written)
        if source is not None:
            message = masked(message, source.resolved.data, source.resolved.names, place)
        if details["type"] == "value_error":
            place, message = _place_in(place, message, root)
        line = None if source is None else source.file.line_of(place)
        found.append(Mistake(path_of(place), message, advice=advice, line=line))
    return found


def path_of(place: Place) -> str:
    return ".".join(map(str, place)) or "configuration"


def _place_in(place: Place, message: str, root: type[BaseModel]) -> tuple[Place, str]:
    """Where a message says that a mistake is, from the top or from the section that has found it; and its rest."""
    found = _PLACE.match(message)
    if found is None:
        return place, message
    parts = tuple(int(part) if part.isdigit() else part for part in found[1].split("."))
    is_from_top = parts[: len(place)] == place and parts[0] in root.model_fields
    return (parts if is_from_top else (*place, *parts)), message[found.end() :]


def _named(source: FileSource, place: Place) -> Any:
    """The text of the variable at a place, or what else is there."""
    found: Any = source.resolved.names
    for part in place:
        found = found.get(str(part)) if isinstance(found, dict) else None
    return with_names(None, found)


def _unknown_key(place: Place, root: type[BaseModel]) -> Mistake:
    section = root
    for part in place[:-1]:  # positions, and the keys of a mapping, are no fields
        field = section.model_fields.get(str(part))
        section = (_section_of(field.annotation) if field else None) or section
    name = str(place[-1])
    near = nearest(name, section.model_fields)
    advice = counterpart(name) or (f"did you mean {near}?" if near is not None else None)
    return Mistake(path_of(place), "; ".join(filter(None, ["unknown key", advice])), True, advice)


def nearest(name: str, known: Any) -> str | None:
    """The name among `known` that is most like this one; None: none is like it."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=NEAR)), None)


def _section_of(annotation: Any) -> type[BaseModel] | None:
    """The section within an annotation like `tuple[ModelSettings, ...]`; None: there is none."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for one in get_args(annotation) if (found := _section_of(one)) is not None), None)
