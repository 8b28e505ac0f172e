"""Keys of the store over HTTP, for keys with `admin`.

    GET    /admin/keys                all keys, those of the configuration too; never a key itself or a digest
    POST   /admin/keys                {"name", "tenant", ...} -> 201 with `key`, which is shown this once
    GET    /admin/keys/{id}           one key, with the limits that hold for it
    POST   /admin/keys/{id}           changes the fields it names; of `limits` those it names, and null takes one away
    POST   /admin/keys/{id}/rotate    {"grace_s"} -> the key with a new `key`; the old one is valid for the grace
    DELETE /admin/keys/{id}           revokes it; requests that run are finished

Invariant: the key itself is in one answer and nowhere else; who may not ask is refused before the body is read. No key
gives more than it has: the right to deploy, and a key with it, are made and changed by keys with that right alone.
Every operator may revoke one.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from typing import Annotated, Any

import msgspec
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from serve_app.core.limits import Limits
from serve_app.errors import BadRequest, Forbidden, KeyConflict, NotFound
from serve_app.http.api.audit_routes import author_of
from serve_app.http.api.local_routes import not_an_operator
from serve_app.http.api.routes import SHOWN_ID_CHARS, HttpRoute, KeyCall
from serve_app.http.error_responses import JSON, Answer
from serve_app.http.fields import parse_fields, time_of
from serve_app.http.keys import KeyRing, key_rights, utc
from serve_app.http.stored_keys import KeyFollower
from serve_app.settings import LimitSettings, Settings, new_key
from serve_app.store import KeyRecord, is_key_id, new_key_id
from serve_app.types import Identity, RequestClass

logger = logging.getLogger("ray.serve")

DEFAULT_GRACE_S = 86_400.0  # a day: every program that has the old key gets the new one at its next deployment
MAX_GRACE_S = 90 * 86_400.0  # of a rotation; what is to last longer is another key
MAX_MODELS = 256  # that a key may name
NO_DEPLOY = "no_deploy_right"  # the code of a 403 for a key that may not deploy
NOT_KEPT = (b"cache-control", b"no-store")  # of an answer with a key

ReadBody = Callable[[], Awaitable[tuple[Mapping[str, Any], bytes]]]  # decoded, and as it was sent


def _printable(text: str) -> str:
    if not text.isprintable() or not text.strip():
        raise ValueError("must have printable characters only, and not only spaces")
    return text


def _class(name: str) -> str:
    if name.upper() not in RequestClass.__members__:
        raise ValueError(f"must be one of {', '.join(one.label for one in RequestClass)}")
    return name


Name = Annotated[str, Field(min_length=1, max_length=64), AfterValidator(_printable)]
ModelName = Annotated[str, Field(min_length=1, max_length=256), AfterValidator(_printable)]
ClassName = Annotated[str, AfterValidator(_class)]


class _KeyFields(BaseModel):
    """The body that makes a key; the same names as `auth.keys`, and the same defaults where nothing is said of one."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    name: Name
    tenant: Name = "default"
    max_class: ClassName = "high"
    default_class: ClassName | None = None  # `normal`, or the highest class that the key may ask for
    admin: bool = False
    metrics: bool = False
    deploy: bool = False
    models: list[ModelName] | None = Field(None, max_length=MAX_MODELS)
    expires_at: str | None = None
    limits: LimitSettings | None = None
    batch_limits: LimitSettings | None = None


