"""A YAML file as its mapping, and where each value stands in it.

Invariant: a key that stands twice in one mapping is seen: YAML's own reader takes the last one without a word.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from serve_app.errors import ConfigError
from serve_app.settings.variables import Place

MERGE = "tag:yaml.org,2002:merge"  # `<<`, which may stand twice

# By a part of what PyYAML says: the same for somebody who has written the file.
PLAIN_WORDS = {
    "found character '\\t'": "a tab is here, and YAML takes spaces alone",
    "found another document": "a second document begins here, and a configuration is one",
    "could not determine a constructor": "a tag that begins with ! is here, and none is known",
}


@dataclass(frozen=True, slots=True)
class YamlFile:
    """What a file holds. `doubles`: the places of keys that stand twice in one mapping, and why that is wrong."""

    data: dict[str, Any]
    root: yaml.Node
    doubles: tuple[tuple[Place, str], ...]

    def line_of(self, place: Place) -> int | None:
        """The line of a value, or of the mapping that lacks it; None: it came from elsewhere (`<<`)."""
        node = self.root
        line = self.root.start_mark.line + 1
        for part in place:
            inner = _inside(node, part)
            if inner is None:
                return line
            node = inner
            line = inner.start_mark.line + 1
        return line

    def written(self, place: Place) -> str | None:
        """A scalar as the file has it; None: there is none."""
        node: yaml.Node | None = self.root
        for part in place:
            node = None if node is None else _inside(node, part)
        return node.value if isinstance(node, yaml.ScalarNode) else None


def read_yaml(path: str | os.PathLike[str]) -> YamlFile:
    """The mapping in a YAML file, whatever its keys are.

    Raises:
        ConfigError: unreadable, not YAML, empty, or no mapping; names the file.
    """
    try:
        root, data, doubles = _read(Path(path).read_text())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}", param="config") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = "" if mark is None else f", line {mark.line + 1}, column {mark.column + 1}"
        raise ConfigError(f"{path}{where}: not YAML: {_in_plain_words(error)}", param="config") from None
    except (yaml.YAMLError, ValueError) as error:  # bytes that are no text, a date of the 32nd
        raise ConfigError(f"{path}: not YAML: {' '.join(str(error).split())}", param="config") from None
    if root is None or data is None:
        raise ConfigError(f"{path}: the file is empty; {{}} stands for all defaults", param="config")
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: a mapping is wanted at the top, found {type(data).__name__}", param="config")
    return YamlFile(data, root, doubles)


def _in_plain_words(error: yaml.MarkedYAMLError) -> str:
    """What is wrong, where PyYAML's words are about its own work."""
    return next((words for part, words in PLAIN_WORDS.items() if part in str(error.problem)), str(error.problem))


def _read(text: str) -> tuple[yaml.Node | None, Any, tuple[tuple[Place, str], ...]]:
    """The nodes, what they stand for, and the keys that stand twice."""
    loader = yaml.SafeLoader(text)
    try:
        root = loader.get_single_node()
        if root is None:
            return None, None, ()
        doubles = tuple(_doubles(root, (), set(), ()))  # first: the reader puts what `<<` merges among the keys
        return root, loader.construct_document(root), doubles
    finally:
        loader.dispose()


def _doubles(node: yaml.Node, at: Place, seen: set[int], around: tuple[int, ...]) -> Iterator[tuple[Place, str]]:
    """Raises MarkedYAMLError: a value contains itself, by an alias."""
    if id(node) in around:
        raise yaml.MarkedYAMLError(problem="a value contains itself", problem_mark=node.start_mark)
    if id(node) in seen or not isinstance(node, yaml.CollectionNode):
        return
    seen.add(id(node))
    around = (*around, id(node))
    if isinstance(node, yaml.SequenceNode):
        for index, inner in enumerate(node.value):
            yield from _doubles(inner, (*at, index), seen, around)
        return
    first: dict[str, int] = {}
    for key, inner in node.value:
        name = str(key.value)
        line = key.start_mark.line + 1
        if key.tag != MERGE and name in first:
            yield (*at, name), f"stands twice in one mapping, in line {first[name]} and in line {line}"
        first.setdefault(name, line)
        yield from _doubles(inner, (*at, name), seen, around)


def _inside(node: yaml.Node, part: str | int) -> yaml.Node | None:
    """The value of a key, or at a position."""
    if isinstance(node, yaml.SequenceNode):
        found: yaml.Node | None = node.value[part] if isinstance(part, int) and part < len(node.value) else None
        return found
    if isinstance(node, yaml.MappingNode):
        return next((inner for key, inner in reversed(node.value) if str(key.value) == str(part)), None)
    return None
