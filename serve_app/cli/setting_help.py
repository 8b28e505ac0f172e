"""`serve-app help SETTING`: the items of docs/reference/settings.md, which an installed package has a copy of.

Invariant: what is shown is the document's own text; nothing is told in two places.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from typing import Annotated, Any

import typer
from rich.console import Console

from serve_app.cli.command_line import JsonOption, print_found
from serve_app.cli.layout import Listing
from serve_app.errors import BadRequest
from serve_app.settings import counterpart, nearest

ALL = "settings"
NOT_SET = "not set"
WORDS = ("required", NOT_SET)  # in place of a default
ITEM = re.compile(r"^- `([\w.<>\[\]]+)`(?: \((.*?)\))?: (.*)$", re.MULTILINE)
LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")


@dataclass(frozen=True, slots=True)
class Row:
    """One setting. `default`: one of `WORDS`, or the value."""

    setting: str
    default: str
    text: str


def rows() -> list[Row]:
    """All settings, in the document's order."""
    text = resources.files("serve_app.settings").joinpath("settings.md").read_text(encoding="utf-8")
    return [Row(name, default or NOT_SET, LINK.sub(r"\1", meaning)) for name, default, meaning in ITEM.findall(text)]


def matching(name: str, known: Sequence[Row]) -> list[Row]:
    """The rows of a setting or of a section, by its path, the end of it, or the path in an error (`models.0.name`).

    Raises:
        BadRequest: there is none; the message has a near one.
    """
    wanted = _parts(name)
    paths = [(_parts(row.setting), row) for row in known]
    for start, size in ((start, len(wanted) - start) for start in range(len(wanted))):
        asked = wanted[start:]
        exact = [row for path, row in paths if _is_like(path, asked)]
        below = [row for path, row in paths if _is_like(path[:size], asked)]
        ends = [row for path, row in paths if _is_like(path[-size:], asked)]
        inside = [row for path, row in paths if _holds(path, asked)]
        if found := exact or below or ends or inside:
            return found
    near = nearest(name, [row.setting for row in known] + [row.setting.rpartition(".")[2] for row in known])
    otherwise = f"did you mean {near}?" if near else f"`serve-app help {ALL}` lists all"
    hint = counterpart(wanted[-1]) or otherwise if wanted else otherwise
    raise BadRequest(f"there is no setting {name}; {hint}", param="setting")


def _parts(path: str) -> list[str]:
    """The names in a path, without the positions in lists."""
    return [part.removesuffix("[]") for part in path.split(".") if part and not part.isdigit()]


def _holds(path: Sequence[str], asked: Sequence[str]) -> bool:
    """Whether these names stand in it one after the other, as those of a section do (`tenants`)."""
    return any(tuple(path[start : start + len(asked)]) == tuple(asked) for start in range(len(path)))


def _is_like(path: Sequence[str], asked: Sequence[str]) -> bool:
    """Whether they are the same, where `<tenant>` stands for any name, and one name at least is equal."""
    if len(path) != len(asked):
        return False
    pairs = list(zip(path, asked, strict=True))
    same = [one.strip("<>") == other for one, other in pairs]
    return any(same) and all(is_same or one.startswith("<") for is_same, (one, _) in zip(same, pairs, strict=True))


def help_setting(
    context: typer.Context,
    setting: Annotated[
        str | None, typer.Argument(help="Such as max_num_seqs, models.replicas, the path in an error; settings: all.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show what a setting of the configuration does, or all settings of a section."""
    if setting is None:
        print(context.find_root().get_help())
        return
    known = rows()
    found = known if setting == ALL else matching(setting, known)
    print_found({"data": [asdict(row) for row in found]}, as_json, show)


def show(found: Mapping[str, Any], console: Console) -> None:
    """Print rows, as they are in the document."""
    listing = Listing(console)
    for row in found["data"]:
        default = row["default"] if row["default"] in WORDS else f"default {row['default']}"
        listing.say(f"{row['setting']} ({default}): {row['text']}", ("setting", *row.values()))
