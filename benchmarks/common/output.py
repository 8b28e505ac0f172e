"""Whole lines on standard output, however long.

With PYTHONUNBUFFERED set, Python's own standard output drops what a pipe did not take at once: a line of half a
megabyte then ends in the middle (seen here). Every JSON object of these benchmarks goes out through this module.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from typing import Any


def write_line(line: str) -> None:
    """`line` and a newline on standard output, all of it, now."""
    sys.stdout.flush()
    data = memoryview(f"{line}\n".encode())
    while data:
        data = data[os.write(sys.stdout.fileno(), data) :]


def write_json(value: Mapping[str, Any]) -> None:
    """One object as one line; NaN and infinities are errors, they are not JSON."""
    write_line(json.dumps(value, separators=(",", ":"), allow_nan=False))
