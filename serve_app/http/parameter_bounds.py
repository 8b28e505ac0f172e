"""Bounds of the parameters of a request that cost an engine's processes time beside the model's own steps.

No tokens of the request's budget stand for this work, and it runs on threads that serve all requests: vLLM 0.32.0
tokenizes every bad word twice in its event loop, searches every stop string and compares repeated patterns after each
token, and copies lists of token ids for each answer of `n`.

Invariant: with parameters within these bounds a request takes at most 50 ms of one of these threads at its start, and
1 ms in a step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from serve_app.core.body_bounds import text_bytes
from serve_app.errors import BadRequest


class ListBounds(NamedTuple):
    """Of a list, an object (an entry is a key and its value) or a single string. Bytes are those of strings in UTF-8;
    None: the bound of entries suffices."""

    entries: int
    entry_bytes: int | None = None
    bytes: int | None = None


LIST_BOUNDS: dict[str, ListBounds] = {
    "stop": ListBounds(4, 1024),  # OpenAI's and vLLM's bound
    "bad_words": ListBounds(128, 1024, 32_768),  # vLLM takes 128; tokenizing all bytes twice takes 35 ms
    "stop_token_ids": ListBounds(1024),
    "logit_bias": ListBounds(1024, 20),  # keys are token ids in digits
    "allowed_token_ids": ListBounds(32_768),  # 8 ms for one answer, and 0.25 ms more for each other of `n`
    "logprob_token_ids": ListBounds(128),  # vLLM's bound
    "include": ListBounds(64),  # OpenAI has ten values
    "metadata": ListBounds(64, 4096, 65_536),  # a response repeats it in three events; OpenAI's bounds are 16 and 576
    "user": ListBounds(1, 4096),  # a response repeats it
}

# Of `max_pattern_size` squared times `min_count`: twice the comparisons after each token for the worst text, which take
# 1 ms. It allows patterns of 20 tokens 163 times, of 64 tokens 16 times, of 128 tokens 4 times.
MAX_REPETITION_WORK = 65_536
_REPETITION_NUMBERS = ("max_pattern_size", "min_pattern_size", "min_count")


def check_parameters(body: Mapping[str, Any]) -> None:
    """Raises BadRequest: a parameter is above its bound; `param` is the field or its path. Values of a type that vLLM
    refuses pass."""
    for name, bounds in LIST_BOUNDS.items():
        if (value := body.get(name)) is not None:
            _check_list(name, value, bounds)
    if isinstance(repetition := body.get("repetition_detection"), dict):
        _check_repetition(repetition)


def _check_list(name: str, value: Any, bounds: ListBounds) -> None:
    if not isinstance(value, dict | list | str):
        return
    entries = 1 if isinstance(value, str) else len(value)
    if entries > bounds.entries:
        raise BadRequest(f"`{name}` may have {bounds.entries} entries, it has {entries}", param=name)
    if bounds.entry_bytes is None:
        return
    total = 0
    for path, texts in _texts(name, value):
        size = sum(text_bytes(text) for text in texts if isinstance(text, str))
        if size > bounds.entry_bytes:
            raise BadRequest(f"`{path}` may have {bounds.entry_bytes} bytes, it has {size}", param=path)
        total += size
    if bounds.bytes is not None and total > bounds.bytes:
        raise BadRequest(f"`{name}` may have {bounds.bytes} bytes in all, it has {total}", param=name)


def _texts(name: str, value: dict[str, Any] | list[Any] | str) -> Iterable[tuple[str, tuple[Any, ...]]]:
    """Each entry with its path. A key is no part of a path: it may be what is too long."""
    if isinstance(value, str):
        return [(name, (value,))]
    if isinstance(value, list):
        return ((f"{name}.{index}", (entry,)) for index, entry in enumerate(value))
    return ((name, pair) for pair in value.items())


def _check_repetition(repetition: Mapping[str, Any]) -> None:
    for number in _REPETITION_NUMBERS:
        if type(repetition.get(number, 0)) is not int:  # vLLM would read text and fractions as numbers
            path = f"repetition_detection.{number}"
            raise BadRequest(f"`{path}` must be an integer", param=path)
    size = repetition.get("max_pattern_size", 0)
    count = repetition.get("min_count", 0)
    if size > 0 and count > 0 and size * size * count > MAX_REPETITION_WORK:
        path = "repetition_detection.max_pattern_size"
        most = math.isqrt(MAX_REPETITION_WORK // count)
        raise BadRequest(f"`{path}` may be {most} at most with `min_count` {count}, it is {size}", param=path)
