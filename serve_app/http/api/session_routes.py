"""Agent sessions over HTTP: open, get, renew, close.

    POST   /v1/sessions              {"model", "session_id", "vram_gb" or "kv_tokens", "ttl_s", "wait_s"} -> 201
    GET    /v1/sessions/{id}         the session; does not renew it
    POST   /v1/sessions/{id}/renew   extends it by its ttl_s
    DELETE /v1/sessions/{id}         releases its memory

Invariant: a tenant can neither read nor change another tenant's sessions: it gets the error of an unknown id.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from typing import Any

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from serve_app.core.memory import (
    Session,
    SessionRequest,
    bytes_for_tokens,
    round_up_to_bucket,
    session_name,
    tenant_session_id,
    tokens_in_bytes,
)
from serve_app.core.names import ModelRoutes
from serve_app.core.shared_queue import SESSION_TOO_LARGE
from serve_app.core.times import MIN_SESSION_TTL_S
from serve_app.errors import BadRequest, Overloaded, Unavailable
from serve_app.http.api.local_routes import model_named, require_right
from serve_app.http.api.routes import HttpRoute, SessionCall
from serve_app.http.contract import class_of
from serve_app.http.error_responses import JSON, Answer
from serve_app.http.fields import parse_fields
from serve_app.http.measuring import session_key
from serve_app.router import ModelRouter, SessionClient
from serve_app.settings import GB, ModelSettings
from serve_app.transport import EngineInfo
from serve_app.types import Identity

DEFAULT_TTL_S = 600.0  # a tool may take minutes; a dead agent keeps its memory no longer than this
MAX_TTL_S = 86_400.0  # a day: longer sessions are renewed
MAX_WAIT_S = 60.0  # as long as any request may wait: proxies end idle exchanges
MAX_VRAM_GB = 1e6  # a petabyte; a larger number is a mistake
MAX_KV_TOKENS = 2**40
ID_BYTES = 8  # of a generated id: 64 bits
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")  # valid in a path, a header and a table


class _SessionFields(BaseModel):
    """The body that opens a session; null counts as not given. `class_of` reads the last two."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    model: Any = None
    session_id: Any = None
    vram_gb: float | None = Field(None, gt=0, le=MAX_VRAM_GB)
    kv_tokens: int | None = Field(None, gt=0, le=MAX_KV_TOKENS)
    ttl_s: float | None = Field(None, ge=MIN_SESSION_TTL_S, le=MAX_TTL_S)
    wait_s: float | None = Field(None, ge=0, le=MAX_WAIT_S)
    priority: Any = None
    service_tier: Any = None


