"""API keys: the key alone decides the tenant and its rights, and a key is never logged.

Invariant: no key is ever part of an error, a log line, or a comparison that stops early. Only the SHA-256 of a key is
kept and looked up: a guess cannot be steered towards the digest of a key, so the time of a lookup reveals nothing.

A key is sent as `Authorization: Bearer <key>` or `x-api-key: <key>`; if both are sent, only `Authorization` counts.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Iterable, Mapping

from serve_app.errors import ConfigError, Unauthorized
from serve_app.settings import AuthSettings, KeySettings
from serve_app.types import Identity, RequestClass

_KEY_ID_BYTES = 4  # enough to tell keys apart in receipts, too little to test guesses of a weak key against


class KeyRing:
    """The keys that may call.

    Args:
        auth: the configured keys.
        generated: the key of `load_or_create_key`, used where none is configured.

    Raises:
        ConfigError: there is no key at all, or one is given twice (`param` names it).
    """

    def __init__(self, auth: AuthSettings, generated: str | None = None) -> None:
        keys = auth.keys or ((KeySettings.model_validate({"key": generated}),) if generated else ())
        if not keys:
            raise ConfigError("auth.keys: no API key, and nothing is served without one", param="auth.keys")
        self._identities: dict[bytes, Identity] = {}
        for index, settings in enumerate(keys):
            digest = _digest_of(settings)
            if digest in self._identities:
                raise ConfigError(f"auth.keys.{index}: this key is given twice", param=f"auth.keys.{index}")
            self._identities[digest] = _identity(settings, digest)

    def identify(self, headers: Iterable[tuple[bytes, bytes]]) -> Identity:
        """The identity of the request's key. `headers` as in ASGI's scope: names in lower case; of two the last counts.

        Raises:
            Unauthorized: no key, a malformed key, or an unknown one.
        """
        identity = self._identities.get(hashlib.sha256(_presented(dict(headers))).digest())
        if identity is None:
            raise Unauthorized("the API key is not valid here")
        return identity


def _presented(headers: Mapping[bytes, bytes]) -> bytes:
    value = headers.get(b"authorization")
    if value is not None:
        scheme, _, key = value.partition(b" ")
        if scheme.lower() != b"bearer":
            raise Unauthorized("the Authorization header must read `Bearer <API key>`")
    else:
        key = headers.get(b"x-api-key", b"")
    key = key.strip()
    if not key:
        raise Unauthorized("no API key was sent: an `Authorization: Bearer <API key>` header is needed")
    return key


def _digest_of(settings: KeySettings) -> bytes:
    return bytes.fromhex(settings.without_secret().key_sha256 or "")


def _identity(settings: KeySettings, digest: bytes) -> Identity:
    key_id = hashlib.blake2s(digest, digest_size=_KEY_ID_BYTES, person=b"key-id").hexdigest()
    return Identity(
        key_id=key_id,
        tenant=settings.tenant,
        max_class=RequestClass[settings.max_class.upper()],
        default_class=RequestClass[settings.default_class.upper()],
        admin=settings.admin,
        metrics=settings.metrics,
    )


def tenant_salt(secret: bytes, tenant: str) -> str:
    """The salt of a tenant's prefix cache (vLLM's `cache_salt`): 43 URL-safe characters, the same wherever `secret` is.

    Tenants with different salts never share a cached prefix, so no tenant can probe another's prompts by timing.
    """
    mac = hmac.digest(secret, b"cache-salt\0" + tenant.encode(), "sha256")
    return base64.urlsafe_b64encode(mac).rstrip(b"=").decode()
