"""Agent sessions over HTTP: opened, looked at, renewed, closed.

    POST   /v1/sessions              {"model", "session_id", "vram_gb" or "kv_tokens", "ttl_s", "wait_s"} -> 201
    GET    /v1/sessions/{id}         as it is; does not renew it
    POST   /v1/sessions/{id}/renew   puts off its end by its ttl_s
    DELETE /v1/sessions/{id}         gives its memory back

Invariant: a tenant can neither see nor touch another's sessions: their ids are unknown to it.
"""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from serve_app.core.memory import Session, SessionAsk, bucketed, bytes_of, name_of, own_id, tokens_in
from serve_app.core.shared_queue import TOO_LARGE
from serve_app.errors import BadRequest, Overloaded, Unavailable
from serve_app.http.contract import class_of
from serve_app.http.routes import Route, SessionCall
from serve_app.router import ModelRouter, SessionBook
from serve_app.settings import ModelSettings, SessionSettings
from serve_app.transport import EngineInfo
from serve_app.types import Identity

Headers = list[tuple[bytes, bytes]]
Answer = tuple[int, Headers, bytes]

DEFAULT_TTL_S = 600.0  # a tool may take minutes; an agent that has died keeps its memory no longer than that
MIN_TTL_S = 5.0  # above the second in which a router hears of use, and the actor's own restart
MAX_TTL_S = 86_400.0  # a day: what is meant to stay longer is renewed
MAX_WAIT_S = 60.0  # as long as any request may wait: proxies end exchanges in which nothing happens
MAX_VRAM_GB = 1e6  # a petabyte; above it a number is a mistake
MAX_KV_TOKENS = 2**40
GB = 10**9
ID_BYTES = 8  # of an id made here: 64 bits
SESSION_HEADER, SESSION_HEADER_NAME = b"x-session-id", "X-Session-Id"

_JSON: Headers = [(b"content-type", b"application/json")]
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")  # what fits into a path, a header and a table alike
_FIELDS = ("model", "session_id", "vram_gb", "kv_tokens", "ttl_s", "wait_s", "priority", "service_tier")


class SessionRoutes:
    """The routes.

    Args:
        model_of: the model of this name; raises for one that is none.
    """

    def __init__(self, book: SessionBook, model_of: Callable[[object], ModelRouter]) -> None:
        self._book, self._model_of = book, model_of

    async def answer(
        self, route: Route, identity: Identity, headers: Headers, body: Mapping[str, Any], settings: SessionSettings
    ) -> Answer:
        """The whole answer.

        Raises:
            BadRequest: a wrong field; `param` names it. Forbidden: a class above the key's. Otherwise as `SessionBook`.
        """
        tenant, session_id = identity.tenant, route.argument
        match route.target:
            case SessionCall.OPEN:
                return _told(201, await self._open(identity, headers, body, settings))
            case SessionCall.LOOK:
                return _told(200, await self._book.look(tenant, session_id))
            case SessionCall.RENEW:
                return _told(200, await self._book.renew(tenant, session_id))
            case _:
                await self._book.close(tenant, session_id)
                gone = {"id": session_id, "object": "session", "deleted": True}
                return 200, _JSON, msgspec.json.encode(gone)

    async def _open(
        self, identity: Identity, headers: Headers, body: Mapping[str, Any], settings: SessionSettings
    ) -> Session:
        unknown = [name for name in body if name not in _FIELDS]
        if unknown:
            raise BadRequest(
                f"`{unknown[0]}` is no field of a session; they are {', '.join(_FIELDS)}", param=unknown[0]
            )
        session_id = _session_id(body, dict(headers).get(SESSION_HEADER))
        found = self._model_of(body.get("model"))
        model = found.settings
        field = _size_field(body)
        size = _number(body, field, 0, MAX_VRAM_GB if field == "vram_gb" else MAX_KV_TOKENS, whole=field == "kv_tokens")
        ttl_s = _number(body, "ttl_s", MIN_TTL_S, MAX_TTL_S, DEFAULT_TTL_S)
        wait_s = _number(body, "wait_s", 0.0, MAX_WAIT_S, 0.0)
        request_class = class_of(body, identity)
        if not model.session_places:
            raise BadRequest(f"{model.name} takes no sessions: its session_slots are 0", param="model")
        if not settings.per_tenant:
            raise Overloaded("no tenant may have sessions here: sessions.per_tenant is 0", code="too_many_sessions")
        info = await found.info()
        if info is None:
            start_s = None if found.ready else found.queue.expected_start_s()
            raise Unavailable(f"no engine of {model.name} has told the size of its KV cache", retry_after_s=start_s)
        tokens, granted = granted_of(field, size, model, info)
        ask = SessionAsk(
            name_of(identity.tenant, session_id),
            model.name,
            tokens,
            ttl_s,
            given=f"{size:g} GB" if field == "vram_gb" else f"{size:.0f} tokens",
            granted_bytes=granted,
            per_engine=model.session_places,
            per_tenant=settings.per_tenant,
            request_class=request_class,
        )
        try:
            return await self._book.open(ask, wait_s)
        except BadRequest as error:
            if error.code != TOO_LARGE:
                raise
            raise BadRequest(error.message, param=field, code=TOO_LARGE) from None


