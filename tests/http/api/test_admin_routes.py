"""What operators ask: with their keys only, and honest while the quota actor or a receipt is away."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from ray.exceptions import RayError

from serve_app.core.usage import UsageRow
from serve_app.errors import Forbidden, MethodNotAllowed, NotFound, Unavailable
from serve_app.http.api import local_routes, routes
from serve_app.http.api.local_routes import GetFigures, LocalRoutes
from serve_app.http.error_responses import Answer
from serve_app.http.keys import KeyRing
from serve_app.settings import AuthSettings
from serve_app.store import UsageQuery
from serve_app.types import Identity, RequestClass
from tests.fakes.stores import no_keys

FIGURES = {"free_bytes": 7}
QUOTA = "/admin/quota"
KNOWN = "/admin/requests/cmpl-a1"
UNKNOWN = "/admin/requests/nobody/knows"


class AwayError(RayError):
    """What the actor's caller sees while it is not there."""


async def current() -> dict[str, Any]:
    return FIGURES


async def gone() -> dict[str, Any]:
    raise AwayError


async def receipt(request_id: str, tenant: str | None) -> dict[str, Any] | None:
    return {"request_id": "a1"} if (request_id, tenant) == ("cmpl-a1", None) else None


async def scraped() -> bytes:
    return b""


async def no_usage(query: UsageQuery) -> list[UsageRow]:
    raise TimeoutError


async def silent() -> dict[str, Any]:
    await asyncio.Event().wait()
    return {}


def identity_of(*, admin: bool) -> Identity:
    return Identity("tenant", RequestClass.CRITICAL, RequestClass.NORMAL, admin=admin)


def asked(path: str, figures: GetFigures = current, *, admin: bool = True) -> Answer:
    local = LocalRoutes({}, scraped, figures, receipt, no_usage)
    return asyncio.run(local.answer(routes.resolve("GET", path), identity_of(admin=admin)))


def test_an_operator_sees_the_ledger() -> None:
    status, _, body = asked(QUOTA)
    assert (status, json.loads(body)) == (200, FIGURES)


def test_another_key_does_not_whatever_its_class() -> None:
    with pytest.raises(Forbidden, match=r"auth\.keys") as refused:
        asked(QUOTA, admin=False)
    assert (refused.value.status, refused.value.code) == (403, "not_admin")


@pytest.mark.parametrize("figures", [gone, silent])
def test_while_the_actor_is_away_it_says_so_in_time(figures: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_routes, "ANSWER_TIMEOUT_S", 0.05)
    with pytest.raises(Unavailable) as refused:
        asked(QUOTA, figures)
    assert (refused.value.status, refused.value.code) == (503, "no_quota")


def test_an_operator_sees_what_became_of_a_request() -> None:
    status, _, body = asked(KNOWN)
    assert (status, json.loads(body)) == (200, {"request_id": "a1"})


def test_a_request_that_nobody_knows_is_a_404_that_names_it() -> None:
    with pytest.raises(NotFound, match="nobody/knows") as refused:
        asked(UNKNOWN)
    assert (refused.value.status, refused.value.code) == (404, "request_not_found")


def test_the_right_comes_with_the_key_alone() -> None:
    keys = [{"key": "sk-operator-0123456789", "admin": True}, {"key": "sk-somebody-0123456789"}]
    ring = KeyRing(AuthSettings.model_validate({"keys": keys}), no_keys())
    found = [ring.identify({b"authorization": f"Bearer {one['key']}".encode()}).admin for one in keys]
    assert found == [True, False]


@pytest.mark.parametrize("path", [QUOTA, KNOWN])
def test_the_routes_are_gets(path: str) -> None:
    assert routes.resolve("GET", path).target in (routes.LocalCall.QUOTA, routes.LocalCall.REQUEST)
    assert routes.resolve("HEAD", path) == routes.resolve("GET", path)
    with pytest.raises(MethodNotAllowed):
        routes.resolve("POST", path)
