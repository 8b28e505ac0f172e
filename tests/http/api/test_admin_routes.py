"""Receipts over HTTP: by any id of a request, of every tenant for an operator, and honest where there is none."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from serve_app.core.usage import UsageRow
from serve_app.errors import MethodNotAllowed, NotFound
from serve_app.http.api import routes
from serve_app.http.api.local_routes import LocalRoutes
from serve_app.http.error_responses import Answer
from serve_app.http.keys import KeyRing
from serve_app.settings import AuthSettings
from serve_app.store import UsageQuery
from serve_app.types import Identity, RequestClass
from tests.fakes.stores import no_keys

KNOWN = "/admin/requests/cmpl-a1"
UNKNOWN = "/admin/requests/nobody/knows"


async def receipt(request_id: str, tenant: str | None) -> dict[str, Any]:
    if (request_id, tenant) != ("cmpl-a1", None):
        raise NotFound(f"no request {request_id!r} is known to this key", code="request_not_found")
    return {"request_id": "a1"}


async def scraped() -> bytes:
    return b""


async def no_usage(query: UsageQuery) -> list[UsageRow]:
    raise TimeoutError


def identity_of(*, admin: bool) -> Identity:
    return Identity("tenant", RequestClass.CRITICAL, RequestClass.NORMAL, admin=admin)


def asked(path: str, *, admin: bool = True) -> Answer:
    local = LocalRoutes({}, scraped, receipt, no_usage)
    return asyncio.run(local.answer(routes.resolve("GET", path), identity_of(admin=admin)))


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


def test_the_route_is_a_get() -> None:
    assert routes.resolve("GET", KNOWN).target is routes.LocalCall.REQUEST
    assert routes.resolve("HEAD", KNOWN) == routes.resolve("GET", KNOWN)
    with pytest.raises(MethodNotAllowed):
        routes.resolve("POST", KNOWN)
