"""API keys: the key alone decides the tenant and its rights, and a key is never logged.

Invariant: no key is ever part of an error, a log line, or a comparison that stops early. Only the SHA-256 of a key is
kept and looked up: a guess cannot be steered towards the digest of a key, so the time of a lookup reveals nothing.

A key is sent as `Authorization: Bearer <key>`, `x-api-key: <key>` or `api-key: <key>` (Azure's clients): the first of
these counts.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Mapping

from serve_app.core.limits import Limits
from serve_app.errors import ConfigError, Unauthorized
from serve_app.settings import AuthSettings
from serve_app.types import Identity, RequestClass


class KeyRing:
    """The keys that may call.

    Raises:
        ConfigError: there is no key at all.
    """

    def __init__(self, auth: AuthSettings) -> None:
        if not auth.keys:
            raise ConfigError("auth.keys: no API key, and nothing is served without one", param="auth.keys")
        self._identities: dict[bytes, Identity] = {}
        self._limits: dict[str, Limits] = {}  # of the keys with limits of their own, by id
        self._usual_limits = auth.key_limits.limits()
        for key in auth.keys:
            if key.limits is not None:
                self._limits[key.name or f"yaml-{(key.without_secret().key_sha256 or '')[:8]}"] = key.limits.limits()
            self._identities[bytes.fromhex(key.without_secret().key_sha256 or "")] = Identity(
                tenant=key.tenant,
                max_class=RequestClass[key.max_class.upper()],
                default_class=RequestClass[key.default_class.upper()],
                admin=key.admin,
                metrics=key.metrics,
                key_id=key.name or f"yaml-{(key.without_secret().key_sha256 or '')[:8]}",
                models=None if key.models is None else frozenset(key.models),
            )

    def limits_of(self, identity: Identity) -> Limits:
        """The limits of a key: its own, or else those of all keys."""
        return self._limits.get(identity.key_id, self._usual_limits)

    def identify(self, headers: Mapping[bytes, bytes]) -> Identity:
        """The identity of the request's key, by headers with names in lower case.

        Raises:
            Unauthorized: no key, a malformed key, or an unknown one.
        """
        value = headers.get(b"authorization")
        if value is None:
            key = headers.get(b"x-api-key") or headers.get(b"api-key", b"")
        else:
            scheme, _, key = value.partition(b" ")
            if scheme.lower() != b"bearer":
                raise Unauthorized("the Authorization header must read `Bearer <API key>`")
        key = key.strip()
        if not key:
            raise Unauthorized("no API key was sent: an `Authorization: Bearer <API key>` header is needed")
        identity = self._identities.get(hashlib.sha256(key).digest())
        if identity is None:
            # OpenAI's words: LiteLLM tells this error from other wrong requests by them
            raise Unauthorized("Incorrect API key provided: this endpoint has no such key")
        return identity


def tenant_salt(secret: bytes, tenant: str) -> str:
    """The salt of a tenant's prefix cache (vLLM's `cache_salt`): 43 URL-safe characters, the same wherever `secret` is.

    Tenants with different salts never share a cached prefix, so no tenant can probe another's prompts by timing.
    """
    mac = hmac.digest(secret, b"cache-salt\0" + tenant.encode(), "sha256")
    return base64.urlsafe_b64encode(mac).rstrip(b"=").decode()
