"""A configuration file: read, its variables resolved, and everything that is wrong with it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from serve_app.errors import ConfigError
from serve_app.settings.mistakes import FileSource, Mistake
from serve_app.settings.settings import Settings, examine, or_first
from serve_app.settings.variables import Names, resolve
from serve_app.settings.yaml_file import read_yaml


@dataclass(frozen=True, slots=True)
class ReadFile:
    """A file that was read.

    Args:
        settings: None: it has an error.
        data: its mapping, with the values of its variables.
        names: the texts of the scalars that have a variable.
    """

    settings: Settings | None
    data: Mapping[str, Any]
    names: Names
    wrong: list[Mistake]


def read_file(path: str | os.PathLike[str]) -> ReadFile:
    """The settings of a YAML file, with `${NAME}` from the environment of this process, or everything that is wrong
    with it.

    Raises:
        ConfigError: unreadable, not YAML, or empty; names the file.
    """
    file = read_yaml(path)
    resolved = resolve(file.data, os.environ)
    source = FileSource(file, resolved)
    wrong = source.mistakes()
    settings, more = examine(resolved.data, source)
    known = {one.path for one in wrong}  # what is no value yet is wrong once
    wrong += [one for one in more if one.path not in known]
    if settings is None or wrong:
        return ReadFile(None, resolved.data, resolved.names, wrong)
    return ReadFile(settings.with_names(resolved.names), resolved.data, resolved.names, [])


def load(path: str | os.PathLike[str]) -> Settings:
    """Settings from a YAML file, with `${NAME}` from the environment of this process.

    Raises:
        ConfigError: unreadable, not YAML, empty, or wrong; names the file and the key.
    """
    found = read_file(path)
    try:
        return or_first(found.settings, found.wrong)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.message}", param=error.param) from None
