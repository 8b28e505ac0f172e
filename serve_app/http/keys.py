"""API keys: the key alone decides the tenant and its rights, and a key is never logged.

There are keys of the configuration (`auth.keys`) and keys of the store, which come and go while routers run.

Invariant: no key is ever part of an error, a log line, or a comparison that stops early. Only the SHA-256 of a key is
kept and looked up: a guess cannot be steered towards the digest of a key, so the time of a lookup reveals nothing.
A key that is right is never called wrong because the store is away: while there was no list yet, the answer is a 503.

A key is sent as `Authorization: Bearer <key>`, `x-api-key: <key>` or `api-key: <key>` (Azure's clients): the first of
these counts.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from serve_app.core.limits import Limits
from serve_app.errors import ConfigError, StoreAway, Unauthorized
from serve_app.http.stored_keys import KeyTable, identity_of
from serve_app.settings import AuthSettings, KeySettings
from serve_app.store import KeyRecord
from serve_app.types import Identity, RequestClass

ID_DIGITS = 8  # of its digest, in the id of a key of the configuration that has no name
NO_LIST_RETRY_S = 1.0  # a list comes within a second once the store is back
NO_LIMITS = Limits()
INCORRECT = "Incorrect API key provided"  # OpenAI's words: LiteLLM tells this error from other wrong requests by them


@dataclass(frozen=True, slots=True)
class RowOwner:
    """Whose batch a row is of."""

    key_id: str
    tenant: str


class KeyRing:
    """The keys that may call. `configured`: those of the configuration, by id.

    Args:
        stored: the keys of the store.
        now: seconds since 1970 UTC.

    Raises:
        ConfigError: there is no key in the configuration.
    """

    def __init__(self, auth: AuthSettings, stored: KeyTable, now: Callable[[], float] = time.time) -> None:
        if not auth.keys:
            raise ConfigError("auth.keys: no API key, and nothing is served without one", param="auth.keys")
        records = [configured_key(key) for key in auth.keys]
        self.configured = {record.key_id: record for record in records}
        # by digest: the name of one key may be what another one without a name is called by
        self._own = {record.digest: (record, identity_of(record)) for record in records}
        self._stored = stored
        self._now = now
        self._key_limits = auth.key_limits.limits()

    def identify(self, headers: Mapping[bytes, bytes], row: RowOwner | None = None) -> Identity:
        """The identity of the request's key, by headers with names in lower case; of a row of a batch, that of `row`.

        Raises:
            Unauthorized: no key, a malformed key, an unknown one, or one that is no longer valid.
            StoreAway: the key is not in the configuration, and no list of the store's keys has come yet.
        """
        if row is not None:
            return self._row_identity(row)
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
        return self._identify(hashlib.sha256(key).digest())

    def _row_identity(self, row: RowOwner) -> Identity:
        """What a row runs as: its batch's key, as it is now. Raises as `identify`."""
        record = self._record(row.key_id)
        if record is None:
            self._require_list()
        if record is None or record.tenant != row.tenant:
            raise Unauthorized(f"{INCORRECT}: the key of this batch is no longer there")
        self._check(record, record.digest)
        return replace(identity_of(record), default_class=RequestClass.LOW, admin=False, metrics=False, is_row=True)

    def _identify(self, digest: bytes) -> Identity:
        found = self._own.get(digest) or self._stored.find(digest)
        if found is None:
            self._require_list()
            raise Unauthorized(f"{INCORRECT}: this endpoint has no such key")
        record, identity = found
        self._check(record, digest)
        return identity

    def _require_list(self) -> None:
        """Raises StoreAway: there are keys that are not known yet."""
        if self._stored.version is None:
            text = "this key is not in the configuration, and the store of keys cannot be read yet"
            raise StoreAway(text, retry_after_s=NO_LIST_RETRY_S)

    def _check(self, record: KeyRecord, digest: bytes) -> None:
        """Raises Unauthorized: the key is no longer valid."""
        now = self._now()
        if record.revoked_at is not None:
            raise Unauthorized(f"{INCORRECT}: it was revoked")
        if record.expires_at is not None and now >= record.expires_at:
            raise Unauthorized(f"{INCORRECT}: it expired at {utc(record.expires_at)}")
        if digest != record.digest and now >= (record.previous_until or 0.0):
            raise Unauthorized(f"{INCORRECT}: another one has replaced it")

    def limits_of(self, identity: Identity) -> Limits:
        """The limits of a key: its own, else those of `auth.key_limits`."""
        record = self._record(identity.key_id)
        return self._key_limits if record is None or record.limits is None else record.limits

    def count_tenants(self) -> int:
        """How many tenants have a key. O(keys)."""
        return len({record.tenant for record in (*self.configured.values(), *self._stored.by_id.values())})

    def batch_limits_of(self, identity: Identity) -> Limits:
        """The limits of the rows of a key's batches."""
        record = self._record(identity.key_id)
        return NO_LIMITS if record is None or record.batch_limits is None else record.batch_limits

    def _record(self, key_id: str) -> KeyRecord | None:
        return self.configured.get(key_id) or self._stored.by_id.get(key_id)


def configured_key(key: KeySettings) -> KeyRecord:
    """A key of the configuration in the form of the store's."""
    digest = bytes.fromhex(key.without_secret().key_sha256 or "")
    key_id = key.name or f"yaml-{digest.hex()[:ID_DIGITS]}"
    expires_at = None if key.expires_at is None else key.expires_at.timestamp()
    return KeyRecord(key_id=key_id, tenant=key.tenant, digest=digest, expires_at=expires_at, **key_rights(key))


def key_rights(key: Any) -> dict[str, Any]:
    """What a key may do and use, as its record has it. `key`: `KeySettings`, or a body with the same fields."""
    return {
        "name": key.name or "",
        "max_class": RequestClass[key.max_class.upper()],
        "default_class": RequestClass[key.default_class.upper()],
        "admin": key.admin,
        "metrics": key.metrics,
        "models": None if key.models is None else tuple(key.models),
        "limits": None if key.limits is None else key.limits.limits(),
        "batch_limits": None if key.batch_limits is None else key.batch_limits.limits(),
    }


def utc(time_s: float) -> str:
    """A time in ISO 8601, in whole seconds of UTC."""
    return datetime.fromtimestamp(time_s, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def tenant_salt(secret: bytes, tenant: str) -> str:
    """The salt of a tenant's prefix cache (vLLM's `cache_salt`): 43 URL-safe characters, the same wherever `secret` is.

    Tenants with different salts never share a cached prefix, so no tenant can probe another's prompts by timing.
    """
    mac = hmac.digest(secret, b"cache-salt\0" + tenant.encode(), "sha256")
    return base64.urlsafe_b64encode(mac).rstrip(b"=").decode()
