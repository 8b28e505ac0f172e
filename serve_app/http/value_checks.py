"""Refuses valid JSON values that would harm a shared engine.

Found by fuzzing vLLM 0.32.0: an integer beyond 64 bits fails on its way to EngineCore and looks like a lost engine;
some fields of the wrong shape end in an error that names no field.

Invariant: a request that passes costs an engine time in proportion to its size. The checks are linear in the number of
values: a path is built only for a wrong value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from serve_app.core.grammar_bounds import MAX_GRAMMAR_BYTES, too_complex
from serve_app.errors import BadRequest

INTEGER_MIN, INTEGER_MAX = -(2**63), 2**64 - 1  # the range of msgpack, which vLLM uses to reach EngineCore
SLICE_BYTES = 2**16  # scanned in one step: the thread releases the interpreter between two steps
# vLLM searches each stop string in the text of every step; OpenAI's bound is 4.
MAX_ENTRIES = {"stop": 16, "bad_words": 1024, "stop_token_ids": 1024, "logit_bias": 1024}

_GRAMMAR_FIELDS = ("response_format", "structured_outputs", "text")  # of tools the engine knows which are enforced
_SHAPES: dict[str, tuple[type, str]] = {
    "messages": (list, "an array of messages"),
    "structured_outputs": (dict, "an object"),
}
_encoder = msgspec.msgpack.Encoder()


def check_count(text: bytes, max_values: int, param: str) -> None:
    """Refuse JSON with more than `max_values` values before it is parsed: decoding them blocks the whole process. An
    object or array counts as a value in addition to its content; malformed JSON may pass.

    Raises:
        BadRequest: with this `param`.
    """
    if structural_count(text) <= max_values:
        return
    if b"\\" in text:
        text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    count, in_string = 0, 0
    for start in range(0, len(text), SLICE_BYTES):
        parts = text[start : start + SLICE_BYTES].split(b'"')
        count += structural_count(b"".join(parts[in_string::2]))
        if count > max_values:
            raise BadRequest(f"the JSON of `{param}` holds more than {max_values} values", param=param)
        in_string = (in_string + len(parts) - 1) % 2


def structural_count(text: bytes) -> int:
    return text.count(b",") + text.count(b"{") + text.count(b"[")


def check_integers(value: Mapping[str, Any]) -> None:
    """Refuse integers that cannot be sent to an engine.

    Raises:
        BadRequest: `param` is the path of the first one.
    """
    try:
        _encoder.encode(value)
    except OverflowError:
        path = _find(value, lambda leaf: type(leaf) is int and not INTEGER_MIN <= leaf <= INTEGER_MAX)
        raise BadRequest(f"`{path}` is an integer beyond 64 bits", param=path) from None


def check_shapes(body: Mapping[str, Any]) -> None:
    """Refuse wrong shapes that vLLM's own validation does not handle, grammars too large for any engine (most too
    costly grammars are found when they are compiled, `engine.grammar_queue`), and lists longer than `MAX_ENTRIES`.

    Raises:
        BadRequest: `param` is the field or its path.
    """
    for name, (wanted, said) in _SHAPES.items():
        if name in body and type(body[name]) is not wanted and (body[name] is not None or wanted is list):
            raise BadRequest(f"`{name}` must be {said}", param=name)
    for name, most in MAX_ENTRIES.items():
        value = body.get(name)
        if isinstance(value, dict | list) and len(value) > most:
            raise BadRequest(f"`{name}` may have {most} entries, it has {len(value)}", param=name)
    for name in _GRAMMAR_FIELDS:
        if name in body and len(repr(body[name])) > MAX_GRAMMAR_BYTES:
            raise too_complex(f"`{name}` has more than {MAX_GRAMMAR_BYTES} bytes", name)


def _find(value: Any, wrong: Callable[[Any], bool]) -> str | None:
    """The dotted path of the first wrong value that is no container; None: there is none."""
    nodes: list[tuple[Any, int, str | int]] = [(value, -1, "")]  # value, parent's index here, key in the parent
    for place, (node, _, _) in enumerate(nodes):  # grows meanwhile
        for key, child in node.items() if type(node) is dict else enumerate(node) if type(node) is list else ():
            if type(child) is dict or type(child) is list:
                nodes.append((child, place, key))
            elif wrong(child):
                path, at = str(key), place
                while at:
                    _, above, name = nodes[at]
                    path, at = f"{name}.{path}", above
                return path
    return None