def granted_of(field: str, size: float, model: ModelSettings, info: EngineInfo) -> tuple[int, int]:
    """KV tokens and bytes over all ranks of a session that asks for `size`, rounded up to the model's buckets.

    Raises:
        BadRequest: it is less than one block, or bytes cannot be told for this model.
    """
    pool = (info.kv_cache_bytes, info.kv_cache_tokens, info.kv_block_tokens)
    if not all(pool):
        if field == "kv_tokens" and not model.buckets_gb:
            return -(-int(size) // info.kv_block_tokens) * info.kv_block_tokens, 0
        raise BadRequest(f"the engines of {model.name} do not tell the bytes of their KV cache", param=field)
    wanted = int(size * GB) if field == "vram_gb" else bytes_of(int(size), *pool)
    granted = bucketed(wanted, [int(one * GB) for one in model.buckets_gb])
    tokens = tokens_in(granted, *pool)
    if tokens < 1:
        block = bytes_of(1, *pool)
        raise BadRequest(f"`{field}` is less than one block of KV cache, which is {block / GB:g} GB", param=field)
    return tokens, granted if model.buckets_gb else bytes_of(tokens, *pool)


def _told(status: int, session: Session) -> Answer:
    """`expires_at` is in seconds from now: see `serve_app.quota`."""
    body = {
        "id": own_id(session.session_id),
        "object": "session",
        "model": session.model,
        "replica": session.pool,
        "kv_tokens": session.tokens,
        "granted_bytes": session.granted_bytes,
        "ttl_s": session.ttl_s,
        "expires_in_s": round(max(0.0, session.expires_at), 3),
    }
    return status, _JSON, msgspec.json.encode(body)


def _session_id(body: Mapping[str, Any], header: bytes | None) -> str:
    given = body.get("session_id")
    param = "session_id"
    if given is None and header is not None:
        given, param = header.decode("latin-1"), SESSION_HEADER_NAME
    elif given is not None and header is not None and given != header.decode("latin-1"):
        raise BadRequest("`session_id` and X-Session-Id differ; give one of them", param=param)
    if given is None:
        return f"session-{secrets.token_hex(ID_BYTES)}"
    if type(given) is not str or _ID.fullmatch(given) is None:
        raise BadRequest(
            f"`{param}` must be 1 to 128 letters, digits, `.`, `_`, `:` or `-`, the first a letter or digit",
            param=param,
        )
    return given


def _size_field(body: Mapping[str, Any]) -> str:
    given = [name for name in ("vram_gb", "kv_tokens") if body.get(name) is not None]
    if len(given) != 1:
        found = "both are given" if given else "neither is given"
        raise BadRequest(f"give one of `vram_gb` and `kv_tokens`; {found}", param="vram_gb")
    return given[0]


def _number(
    body: Mapping[str, Any],
    name: str,
    least: float,
    most: float,
    default: float = 0.0,
    *,
    whole: bool = False,
) -> float:
    value = body.get(name)
    if value is None:
        return default
    kind = "a whole number" if whole else "a number"
    if type(value) not in ((int,) if whole else (int, float)) or not math.isfinite(value):
        raise BadRequest(f"`{name}` must be {kind}", param=name)
    above = name in ("vram_gb", "kv_tokens")  # of these nothing is no size
    if not least <= value <= most or (above and value <= least):
        bounds = f"above {least:g} and at most {most:g}" if above else f"from {least:g} to {most:g}"
        raise BadRequest(f"`{name}` must be {kind} {bounds}", param=name)
    return float(value)
