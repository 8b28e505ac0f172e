"""How many values and levels a JSON text has, to refuse bombs: texts whose parsing takes far more than their bytes; and
where in it a value stands that is refused.

A parser converts most numbers in 0.03 us, and one like `1e300`, or of hundreds of digits, in 4 to 25: such a number
counts as many values.

Invariant: each is found in time linear in the bytes, and without recursion.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

SLICE_BYTES = 2**16  # scanned in one step: a thread releases the interpreter between two steps
SLOW_NUMBER_VALUES = 64  # as many objects with a key are decoded in the time of a number with an exponent
LONG_DIGITS = 256  # in a row; so many count as a slow number, since the time for digits grows faster than their number

_EXPONENT = re.compile(rb"(?<=[0-9])[eE]")
_TO_ZEROS = bytes(ord("0") if chr(byte).isdigit() else byte for byte in range(128)) + bytes(range(128, 256))
_LONG_NUMBER = b"0" * LONG_DIGITS


def has_more_values(text: bytes, most: int) -> bool:
    """Whether JSON has more than `most` values, found before it is parsed. An object or array counts as a value in
    addition to its content, a slow number as `SLOW_NUMBER_VALUES` more; malformed JSON may be counted wrong."""
    if len(text) <= SLICE_BYTES:
        slow = text.count(b"e") + text.count(b"E") + len(text) // LONG_DIGITS
        if structural_count(text) + SLOW_NUMBER_VALUES * slow <= most:
            return False
    count = 0
    digit = b""
    for outside in _outside_strings(text):
        count += structural_count(outside) + SLOW_NUMBER_VALUES * _slow_numbers(digit + outside)
        if count > most:
            return True
        digit = outside[-1:] if outside[-1:].isdigit() else b""
    return False


def structural_count(text: bytes) -> int:
    return text.count(b",") + text.count(b"{") + text.count(b"[")


def _slow_numbers(outside: bytes) -> int:
    exponents = len(_EXPONENT.findall(outside)) if b"e" in outside or b"E" in outside else 0
    return exponents + outside.translate(_TO_ZEROS).count(_LONG_NUMBER)


def _outside_strings(text: bytes) -> Iterator[bytes]:
    """What of a JSON text is in no string, in slices."""
    if b"\\" in text:
        text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    in_string = 0
    for start in range(0, len(text), SLICE_BYTES):
        parts = text[start : start + SLICE_BYTES].split(b'"')
        yield b"".join(parts[in_string::2])
        in_string = (in_string + len(parts) - 1) % 2


def is_deeper(text: bytes, value: Any, levels: int) -> bool:
    """Whether a parsed value has more than `levels` levels of objects and arrays; its own is the first.

    Args:
        text: what it was parsed from.
    """
    if text.count(b"{") + text.count(b"[") <= levels:
        return False
    level: list[Any] = [value]
    for _ in range(levels):
        level = [
            child
            for node in level
            for child in (node.values() if type(node) is dict else node)
            if type(child) is dict or type(child) is list
        ]
        if not level:
            return False
    return True


def path_of(value: dict[str, Any], is_wrong: Callable[[Any], bool]) -> str | None:
    """The dotted path of the first value, neither an object nor an array, that is wrong; None: there is none. A path is
    built for that one only."""
    nodes: list[tuple[Any, Any]] = [(value, None)]  # container, and its path: the container above's path and a key
    for node, above in nodes:  # grows meanwhile
        for key, child in node.items() if type(node) is dict else enumerate(node):
            if type(child) is dict or type(child) is list:
                nodes.append((child, (above, key)))
            elif is_wrong(child):
                names = [str(key)]
                while above is not None:
                    above, key = above
                    names.append(str(key))
                return ".".join(reversed(names))
    return None