class SessionRoutes:
    """Answers the session routes.

    Args:
        models: by name.
        names: what clients may send in place of a model's name.
    """

    def __init__(
        self, session_client: SessionClient, models: Mapping[str, ModelRouter], names: ModelRoutes | None = None
    ) -> None:
        self._session_client = session_client
        self._models = models
        self._names = names or ModelRoutes()

    async def answer(
        self, route: HttpRoute, identity: Identity, header: bytes | None, body: Mapping[str, Any], per_tenant: int
    ) -> Answer:
        """The complete answer to a session route.

        Args:
            header: X-Session-Id; it and `body` are read only to open a session.
            per_tenant: the most sessions that a tenant may have.

        Raises:
            BadRequest: a wrong field, see `param`. Forbidden: a class above the key's. Otherwise as `SessionClient`.
        """
        tenant = identity.tenant
        session_id = route.argument
        match route.target:
            case SessionCall.OPEN:
                session = await self._open(identity, header, body, per_tenant)
            case SessionCall.GET:
                session = await self._session_client.get(tenant, session_id)
            case SessionCall.RENEW:
                session = await self._session_client.renew(tenant, session_id)
            case _:
                await self._session_client.close(tenant, session_id)
                gone = {"id": session_id, "object": "session", "deleted": True}
                return 200, JSON, msgspec.json.encode(gone)
        found = {
            "id": tenant_session_id(session.request.session_id),
            "object": "session",
            "model": session.request.model,
            "replica": session.engine,
            "kv_tokens": session.request.tokens,
            "granted_bytes": session.request.granted_bytes,
            "ttl_s": session.request.ttl_s,
            "expires_in_s": round(max(0.0, session.expires_at), 3),  # in seconds from now: see `serve_app.quota`
            "taken_back_in_s": None if session.taken_back_at is None else round(max(0.0, session.taken_back_at), 3),
        }
        return 201 if route.target is SessionCall.OPEN else 200, JSON, msgspec.json.encode(found)

    async def _open(
        self, identity: Identity, header: bytes | None, body: Mapping[str, Any], per_tenant: int
    ) -> Session:
        asked = parse_fields(_SessionFields, body)
        session_id = _session_id(asked.session_id, header)
        found = self._model(asked.model, identity, session_id)
        model = found.settings
        sizes = asked.model_dump(include={"vram_gb", "kv_tokens"}, exclude_none=True)
        if len(sizes) != 1:
            given = "both are given" if sizes else "neither is given"
            raise BadRequest(f"give one of `vram_gb` and `kv_tokens`; {given}", param="vram_gb")
        ((field, size),) = sizes.items()
        request_class = class_of(body, identity)
        if not model.effective_session_slots:
            raise BadRequest(f"{model.name} takes no sessions: its session_slots are 0", param="model")
        if not per_tenant:
            raise Overloaded("no tenant may have sessions here: sessions.per_tenant is 0", code="too_many_sessions")
        info = await found.info()
        if info is None:
            start_s = None if found.ready else found.queue.expected_start_s()
            raise Unavailable(f"no engine of {model.name} has reported the size of its KV cache", retry_after_s=start_s)
        tokens, granted = granted_size(field, size, model, info)
        ask = SessionRequest(
            session_name(identity.tenant, session_id),
            model.name,
            tokens,
            asked.ttl_s or DEFAULT_TTL_S,
            requested_size=f"{size:g} GB" if field == "vram_gb" else f"{size:.0f} tokens",
            granted_bytes=granted,
            per_engine=model.effective_session_slots,
            per_tenant=per_tenant,
            request_class=request_class,
            max_share=model.max_session_share,
        )
        try:
            return await self._session_client.open(ask, asked.wait_s or 0.0)
        except BadRequest as error:
            if error.code != SESSION_TOO_LARGE:
                raise
            raise BadRequest(error.message, param=field, code=SESSION_TOO_LARGE) from None

    def _model(self, name: Any, identity: Identity, session_id: str) -> ModelRouter:
        """The model of a session: of a name the target that the session's requests have. Raises as `model_named`."""
        route = self._names.find(name)
        if route is None:
            return model_named(self._models, self._names, name, identity)
        require_right(route.name, identity)
        return self._models[route.target(session_key(identity.tenant, session_id))]


def granted_size(field: str, size: float, model: ModelSettings, info: EngineInfo) -> tuple[int, int]:
    """KV tokens and bytes over all ranks for a session of `size`, rounded up to the model's buckets.

    Raises:
        BadRequest: the size is less than one block, or the bytes are unknown for this model.
    """
    pool = (info.kv_cache_bytes, info.kv_cache_tokens, info.kv_block_tokens)
    if not all(pool):
        if field == "kv_tokens" and not model.buckets_gb:
            return -(-int(size) // info.kv_block_tokens) * info.kv_block_tokens, 0
        raise BadRequest(f"the engines of {model.name} do not report the bytes of their KV cache", param=field)
    wanted = int(size * GB) if field == "vram_gb" else bytes_for_tokens(int(size), *pool)
    granted = round_up_to_bucket(wanted, [int(one * GB) for one in model.buckets_gb])
    tokens = tokens_in_bytes(granted, *pool)
    if tokens < 1:
        block = bytes_for_tokens(1, *pool)
        raise BadRequest(f"`{field}` is less than one block of KV cache, which is {block / GB:g} GB", param=field)
    return tokens, granted if model.buckets_gb else bytes_for_tokens(tokens, *pool)


def _session_id(given: Any, header: bytes | None) -> str:
    """The id in the body or in the header; a new one, if there is none."""
    param = "session_id"
    shown = None if header is None else header.decode("latin-1")
    if given is None and shown is None:
        return f"session-{secrets.token_hex(ID_BYTES)}"
    if given is None:
        given = shown
        param = "X-Session-Id"
    elif shown is not None and given != shown:
        raise BadRequest("`session_id` and X-Session-Id differ; give one of them", param=param)
    if type(given) is not str or _ID.fullmatch(given) is None:
        raise BadRequest(
            f"`{param}` must be 1 to 128 letters, digits, `.`, `_`, `:` or `-`, the first a letter or digit",
            param=param,
        )
    return given
