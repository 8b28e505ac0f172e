"""Keys for tests of the store."""

from __future__ import annotations

import hashlib
from typing import Any

from serve_app.store import KeyRecord, new_key_id


def key(name: str = "a key", **fields: Any) -> KeyRecord:
    """A record with a digest of its own."""
    key_id = new_key_id()
    return KeyRecord(
        **{
            "key_id": key_id,
            "name": name,
            "tenant": "acme",
            "digest": hashlib.sha256(key_id.encode()).digest(),
            "created_at": 1e9,
        }
        | fields
    )
