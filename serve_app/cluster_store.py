"""What has to be the same for all processes of a Ray cluster and outlive each of them: in the GCS's key-value store.

The GCS asks for Ray's token, and with Redis behind it what is here survives the head.
"""

from __future__ import annotations

import pickle
import secrets
from typing import Any

from ray.experimental import internal_kv

NAMESPACE = b"serve_app"
SALT_KEY = b"cache_salt_secret"
SALT_BYTES = 32  # an HMAC-SHA256 key of full strength


def cluster_secret() -> bytes:
    """A secret that every process of this Ray cluster gets alike; made by the first that asks."""
    internal_kv._internal_kv_put(SALT_KEY, secrets.token_bytes(SALT_BYTES), overwrite=False, namespace=NAMESPACE)
    kept = internal_kv._internal_kv_get(SALT_KEY, namespace=NAMESPACE)
    assert kept is not None  # put above, or before
    return bytes(kept)


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

    def all(self) -> dict[str, Any]:
        """Every value kept."""
        names = internal_kv._internal_kv_list(self._prefix, namespace=NAMESPACE)
        found = {bytes(name): internal_kv._internal_kv_get(name, namespace=NAMESPACE) for name in names}
        size = len(self._prefix)
        return {name[size:].decode(): pickle.loads(value) for name, value in found.items() if value is not None}
