"""What has to be the same for all processes of a Ray cluster and outlive each of them: in the GCS's key-value store.

The GCS asks for Ray's token, and with Redis behind it what is here survives the head.
"""

from __future__ import annotations

import pickle
import secrets
from dataclasses import dataclass
from typing import Any

from ray.experimental import internal_kv

NAMESPACE = b"serve_app"
SALT_KEY = b"cache_salt_secret"
ASIDE = b"aside/"  # before the key of what nobody could read
SALT_BYTES = 32  # an HMAC-SHA256 key of full strength


def cluster_secret() -> bytes:
    """A secret that every process of this Ray cluster gets alike; made by the first that asks."""
    internal_kv._internal_kv_put(SALT_KEY, secrets.token_bytes(SALT_BYTES), overwrite=False, namespace=NAMESPACE)
    kept = internal_kv._internal_kv_get(SALT_KEY, namespace=NAMESPACE)
    assert kept is not None  # put above, or before
    return bytes(kept)


@dataclass(frozen=True, slots=True)
class Unreadable:
    """What stands for a value that is kept and cannot be read, and why."""

    why: str


class Shelf:
    """Values by name under a prefix. Each call is a round trip to the GCS and raises what Ray does when it is away.

    Values are pickled: only this application writes here, behind the same token as code itself.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = f"{prefix}/".encode()

    def put(self, name: str, value: Any) -> None:
        """Keep a value; replaces the one of this name."""
        internal_kv._internal_kv_put(
            self._prefix + name.encode(), pickle.dumps(value), overwrite=True, namespace=NAMESPACE
        )

    def forget(self, name: str) -> None:
        """Drop a value; an unknown name changes nothing."""
        internal_kv._internal_kv_del(self._prefix + name.encode(), namespace=NAMESPACE)

    def put_aside(self, name: str) -> None:
        """Have a value out of the way, as it is, for whoever can make sense of it; an unknown name changes nothing."""
        key = self._prefix + name.encode()
        kept = internal_kv._internal_kv_get(key, namespace=NAMESPACE)
        if kept is not None:
            internal_kv._internal_kv_put(ASIDE + key, kept, overwrite=True, namespace=NAMESPACE)
            self.forget(name)

    def all(self) -> dict[str, Any]:
        """Every value kept; `Unreadable` for one that is not what this version of the application can read."""
        names = internal_kv._internal_kv_list(self._prefix, namespace=NAMESPACE)
        found = {bytes(name): internal_kv._internal_kv_get(name, namespace=NAMESPACE) for name in names}
        size = len(self._prefix)
        return {name[size:].decode(): _read(value) for name, value in found.items() if value is not None}


def _read(value: bytes) -> Any:
    try:
        found = pickle.loads(value)
        repr(found)  # one of an earlier version, with a field less, fails when it is looked at
    except Exception as error:  # noqa: BLE001 - pickle raises whatever its classes do
        return Unreadable(repr(error))
    return found
