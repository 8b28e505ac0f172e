"""Values that are JSON, and yet would harm an engine that everybody shares.

Found by fuzzing vLLM 0.32.0: an integer beyond 64 bits fails on its way to EngineCore and looks like a lost engine; a
schema with `minItems` of a billion stops the replica's event loop for a minute; some fields of the wrong shape end in
an error that names no field.

Invariant: what passes costs an engine time in proportion to the request's size.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from serve_app.errors import BadRequest

MAX_SCHEMA_COUNT = 10_000  # of `minItems` and its like: building the grammar takes 0.5 ms there, 0.5 s at ten million
INTEGER_MIN, INTEGER_MAX = -(2**63), 2**64 - 1  # what msgpack, vLLM's way to EngineCore, can carry

_COUNTS = frozenset({"minItems", "minLength", "minProperties", "minContains"})
_SCHEMA_FIELDS = ("response_format", "structured_outputs", "tools", "text")
_SHAPES: dict[str, tuple[type, str]] = {
    "messages": (list, "an array of messages"),
    "structured_outputs": (dict, "an object"),
}
_LONG_DIGITS = re.compile(rb"[0-9]{19}")  # 2**63 has nineteen


def check_integers(body: bytes, value: Mapping[str, Any]) -> None:
    """Refuses integers that no engine can be handed. `body` is what `value` was decoded from.

    Raises:
        BadRequest: `param` is the path of the first one.
    """
    if _LONG_DIGITS.search(body) is None:
        return
    for path, leaf in _leaves(value, ""):
        if type(leaf) is int and not INTEGER_MIN <= leaf <= INTEGER_MAX:
            raise BadRequest(f"`{path}` is an integer beyond 64 bits", param=path)


def check_shapes(body: Mapping[str, Any]) -> None:
    """Refuses wrong shapes that vLLM's own validation trips over, and schemas that are cheap to send and dear to build.

    Raises:
        BadRequest: `param` is the field or its path.
    """
    for name, (wanted, said) in _SHAPES.items():
        if name in body and type(body[name]) is not wanted and (body[name] is not None or wanted is list):
            raise BadRequest(f"`{name}` must be {said}", param=name)
    for name in _SCHEMA_FIELDS:
        value = body.get(name)
        if type(value) is dict or type(value) is list:
            _check_schema(name, value)


def _check_schema(name: str, value: Any) -> None:
    for path, leaf in _leaves(value, name):
        if type(leaf) is str and path.endswith(".json"):  # vLLM takes a schema as text too
            _check_schema(path, _decoded(leaf))
        elif type(leaf) in (int, float) and leaf > MAX_SCHEMA_COUNT and path.rpartition(".")[2] in _COUNTS:
            raise BadRequest(f"`{path}` may be {MAX_SCHEMA_COUNT} at most", param=path)


def _decoded(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return None  # vLLM will say what is wrong with it


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Every value that is no container, with its dotted path."""
    waiting: list[tuple[str, Any]] = [(path, value)]
    while waiting:
        at, node = waiting.pop()
        if type(node) is dict:
            waiting += [(f"{at}.{key}" if at else str(key), child) for key, child in node.items()]
        elif type(node) is list:
            waiting += [(f"{at}.{index}", child) for index, child in enumerate(node)]
        else:
            yield at, node
