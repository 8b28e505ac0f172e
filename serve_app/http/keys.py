"""Who calls: the API key or the token of a request alone decides the tenant and its rights, and neither is ever logged.

There are keys of the configuration (`auth.keys`), keys of the store, which come and go while routers run, and tokens of
an identity provider (`auth.jwt`), which are kept nowhere. All of them give an `Identity`.

Invariant: no key is ever part of an error, a log line, or a comparison that stops early. Only the SHA-256 of a key is
kept and looked up: a guess cannot be steered towards the digest of a key, so the time of a lookup reveals nothing.
A key that is right is never called wrong because the store is away: while there was no list yet, the answer is a 503.

A key is sent as `Authorization: Bearer <key>`, `x-api-key: <key>` or `api-key: <key>` (Azure's clients): the first of
these counts. A token is sent as `Authorization: Bearer <token>` alone.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, TypeVar

import msgspec

from serve_app.core.limits import Limits
from serve_app.errors import AuthFailure, ConfigError, IssuerAway, StoreAway, Unauthorized
from serve_app.http.stored_keys import KeyTable, identity_of
from serve_app.http.tokens import JwksFollower, TokenSource, is_token
from serve_app.settings import AuthSettings, KeySettings
from serve_app.store import KeyRecord
from serve_app.types import TOKEN_PREFIX, Identity, RequestClass

ID_DIGITS = 8  # of its digest, in the id of a key of the configuration that has no name
NO_LIST_RETRY_S = 1.0  # a list comes within a second once the store is back
NO_LIMITS = Limits()
KEY_HEADERS = (b"authorization", b"x-api-key", b"api-key")
INCORRECT = "Incorrect API key provided"  # OpenAI's words: LiteLLM tells this error from other wrong requests by them

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RowOwner:
    """Whose batch a row is of, or whose background response is run.

    Args:
        response_id: of that; empty: it is a row.
    """

    key_id: str
    tenant: str
    response_id: str = ""


@dataclass(frozen=True, slots=True)
class ConsoleLogin:
    """What a cookie is made of, see `console.login_cookie`.

    Args:
        name: the id of the key; of a token TOKEN_PREFIX and the identity, since nothing else keeps it.
        digest: the login ends when this is another one: of the key, or of the settings that accepted the token.
        ends_at: seconds since 1970 UTC; None: after the usual time.
    """

    identity: Identity
    name: str
    digest: bytes
    ends_at: float | None = None


class KeyRing:
    """The keys that may call, and the tokens. `configured`: the keys of the configuration, by id.

    Args:
        stored: the keys of the store.
        follower: knows the keys that sign tokens; None: no token is accepted.
        now: seconds since 1970 UTC.

    Raises:
        ConfigError: there is no key in the configuration.
    """

    def __init__(
        self,
        auth: AuthSettings,
        stored: KeyTable,
        now: Callable[[], float] = time.time,
        follower: JwksFollower | None = None,
    ) -> None:
        if not auth.keys:
            raise ConfigError("auth.keys: no API key, and nothing is served without one", param="auth.keys")
        records = [configured_key(key) for key in auth.keys]
        self.configured = {record.key_id: record for record in records}
        # by digest: the name of one key may be what another one without a name is called by
        self._own = {record.digest: (record, identity_of(record)) for record in records}
        self._digests: dict[str, list[bytes]] = {}
        for record in records:
            self._digests.setdefault(record.key_id, []).append(record.digest)
        self._stored = stored
        self._now = now
        self._key_limits = auth.key_limits.limits()
        self._follower = follower
        self._tokens = None if auth.jwt is None or follower is None else TokenSource(auth.jwt, follower)

    def identify(self, headers: Mapping[bytes, bytes], row: RowOwner | None = None) -> Identity:
        """The identity of the request's key or token, by headers with names in lower case; of a row of a batch, that of
        `row`.

        Raises:
            Unauthorized: no key or token, a malformed one, an unknown one, or one that is no longer valid.
            StoreAway: the key is not in the configuration, and no list of the store's keys has come yet.
            IssuerAway: the keys that sign tokens are not known; `settled` waits for them.
        """
        if row is not None:
            return self._row_identity(row)
        value = headers.get(b"authorization")
        if value is None:
            key = headers.get(b"x-api-key") or headers.get(b"api-key", b"")
        else:
            scheme, _, key = value.partition(b" ")
            if scheme.lower() != b"bearer":
                raise Unauthorized("the Authorization header must read `Bearer <API key>`", failure=AuthFailure.MISSING)
        key = key.strip()
        if not key:
            raise Unauthorized(
                "no API key was sent: an `Authorization: Bearer <API key>` header is needed",
                failure=AuthFailure.MISSING,
            )
        if value is None and self._is_token(key):
            raise Unauthorized(
                f"{INCORRECT}: a token is sent as `Authorization: Bearer <token>`", failure=AuthFailure.WRONG_HEADER
            )
        return self.log_in(key).identity

    async def settled(self, look: Callable[[], T]) -> T:
        """What `look` finds; if it lacks a key that signs tokens, it looks once more when these were read again."""
        try:
            return look()
        except IssuerAway as error:
            if not error.is_pending or self._follower is None:
                raise
        await self._follower.wait()
        return look()

    def _is_token(self, secret: bytes) -> bool:
        return self._tokens is not None and is_token(secret) and key_digest(secret) not in self._own

    def log_in(self, secret: bytes) -> ConsoleLogin:
        """Whose key or token this is. Raises as `identify`."""
        if self._tokens is None or not self._is_token(secret):
            digest = key_digest(secret)
            identity = self.identify_digest(digest)
            return ConsoleLogin(identity, identity.key_id, digest)
        record = self._tokens.record(secret, self._now())
        identity = replace(identity_of(record), is_token=True)
        name = TOKEN_PREFIX + msgspec.json.encode(identity).decode()
        return ConsoleLogin(identity, name, self._tokens.digest, record.expires_at)

    def identify_login(self, key_id: str, is_of: Callable[[bytes], bool]) -> Identity:
        """The identity of a key that was named by its id, as it is now, or of a token, as it was. `is_of`: whether the
        login was made with the key, or under the settings of tokens, of this digest. Raises as `identify`."""
        if key_id.startswith(TOKEN_PREFIX):
            if self._tokens is None or not is_of(self._tokens.digest):
                raise Unauthorized(f"{INCORRECT}: tokens are not accepted any more as the one of this login was")
            return msgspec.json.decode(key_id.removeprefix(TOKEN_PREFIX), type=Identity)
        record = self._stored.by_id.get(key_id)
        stored = () if record is None else (record.digest, record.previous_digest)
        for digest in (*self._digests.get(key_id, ()), *stored):
            if digest is not None and is_of(digest):
                return self.identify_digest(digest)
        self._require_list()
        raise Unauthorized(f"{INCORRECT}: the key of this login is no longer there, or has changed")

    def name_of(self, identity: Identity) -> str:
        """What a key is called, by whoever made it; its id, if it has no name."""
        record = self._record(identity.key_id)
        return (record.name if record is not None else "") or identity.key_id

    def _row_identity(self, row: RowOwner) -> Identity:
        """What a row or a background response runs as: its key, as it is now. Raises as `identify`."""
        record = self._record(row.key_id)
        if record is None:
            self._require_list()
        if record is None or record.tenant != row.tenant:
            raise Unauthorized(f"{INCORRECT}: the key of this batch is no longer there")
        self._check(record, record.digest)
        own = identity_of(record)
        if not row.response_id:
            own = replace(own, default_class=RequestClass.LOW, is_row=True)
        return replace(own, admin=False, metrics=False, deploy=False)

    def identify_digest(self, digest: bytes) -> Identity:
        """The identity of the key with this SHA-256. Raises as `identify`."""
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
            raise Unauthorized(f"{INCORRECT}: it was revoked", failure=AuthFailure.REVOKED)
        if record.expires_at is not None and now >= record.expires_at:
            raise Unauthorized(f"{INCORRECT}: it expired at {utc(record.expires_at)}", failure=AuthFailure.EXPIRED)
        if digest != record.digest and now >= (record.previous_until or 0.0):
            raise Unauthorized(f"{INCORRECT}: another one has replaced it", failure=AuthFailure.REPLACED)

    def limits_of(self, identity: Identity) -> Limits:
        """The limits of a key: its own, else those of `auth.key_limits`, as of a token's subject."""
        record = self._record(identity.key_id)
        return self._key_limits if record is None or record.limits is None else record.limits

    def count_tenants(self) -> int:
        """How many tenants have a key. O(keys)."""
        return len({record.tenant for record in (*self.configured.values(), *self._stored.by_id.values())})

    def counts(self) -> dict[tuple[str, str], int]:
        """How many keys there are, by source (`configured`, `stored`) and state (`valid`, `revoked`, `expired`).
        O(keys)."""
        sources = {"configured": self.configured, "stored": self._stored.by_id}
        now = self._now()
        found = {(source, state): 0 for source in sources for state in ("valid", "revoked", "expired")}
        for source, records in sources.items():
            for record in records.values():
                is_over = record.expires_at is not None and now >= record.expires_at
                found[source, "revoked" if record.revoked_at is not None else "expired" if is_over else "valid"] += 1
        return found

    def batch_limits_of(self, identity: Identity) -> Limits:
        """The limits of the rows of a key's batches."""
        record = self._record(identity.key_id)
        return NO_LIMITS if record is None or record.batch_limits is None else record.batch_limits

    def _record(self, key_id: str) -> KeyRecord | None:
        return self.configured.get(key_id) or self._stored.by_id.get(key_id)


def sends_key(headers: Mapping[bytes, bytes]) -> bool:
    """Whether a request brings a key of its own."""
    return any(name in headers for name in KEY_HEADERS)


def key_digest(key: bytes) -> bytes:
    """By which a key is kept and looked up."""
    return hashlib.sha256(key).digest()


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
        "deploy": key.deploy,
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
