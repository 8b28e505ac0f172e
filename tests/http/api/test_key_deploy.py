"""The right to deploy: no key has it by default, and none gets it from a key that has not got it."""

from __future__ import annotations

from typing import Any

import pytest

from serve_app.settings import KeySettings, Settings
from serve_app.store import KeyRecord
from tests.fakes.asgi_client import Client
from tests.fakes.stores import FakeStore, record
from tests.http.api.test_key_routes import (
    ADMIN,
    GOOD,
    KEYS,
    posted,
    store,  # noqa: F401 - a fixture
    with_keys,
)

CI = "sk-ci-0123456789abcdef"
OPERATOR_TOO = "sk-both-0123456789abcdef"


async def known(client: Client, secret: str, **rights: Any) -> dict[str, Any]:
    """A key of the store with these rights, which the router knows."""
    follower = client.edge.parts.follower
    made = await follower.store.create_key(record(secret, **rights))
    await follower.follow()
    return {"id": made.key_id, "key": secret}


def test_no_key_may_deploy_by_default() -> None:
    assert not KeySettings(key="sk-0123456789abcdef").deploy
    assert not Settings().with_key("sk-0123456789abcdef").auth.keys[0].deploy, "nor the one that is generated"
    assert not KeyRecord("key_1", "a", "acme", b"").deploy


def test_an_operator_s_key_makes_changes_and_rotates_none_that_may_deploy(store: FakeStore) -> None:  # noqa: F811
    async def scenario(client: Client) -> None:
        ci = await known(client, CI, deploy=True)
        plain = posted(await client.post(GOOD, KEYS, key=ADMIN))
        assert plain["deploy"] is False
        before = await store.keys()
        attacks: list[tuple[str, dict[str, Any]]] = [
            (KEYS, GOOD | {"deploy": True}),
            (f"{KEYS}/{plain['id']}", {"deploy": True}),
            (f"{KEYS}/{ci['id']}", {"admin": True}),
            (f"{KEYS}/{ci['id']}", {"deploy": False}),
            (f"{KEYS}/{ci['id']}/rotate", {"grace_s": 0}),
        ]
        for path, fields in attacks:
            reply = await client.post(fields, path, key=ADMIN)
            assert (reply.status, reply.error["code"]) == (403, "no_deploy_right"), path
        assert await store.keys() == before

    with_keys(store, scenario)


def test_a_key_that_may_deploy_alone_makes_no_key(store: FakeStore) -> None:  # noqa: F811
    async def scenario(client: Client) -> None:
        await known(client, CI, deploy=True)
        for fields in (GOOD, GOOD | {"deploy": True}):
            assert (await client.post(fields, KEYS, key=CI)).error["code"] == "not_admin"

    with_keys(store, scenario)


def test_an_operator_that_may_deploy_gives_the_right_and_every_operator_ends_it(store: FakeStore) -> None:  # noqa: F811
    async def scenario(client: Client) -> None:
        await known(client, OPERATOR_TOO, admin=True, deploy=True)
        made = posted(await client.post(GOOD | {"deploy": True}, KEYS, key=OPERATOR_TOO))
        assert made["deploy"] is True
        rotated = posted(await client.post({"grace_s": 0}, f"{KEYS}/{made['id']}/rotate", key=OPERATOR_TOO), 200)
        assert rotated["deploy"] is True
        ended = posted(await client.request("DELETE", f"{KEYS}/{made['id']}", key=ADMIN), 200)
        assert ended["state"] == "revoked"
        (entry, *_) = await store.audit(0.0, 0, 9)
        assert entry.details["deploy"] is True

    with_keys(store, scenario)


@pytest.mark.parametrize("plan_only", [True, False])
def test_the_route_refuses_an_operator_s_key(store: FakeStore, *, plan_only: bool) -> None:  # noqa: F811
    async def scenario(client: Client) -> None:
        body = {"configuration": {}, "plan_only": plan_only}
        assert (await client.post(body, "/admin/deploys", key=ADMIN)).error["code"] == "no_deploy_right"
        await known(client, CI, deploy=True)
        assert (await client.post(body, "/admin/deploys", key=CI)).status == 503, "the fake cluster is away"

    with_keys(store, scenario)
