"""Every command of `serve-app` with its arguments and options, from the program itself."""

from __future__ import annotations

import enum
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import typer

from serve_app.cli.commands import app

NAME = "serve-app"
REQUIRED = "required"
SHARED_HEADING = "Shared options"
SHARED_FROM = 3  # commands with the same option: it is described once for all of them
GIVEN_AGAIN = "may be given again"


@dataclass(frozen=True, slots=True)
class Parameter:
    """An argument or option. `shown`: with the form of its value, and `...` if it may be given again."""

    shown: str
    default: str
    text: str
    is_argument: bool


@dataclass(frozen=True, slots=True)
class Command:
    """One command; `name`: with that of its group."""

    name: str
    text: str
    parameters: tuple[Parameter, ...]

    @property
    def usage(self) -> str:
        return " ".join([self.name, *(each.shown for each in self.parameters if each.is_argument)])


def commands() -> list[Command]:
    """All commands, in the program's order."""
    return list(_below(typer.main.get_command(app), ""))


def _below(group: Any, prefix: str) -> Iterator[Command]:
    for name, command in vars(group)["commands"].items():
        if vars(command).get("commands"):
            yield from _below(command, f"{prefix}{name} ")
        elif not command.hidden:
            parameters = tuple(_parameter(each) for each in command.params if not vars(each).get("hidden"))
            yield Command(f"{prefix}{name}", _one_line(command.help), parameters)


def _parameter(found: Any) -> Parameter:
    is_argument = found.param_type_name == "argument"
    text = _one_line(found.help)
    values = _values(found.type_descriptor.annotation)
    if isinstance(values, list):
        text += " One of " + ", ".join(f"`{value}`" for value in values) + "."
    text = text.replace(f"; {GIVEN_AGAIN}", "")
    if found.envvar:
        text += f" Else the variable `{found.envvar}`."
    if is_argument:
        name = found.metavar or found.name.upper()
        return Parameter(name if found.required else f"[{name}]", _default(found), text, True)
    value = "" if not values else f" {found.metavar or (values if isinstance(values, str) else 'NAME')}"
    value += "..." if found.multiple else ""
    names = ["/".join([*found.opts, *found.secondary_opts])] if found.secondary_opts else found.opts
    return Parameter(", ".join(f"`{name}{value}`" for name in names), _default(found), text, False)


def _values(annotation: Any) -> str | list[str]:
    """The form of an option's value, or all values that it may have; empty: it takes none."""
    inner = [each for each in get_args(annotation) if each is not type(None)]
    kind = inner[0] if inner else annotation
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return [str(member.value) for member in kind]
    return {bool: "", int: "N", float: "N", Path: "FILE"}.get(kind, "TEXT")


def _default(found: Any) -> str:
    if found.required:
        return REQUIRED
    if found.default in (None, False, "", True):
        return "`" + found.opts[0] + "`" if found.default is True else ""
    shown = f"{found.default:g}" if isinstance(found.default, float) else str(found.default)
    return f"`{shown}`"


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|")


def sections() -> str:
    """The options that many commands share, then a section for each command."""
    found = commands()
    shared = _shared(found)
    parts = [f"### {SHARED_HEADING}", "", *(f"{_item(each)} {_users(each, found)}" for each in shared)]
    for command in found:
        own = [each for each in command.parameters if each not in shared]
        parts += ["", f"### `{command.usage}`", "", command.text]
        parts += ["", *map(_item, own)] if own else []
    return "\n".join(parts)


def _shared(found: list[Command]) -> list[Parameter]:
    users = Counter(each for command in found for each in command.parameters)
    return [each for each, count in users.items() if count >= SHARED_FROM]


def _users(parameter: Parameter, found: list[Command]) -> str:
    """Which commands have a shared option, or which have not; a group in which all are alike is named once."""
    has = {command.name: _takes(command, parameter) for command in found}
    groups: dict[str, set[bool]] = defaultdict(set)
    for name, is_there in has.items():
        groups[name.split()[0]].add(is_there)
    names = {name.split()[0] if len(groups[name.split()[0]]) == 1 else name: is_there for name, is_there in has.items()}
    lacking = [name for name, is_there in names.items() if not is_there]
    having = [name for name, is_there in names.items() if is_there]
    if len(lacking) < len(having):
        return "All commands have it" + (f" but {_in_backticks(lacking)}." if lacking else ".")
    return f"Of {_in_backticks(having)}."


def _takes(command: Command, parameter: Parameter) -> bool:
    """Whether it has this argument, or an option of this name, be it described in other words."""
    if parameter.is_argument:
        return parameter in command.parameters
    return any(each.shown == parameter.shown for each in command.parameters)


def _in_backticks(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _item(found: Parameter) -> str:
    """A required argument is seen from the usage; a required option says so in place of a default."""
    shown = f"`{found.shown}`" if found.is_argument else found.shown
    default = f" ({found.default})" if found.default and not found.is_argument else ""
    return f"- {shown}{default}: {found.text}"