class _RotateFields(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    grace_s: float = Field(DEFAULT_GRACE_S, ge=0, le=MAX_GRACE_S)


class KeyRoutes:
    """Answers the routes.

    Args:
        follower: of this router; it learns of a change made here at once.
        keys, settings: those that hold now.
        now: seconds since 1970 UTC.
    """

    def __init__(
        self,
        follower: KeyFollower,
        keys: Callable[[], KeyRing],
        settings: Callable[[], Settings],
        now: Callable[[], float] = time.time,
    ) -> None:
        self._follower = follower
        self._keys = keys
        self._settings = settings
        self._now = now

    async def answer(self, route: HttpRoute, identity: Identity, read: ReadBody) -> Answer:
        """The complete answer.

        Args:
            read: the body, for the calls that have one.

        Raises:
            Forbidden: not an operator's key. BadRequest: a wrong field, see `param`. NotFound: no such key.
            KeyConflict: the key is one of the configuration, revoked, or changed at the same time. StoreAway.
        """
        if not identity.admin:
            raise not_an_operator()
        match route.target:
            case KeyCall.LIST:
                stored = await self._follower.store.keys()
                shown = [self._shown(record) for record in (*self._keys().configured.values(), *stored)]
                return 200, JSON, msgspec.json.encode({"object": "list", "data": shown})
            case KeyCall.CREATE:
                return await self._create((await read())[0], identity)
            case KeyCall.GET:
                record = await self._record(route.argument)
                found = self._shown(record) | {"effective_limits": effective_limits(record, self._settings())}
                return 200, JSON, msgspec.json.encode(found)
            case KeyCall.UPDATE:
                return await self._update(route.argument, (await read())[0], identity)
            case KeyCall.ROTATE:
                return await self._rotate(route.argument, (await read())[0], identity)
            case _:
                return await self._revoke(route.argument, identity)

    async def _create(self, body: Mapping[str, Any], identity: Identity) -> Answer:
        asked = parse_fields(_KeyFields, body)
        _require_right(identity, needed=asked.deploy)
        now = self._now()
        key = new_key()
        expires_at = None if asked.expires_at is None else _expiry(asked.expires_at, now)
        given: dict[str, Any] = {
            "tenant": asked.tenant,
            "digest": _digest(key),
            "created_at": now,
            "expires_at": expires_at,
        }
        record = KeyRecord(key_id=new_key_id(), **given, **_rights(asked))
        made = await self._follower.store.create_key(record, author_of(identity))
        return self._done("created", made, identity, key, 201)

    async def _update(self, key_id: str, body: Mapping[str, Any], identity: Identity) -> Answer:
        record = await self._stored(key_id)
        now = self._now()
        if record.revoked_at is not None:
            raise KeyConflict("the key is revoked: make a new one")
        if body.get("tenant", record.tenant) != record.tenant:
            raise BadRequest(
                "a key keeps its `tenant`, whose its files, batches and use are: make another key", param="tenant"
            )
        asked = parse_fields(_KeyFields, _patched(_as_body(record), body))
        _require_right(identity, needed=asked.deploy or record.deploy)
        changes = _rights(asked)
        if "expires_at" in body:  # one that has passed may stay as it is
            changes["expires_at"] = None if asked.expires_at is None else _expiry(asked.expires_at, now)
        changed = await self._follower.store.change_key(
            key_id, if_version=record.version, by=author_of(identity), **changes
        )
        return self._done("changed", changed, identity)

    async def _rotate(self, key_id: str, body: Mapping[str, Any], identity: Identity) -> Answer:
        asked = parse_fields(_RotateFields, body)
        record = await self._stored(key_id)
        _require_right(identity, needed=record.deploy)
        now = self._now()
        key = new_key()
        if record.revoked_at is not None or (record.expires_at is not None and now >= record.expires_at):
            raise KeyConflict("the key is revoked or expired: make a new one")
        changed = await self._follower.store.change_key(
            key_id,
            if_version=record.version,
            by=author_of(identity),
            digest=_digest(key),
            previous_digest=record.digest if asked.grace_s else None,
            previous_until=now + asked.grace_s if asked.grace_s else None,
        )
        return self._done("rotated", changed, identity, key)

    async def _revoke(self, key_id: str, identity: Identity) -> Answer:
        record = await self._stored(key_id)
        if record.revoked_at is None:
            record = await self._follower.store.change_key(key_id, by=author_of(identity), revoked_at=self._now())
        return self._done("revoked", record, identity)

    def _done(
        self, change: str, record: KeyRecord, identity: Identity, key: str | None = None, status: int = 200
    ) -> Answer:
        """The answer to a change."""
        self._follower.stored.learn(record)
        logger.info("Key %s of tenant %r was %s by key %s", record.key_id, record.tenant, change, identity.key_id)
        shown = self._shown(record) | ({} if key is None else {"key": key})
        return status, [*JSON, NOT_KEPT], msgspec.json.encode(shown)

    async def _stored(self, key_id: str) -> KeyRecord:
        """A key of the store."""
        if key_id in self._keys().configured:
            raise KeyConflict(f"{key_id} is a key of the configuration (auth.keys): change it there")
        return await self._record(key_id)

    async def _record(self, key_id: str) -> KeyRecord:
        if key_id in self._keys().configured:
            return self._keys().configured[key_id]
        try:
            if not is_key_id(key_id):
                raise KeyError(key_id)
            return await self._follower.store.key(key_id)
        except KeyError:
            raise NotFound(f"there is no key {key_id[:SHOWN_ID_CHARS]!r}", code="key_not_found") from None

    def _shown(self, record: KeyRecord) -> dict[str, Any]:
        """A key without its digest."""
        named = {"object": "api_key", "id": record.key_id}
        return (named | _as_body(record)) | {
            "state": _state(record, self._now()),
            "source": "configuration" if record.key_id in self._keys().configured else "store",
            "models": record.usable_models,
            "created_at": _time(record.created_at or None),
            "revoked_at": _time(record.revoked_at),
            "previous_until": _time(record.previous_until),
        }


def _require_right(identity: Identity, *, needed: bool) -> None:
    """Raises Forbidden: the change is about a key that may deploy, and the caller's may not."""
    if needed and not identity.deploy:
        raise Forbidden(
            "only a key that may deploy makes or changes one that may; the first one is set in the configuration "
            "(auth.keys[].deploy)",
            param="deploy",
            code=NO_DEPLOY,
        )


def _rights(asked: _KeyFields) -> dict[str, Any]:
    """What a key may do and use, as its record has it."""
    if asked.default_class is None:
        highest = RequestClass[asked.max_class.upper()]
        asked = asked.model_copy(update={"default_class": min(RequestClass.NORMAL, highest).label})
    rights = key_rights(asked)
    if rights["default_class"] > rights["max_class"]:
        raise BadRequest("`default_class` is above `max_class`", param="default_class")
    return rights


def _as_body(record: KeyRecord) -> dict[str, Any]:
    """The body that would make a key with these rights."""
    return {
        "name": record.name,
        "tenant": record.tenant,
        "max_class": record.max_class.label,
        "default_class": record.default_class.label,
        "admin": record.admin,
        "metrics": record.metrics,
        "deploy": record.deploy,
        "models": None if record.models is None else list(record.models),
        "expires_at": _time(record.expires_at),
        "limits": None if record.limits is None else shown_limits(record.limits),
        "batch_limits": None if record.batch_limits is None else shown_limits(record.batch_limits),
    }


def _patched(old: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """`old` with the patch in it: of limits those that it names are changed, anything else is replaced."""
    found = {**old, **patch}
    for name in ("limits", "batch_limits"):
        if isinstance(patch.get(name), Mapping):
            found[name] = {**(old[name] or {}), **patch[name]}
    return found


def effective_limits(record: KeyRecord, settings: Settings) -> dict[str, Any]:
    """All limits that a request of this key has to be within: of the key, of its tenant, of single models. A row of its
    batches has to be within those of the key for a day or a month, and within `batches`."""
    tenant = settings.admission.tenants.get(record.tenant)
    key = settings.auth.key_limits.limits() if record.limits is None else record.limits
    models = {} if tenant is None else tenant.models
    return {
        "key": shown_limits(key),
        "tenant": {} if tenant is None else shown_limits(tenant.limits.limits()),
        "models": {name: shown_limits(limits.limits()) for name, limits in models.items()},
        "over_limit": "refuse" if tenant is None else tenant.over_limit,
        "batches": {
            "key": {} if record.batch_limits is None else shown_limits(record.batch_limits),
            "tenant": {} if tenant is None else shown_limits(tenant.batch_limits.limits()),
        },
    }


def shown_limits(limits: Limits) -> dict[str, Any]:
    """Those that are set."""
    return {name: value for name, value in asdict(limits).items() if value is not None}


def _state(record: KeyRecord, now: float) -> str:
    if record.revoked_at is not None:
        return "revoked"
    return "expired" if record.expires_at is not None and now >= record.expires_at else "active"


def _time(time_s: float | None) -> str | None:
    return None if time_s is None else utc(time_s)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _expiry(text: str, now: float) -> float:
    """Seconds since 1970 UTC."""
    seconds = time_of(text, "expires_at")
    if seconds <= now:
        raise BadRequest("`expires_at` has passed", param="expires_at")
    return seconds
