"""Values of a configuration from the environment: `${NAME}` in a scalar, `$$` for a dollar.

Decides: what a scalar with `${NAME}` stands for, and how it is shown.
In: what YAML has made of a file, the environment of the process that resolves it. Out: the values, and their names.
Never: shows a value that came from a variable.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_PART = re.compile(r"\$\$|\$\{[^}]*\}?")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

Place = tuple[str | int, ...]  # of a value: `("models", 0, "drain_s")`
# Of each scalar with a variable its text in the file, at its place; positions in lists are keys, too.
Names = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Resolved:
    """A configuration with the values of its variables.

    Args:
        names: the texts of the scalars that have a variable.
        wrong: the places of variables that cannot be resolved, and why.
    """

    data: Any
    names: Names
    wrong: tuple[tuple[Place, str], ...]


def resolve(data: Any, environment: Mapping[str, str]) -> Resolved:
    """The same with each `${NAME}` replaced by the variable's value, and each `$$` by a dollar."""
    wrong: list[tuple[Place, str]] = []
    value, names = _resolve(data, environment, (), wrong)
    return Resolved(value, names if isinstance(names, dict) else {}, tuple(wrong))


def _resolve(
    data: Any, environment: Mapping[str, str], at: Place, wrong: list[tuple[Place, str]]
) -> tuple[Any, dict[str, Any] | str]:
    """The value, and its names: a text for a scalar, empty without a variable."""
    if isinstance(data, str):
        return _of_scalar(data, environment, at, wrong)
    if not isinstance(data, dict | list):
        return data, ""
    items = list(data.items() if isinstance(data, dict) else enumerate(data))
    wrong += [((*at, key), "a variable stands for a value, not for a key") for key, _ in items if "${" in str(key)]
    found = {key: _resolve(value, environment, (*at, key), wrong) for key, value in items}
    values = {key: value for key, (value, _) in found.items()}
    names = {str(key): names for key, (_, names) in found.items() if names}
    return values if isinstance(data, dict) else list(values.values()), names


def _of_scalar(text: str, environment: Mapping[str, str], at: Place, wrong: list[tuple[Place, str]]) -> tuple[str, str]:
    variables = [part[2:-1] for part in _PART.findall(text) if part != "$$"]
    for part in _PART.findall(text):
        if part == "$$":
            continue
        name = part[2:].removesuffix("}")
        if not part.endswith("}") or _NAME.fullmatch(name) is None:
            wrong.append((at, f"{part} names no variable: ${{NAME}} does, and $$ writes a dollar"))
            return text, text
        if name not in environment:
            wrong.append((at, f"the variable {name} is not set"))
            return text, text

    def value_of(part: re.Match[str]) -> str:
        return "$" if part[0] == "$$" else environment[part[0][2:-1]]

    return _PART.sub(value_of, text), text if variables else ""


def escaped(data: Any) -> Any:
    """The same as it stands in a file: `resolve` makes it of that again, without any variable."""
    if isinstance(data, dict):
        return {key: escaped(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [escaped(value) for value in data]
    return data.replace("$", "$$") if isinstance(data, str) else data


def with_names(data: Any, names: Names | str | None) -> Any:
    """The same with the text of each scalar that has a variable, in place of its value."""
    if not names:
        return data
    if isinstance(names, str):
        return names
    if isinstance(data, dict):
        return {key: with_names(value, names.get(str(key))) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [with_names(value, names.get(str(index))) for index, value in enumerate(data)]
    return data


def masked(message: str, data: Any, names: Names, place: Place) -> str:
    """A message about a place, with the text of each variable there in place of its value.

    Args:
        data: with the values of the variables.
    """
    found: Any = names
    for part in place:
        if isinstance(found, str) or not found:
            break
        found = found.get(str(part))
        data = _inside(data, part)
    for value, text in sorted(_values(data, found), key=lambda pair: len(pair[0]), reverse=True):
        message = re.sub(rf"(?<!\w){re.escape(value)}(?!\w)", lambda _: text, message)  # noqa: B023
    return message


def _inside(data: Any, part: str | int) -> Any:
    if isinstance(data, dict):
        return data.get(part)
    return data[part] if isinstance(data, list) and isinstance(part, int) and part < len(data) else None


def _values(data: Any, names: Names | str | None) -> Iterator[tuple[str, str]]:
    """Each value that came from a variable, and its text."""
    if isinstance(names, str):
        if isinstance(data, str | int | float) and not isinstance(data, bool) and data != "":
            yield str(data), names
        return
    for key, inner in (names or {}).items():
        part = int(key) if isinstance(data, list) else key
        yield from _values(_inside(data, part), inner)
