"""How many values and levels a JSON text has, to refuse bombs: texts whose parsing takes far more than their bytes.

Invariant: both are found in time linear in the bytes, and without recursion.
"""

from __future__ import annotations

from typing import Any

SLICE_BYTES = 2**16  # scanned in one step: a thread releases the interpreter between two steps


def has_more_values(text: bytes, most: int) -> bool:
    """Whether JSON has more than `most` values, found before it is parsed. An object or array counts as a value in
    addition to its content; malformed JSON may be counted wrong."""
    if structural_count(text) <= most:
        return False
    if b"\\" in text:
        text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    count, in_string = 0, 0
    for start in range(0, len(text), SLICE_BYTES):
        parts = text[start : start + SLICE_BYTES].split(b'"')
        count += structural_count(b"".join(parts[in_string::2]))
        if count > most:
            return True
        in_string = (in_string + len(parts) - 1) % 2
    return False


def structural_count(text: bytes) -> int:
    return text.count(b",") + text.count(b"{") + text.count(b"[")


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
