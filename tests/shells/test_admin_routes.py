"""GET /admin/quota: for operators' keys only, and honest while the quota actor is away."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from serve_app.errors import Forbidden, Unavailable
from serve_app.http import admin_routes, routes
from serve_app.http.admin_routes import AdminRoutes
from serve_app.http.keys import KeyRing
from serve_app.settings import AuthSettings
from serve_app.types import Identity, RequestClass

FIGURES = {"free_bytes": 7}


class AwayError(Exception):
    """What the actor's caller sees while it is not there."""


async def there() -> dict[str, Any]:
    return FIGURES


async def gone() -> dict[str, Any]:
    raise AwayError


async def silent() -> dict[str, Any]:
    await asyncio.Event().wait()
    return {}


def who(*, admin: bool) -> Identity:
    return Identity("key", "tenant", RequestClass.CRITICAL, RequestClass.NORMAL, admin=admin)


def test_an_operator_sees_the_ledger() -> None:
    status, _, body = asyncio.run(AdminRoutes(there, (AwayError,)).quota(who(admin=True)))
    assert (status, json.loads(body)) == (200, FIGURES)


def test_another_key_does_not_whatever_its_class() -> None:
    with pytest.raises(Forbidden, match=r"auth\.keys") as refused:
        asyncio.run(AdminRoutes(there, (AwayError,)).quota(who(admin=False)))
    assert (refused.value.status, refused.value.code) == (403, "not_admin")


@pytest.mark.parametrize("figures", [gone, silent])
def test_while_the_actor_is_away_it_says_so_in_time(figures: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin_routes, "ANSWER_S", 0.05)
    with pytest.raises(Unavailable) as refused:
        asyncio.run(AdminRoutes(figures, (AwayError,)).quota(who(admin=True)))
    assert (refused.value.status, refused.value.code) == (503, "no_quota")


def test_the_right_comes_with_the_key_alone() -> None:
    keys = [{"key": "sk-operator-0123456789", "admin": True}, {"key": "sk-somebody-0123456789"}]
    ring = KeyRing(AuthSettings.model_validate({"keys": keys}))
    found = [ring.identify([(b"authorization", f"Bearer {one['key']}".encode())]).admin for one in keys]
    assert found == [True, False]


def test_the_route_is_a_get() -> None:
    assert routes.resolve("GET", "/admin/quota").target is routes.AdminCall.QUOTA
    with pytest.raises(routes.WrongMethod):
        routes.resolve("POST", "/admin/quota")
