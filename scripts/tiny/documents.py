"""Raw text: the documents of this repository, in ASCII."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

ARCHIVE = "docs/archive"
FOLDERS = ("docs",)
FILES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
# What documents have beside ASCII: check mark, dashes, ellipsis, quotation marks, arrow, times, at most, at least, dot.
ASCII: Mapping[int, str] = {
    0x2713: "ok", 0x2014: "-", 0x2013: "-", 0x2026: "...", 0x2018: "'", 0x2019: "'", 0x201C: '"', 0x201D: '"',
    0x2192: "->", 0xD7: "x", 0x2264: "<=", 0x2265: ">=", 0xB7: "-",
}  # fmt: skip


def read(root: Path) -> dict[str, str]:
    """Texts by their path, sorted; what is not ASCII is written in ASCII or left out."""
    found = [root / name for name in FILES]
    found += [file for folder in FOLDERS for file in (root / folder).rglob("*.md")]
    paths = sorted(file.relative_to(root).as_posix() for file in found if file.is_file())
    return {path: in_ascii((root / path).read_text()) for path in paths if not path.startswith(ARCHIVE)}


def in_ascii(text: str) -> str:
    return text.translate(ASCII).encode("ascii", "ignore").decode()


def digest(texts: Mapping[str, str]) -> str:
    """The SHA-256 of the documents."""
    joined = "\0".join(f"{path}\0{text}" for path, text in sorted(texts.items()))
    return hashlib.sha256(joined.encode()).hexdigest()
