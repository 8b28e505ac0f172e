"""One word a thing: which words no name may have, and which names stand for nothing.

A name is what a program binds: a class, function, parameter, variable, attribute, enum member, an import's alias, and
the file itself. `parts` cuts it into words: `line_of` and `LineOf` have the word `line`, `headline` has not.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import NamedTuple

from tests.syntax import nodes, parsed

# A word that is gone, and the field's own.
GONE = {
    "berth": "reservation",
    "desk": "the tenant's name",
    "headroom": "guard slots",
    "heard": "received, last seen",
    "lift": "promotion",
    "outbox": "unsent messages",
    "roster": "list of engines",
    "said": "reported",
    "shelf": "store",
    "told": "reported, notified",
    "trickle": "minimum share",
    "wire": "connection",
}
NAMELESS = frozenset({"its", "mine", "one", "there", "what", "who"})  # outside the target of a comprehension

# Where requests wait, a line is a queue; elsewhere it is a line of text.
QUEUES = (
    "serve_app/core/limits",
    "serve_app/core/queue",
    "serve_app/core/shared_queue",
    "serve_app/quota",
    "tests/core/queue",
    "tests/core/shared_queue",
)
QUEUE_PHRASE = re.compile(r"(^|_)(in|full|the)_(the_)?line(_|$)")
# Where a session is the one between a router and the actor; an agent's is `session` elsewhere.
ROUTER_SESSIONS = (
    "serve_app/core/claims",
    "serve_app/core/limits",
    "serve_app/core/shared_queue/applied_actions.py",
    "serve_app/core/shared_queue/delivery.py",
    "serve_app/core/shared_queue/early_refusal.py",
    "serve_app/core/shared_queue/states.py",
    "serve_app/http/keyed",
)
ALLOWANCES = ("serve_app/core/limits",)  # where `quota` would be an amount of a day or month; it is the actor

_PARTS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


class Name(NamedTuple):
    """A binding of a name. `is_target`: only in a comprehension."""

    text: str
    line: int
    is_target: bool = False


def parts(name: str) -> set[str]:
    """The words of a name; a plural counts as its word, too."""
    words = {part.lower() for part in _PARTS.findall(name)}
    return words | {word.removesuffix("s") for word in words}


def names_in(source: str) -> Iterator[Name]:
    """All bindings of a module."""
    tree = parsed(source)
    targets = {
        id(name)
        for node in nodes(tree)
        if isinstance(node, _COMPREHENSIONS)
        for generator in node.generators
        for name in ast.walk(generator.target)
    }
    for node in nodes(tree):
        match node:
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                yield Name(node.name, node.lineno)
            case ast.arg():
                yield Name(node.arg, node.lineno)
            case ast.Name(ctx=ast.Store()):
                yield Name(node.id, node.lineno, id(node) in targets)
            case ast.Attribute(ctx=ast.Store()):
                yield Name(node.attr, node.lineno)
            case ast.alias(asname=str(alias)):
                yield Name(alias, node.lineno)
            case ast.MatchAs(name=str(bound)) | ast.MatchStar(name=str(bound)) | ast.ExceptHandler(name=str(bound)):
                yield Name(bound, node.lineno)
            case _:
                pass


def is_in(path: str, places: tuple[str, ...]) -> bool:
    return any(path == place or path.startswith(f"{place}/") for place in places)


def fault(path: str, name: Name) -> str | None:
    """What is wrong with a name in a file; None: nothing."""
    words = parts(name.text)
    gone = sorted(words & GONE.keys())
    if gone:
        return f"`{gone[0]}` is gone: {GONE[gone[0]]}"
    if name.text in NAMELESS and not name.is_target:
        return "it names nothing: use the thing's name"
    if ("line" in words and is_in(path, QUEUES)) or QUEUE_PHRASE.search(name.text.lower()):
        return "a line of requests is a queue"
    if "session" in words and is_in(path, ROUTER_SESSIONS) and "router" not in words:
        return "a router's session with the actor is `router_session`"
    if "quota" in words and is_in(path, ALLOWANCES):
        return "an amount of a day or a month is an allowance"
    return None


def faults(texts: Mapping[str, str]) -> dict[str, str]:
    """What is wrong, by `path:name`; of source texts by their path."""
    found = {}
    for path, text in texts.items():
        for name in [Name(PurePosixPath(path).stem, 1), *names_in(text)]:
            wrong = fault(path, name)
            if wrong is not None:
                found[f"{path}:{name.text}"] = wrong
    return found
