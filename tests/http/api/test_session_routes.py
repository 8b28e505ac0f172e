"""Sessions over HTTP without a cluster: what bad input gets, and what size is granted."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from serve_app.core.memory import Session, SessionRequest
from serve_app.errors import BadRequest, Forbidden, MethodNotAllowed, NotFound, Overloaded
from serve_app.http.api.routes import HttpRoute, SessionCall, resolve
from serve_app.http.api.session_routes import SessionRoutes, granted_size
from serve_app.settings.settings import ModelSettings
from serve_app.transport import EngineInfo
from serve_app.types import Identity, RequestClass

WHO = Identity("tenant", RequestClass.HIGH, RequestClass.NORMAL)
INFO = EngineInfo("m", ["generate"], 8192, 64, 16_000, 16_000_000, kv_block_tokens=16)  # a block is 16,000 bytes
GOOD = {"model": "m", "session_id": "a", "kv_tokens": 100}


class Book:
    """Opens whatever it is asked for."""

    def __init__(self) -> None:
        self.asks: list[tuple[SessionRequest, float]] = []

    async def open(self, ask: SessionRequest, wait_s: float) -> Session:
        self.asks.append((ask, wait_s))
        if ask.tokens > 10_000:
            raise BadRequest("too large", code="session_too_large")
        return Session(ask, "r1", ask.ttl_s)


def lines_of(model: ModelSettings) -> Any:
    async def info() -> EngineInfo:
        return INFO

    return {model.name: SimpleNamespace(settings=model, info=info, ready=True)}


def open_(
    body: dict[str, Any], *, header: str | None = None, model: ModelSettings | None = None, per_tenant: int = 8
) -> tuple[dict[str, Any], Book]:
    book = Book()
    routes = SessionRoutes(book, lines_of(model or ModelSettings(name="m")))  # type: ignore[arg-type]
    sent = None if header is None else header.encode()
    route = HttpRoute(SessionCall.OPEN)
    status, _, reported = asyncio.run(routes.answer(route, WHO, sent, body, per_tenant))
    assert status == 201
    return json.loads(reported), book


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"session_id": 7}, "session_id"),
        ({"session_id": "a b"}, "session_id"),
        ({"session_id": "a/renew"}, "session_id"),
        ({"session_id": ""}, "session_id"),
        ({"session_id": "x" * 129}, "session_id"),
        ({"kv_tokens": None}, "vram_gb"),
        ({"vram_gb": 1}, "vram_gb"),
        ({"kv_tokens": 1.5}, "kv_tokens"),
        ({"kv_tokens": "100"}, "kv_tokens"),
        ({"kv_tokens": True}, "kv_tokens"),
        ({"kv_tokens": 0}, "kv_tokens"),
        ({"kv_tokens": -1}, "kv_tokens"),
        ({"kv_tokens": None, "vram_gb": 0}, "vram_gb"),
        ({"kv_tokens": None, "vram_gb": "1GB"}, "vram_gb"),
        ({"kv_tokens": None, "vram_gb": float("inf")}, "vram_gb"),
        ({"kv_tokens": None, "vram_gb": 1e-6}, "vram_gb"),  # less than a block
        ({"ttl_s": 1}, "ttl_s"),
        ({"ttl_s": 1e9}, "ttl_s"),
        ({"ttl_s": "60"}, "ttl_s"),
        ({"wait_s": -1}, "wait_s"),
        ({"wait_s": 1000}, "wait_s"),
        ({"wait_s": [1]}, "wait_s"),
        ({"tokens": 5}, "tokens"),
        ({"kv_tokens": 20_000}, "kv_tokens"),  # more than any engine has
    ],
)
def test_a_wrong_value_is_refused_by_the_name_of_its_field(wrong: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as refused:
        open_(GOOD | wrong)
    assert refused.value.param == param


def test_a_session_waits_as_the_callers_class_which_may_not_be_above_the_keys() -> None:
    for body, level in (({}, RequestClass.NORMAL), ({"priority": "high"}, RequestClass.HIGH)):
        ((ask, _),) = open_(GOOD | body)[1].asks
        assert ask.request_class is level
    with pytest.raises(Forbidden) as refused:
        open_(GOOD | {"priority": "critical"})
    assert refused.value.status == 403


def test_an_unknown_model_and_one_without_places_are_refused() -> None:
    with pytest.raises(NotFound):
        open_(GOOD | {"model": "other"})
    for model in (ModelSettings(name="m", session_slots=0), ModelSettings(name="m", task="embed")):
        with pytest.raises(BadRequest, match="takes no sessions"):
            open_(GOOD, model=model)
    with pytest.raises(Overloaded):
        open_(GOOD, per_tenant=0)


def test_the_id_comes_from_the_body_or_the_header_or_is_made() -> None:
    assert open_(GOOD)[0]["id"] == "a"
    assert open_({"model": "m", "kv_tokens": 16}, header="from-header")[0]["id"] == "from-header"
    assert open_(GOOD, header="a")[0]["id"] == "a"
    with pytest.raises(BadRequest, match="differ"):
        open_(GOOD, header="b")
    made = {open_({"model": "m", "kv_tokens": 16})[0]["id"] for _ in range(2)}
    assert len(made) == 2


def test_what_is_asked_of_the_actor_carries_tenant_bounds_and_wait() -> None:
    model = ModelSettings(name="m", session_slots=3, max_session_share=0.25)
    _, book = open_(GOOD | {"wait_s": 2, "ttl_s": 9}, model=model)
    ((ask, wait_s),) = book.asks
    assert (ask.session_id, ask.tokens, ask.ttl_s, wait_s) == ("tenant a", 112, 9.0, 2.0)
    assert (ask.per_engine, ask.per_tenant, ask.max_share) == (3, 8, 0.25)


@pytest.mark.parametrize(
    ("field", "size", "buckets", "tokens", "granted"),
    [
        ("vram_gb", 0.001, (), 992, 992_000),
        ("kv_tokens", 1, (), 16, 16_000),
        ("kv_tokens", 17, (), 32, 32_000),
        ("vram_gb", 0.001, (0.002, 0.004), 2000, 2_000_000),
        ("kv_tokens", 17, (0.002, 0.004), 2000, 2_000_000),
        ("vram_gb", 0.003, (0.002, 0.004), 4000, 4_000_000),
        ("vram_gb", 0.005, (0.002, 0.004), 8000, 8_000_000),
    ],
)
def test_a_size_becomes_whole_blocks_of_the_bucket(
    field: str, size: float, buckets: tuple[float, ...], tokens: int, granted: int
) -> None:
    model = ModelSettings(name="m", buckets_gb=buckets)
    assert granted_size(field, size, model, INFO) == (tokens, granted)


def test_an_engine_that_does_not_tell_its_bytes_still_gives_tokens() -> None:
    info = EngineInfo("m", ["generate"], 8192, 64, 16_000, 0, kv_block_tokens=16)
    assert granted_size("kv_tokens", 17, ModelSettings(name="m"), info) == (32, 0)
    with pytest.raises(BadRequest, match="do not report"):
        granted_size("vram_gb", 1, ModelSettings(name="m"), info)


@pytest.mark.parametrize(
    ("method", "path", "target", "argument"),
    [
        ("POST", "/v1/sessions", SessionCall.OPEN, ""),
        ("GET", "/v1/sessions/a-1", SessionCall.GET, "a-1"),
        ("DELETE", "/v1/sessions/a-1/", SessionCall.CLOSE, "a-1"),
        ("POST", "/v1/sessions/a-1/renew", SessionCall.RENEW, "a-1"),
    ],
)
def test_the_routes_of_a_session(method: str, path: str, target: SessionCall, argument: str) -> None:
    assert resolve(method, path) == HttpRoute(target, argument)


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [("POST", "/v1/sessions/a", ("GET", "HEAD", "DELETE")), ("GET", "/v1/sessions/a/renew", ("POST",))],
)
def test_a_wrong_method_of_a_session_is_given_the_right_ones(method: str, path: str, allow: tuple[str, ...]) -> None:
    with pytest.raises(MethodNotAllowed) as wrong:
        resolve(method, path)
    assert wrong.value.allow == allow
