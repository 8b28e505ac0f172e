"""SQLite files that have the store's tables already: a test of what is in them need not make them first."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

from serve_app.store.sql import SqlStore


def with_tables(file: Path) -> Path:
    """This file, with the tables of this release as the migrations make them, if it is not there yet."""
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(_empty_store())
    return file


@functools.cache
def _empty_store() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "store.sqlite"
        store = SqlStore(f"sqlite:///{file}")
        store.keys()
        store.close()
        return file.read_bytes()
