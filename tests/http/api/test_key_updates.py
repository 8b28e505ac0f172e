"""Rights of a key that are changed over HTTP, while the key itself stays."""

from __future__ import annotations

from typing import Any
from unittest import mock

from tests.fakes.asgi_client import Client, Reply
from tests.fakes.stores import FakeStore, record
from tests.http.api.test_key_routes import (
    ADMIN,
    KEYS,
    LIMITS,
    WRONG_FIELDS,
    create,
    posted,
    revoke,
    status_of,
    store,  # noqa: F401 - a fixture
    with_keys,
)


async def update(client: Client, made: dict[str, Any], **fields: Any) -> Reply:
    return await client.post(fields, f"{KEYS}/{made['id']}", key=ADMIN)


def test_an_update_changes_the_named_fields_and_the_key_stays(store: FakeStore) -> None:  # noqa: F811
    async def scenario(client: Client) -> None:
        made = await create(client, limits=LIMITS, models=["other"], expires_at="2999-01-31T00:00:00Z")
        assert await status_of(client, made) == 403
        reply = await update(client, made, models=None, limits={"tokens_per_minute": None, "max_concurrent": 2})
        changed = posted(reply, 200)
        assert "key" not in changed
        kept = {name: value for name, value in made.items() if name not in ("key", "models", "limits")}
        assert changed == kept | {"models": None, "limits": {"requests_per_minute": 30, "max_concurrent": 2}}
        assert await status_of(client, made) == 200, "the router that made the change knows it at once"
        assert posted(await update(client, made, limits=None, expires_at=None), 200)["limits"] is None
        assert (await store.key(made["id"])).expires_at is None

    with_keys(store, scenario)


def test_a_wrong_field_of_an_update_is_named_and_nothing_is_changed(store: FakeStore) -> None:  # noqa: F811
    async def scenario(client: Client) -> None:
        made = await create(client, limits=LIMITS)
        before = await store.key(made["id"])
        of_limits = [({"limits": {"burst_requests": 5, "requests_per_minute": None}}, "limits")]
        others = [
            ({"tenant": "people"}, "tenant"),
            ({"limits": {"rpm": None}}, "limits.rpm"),
            ({"admin": None}, "admin"),
        ]
        not_here = {"tenant"}
        wrong = [one for one in WRONG_FIELDS if one[1] not in not_here and "burst_requests" not in str(one[0])]
        for fields, param in [*wrong, *of_limits, *others]:
            reply = await update(client, made, **fields)
            assert (reply.status, reply.error["param"]) == (400, param), fields
        assert await store.key(made["id"]) == before

    with_keys(store, scenario)


def test_an_expired_key_is_prolonged_and_a_revoked_one_stays_revoked(store: FakeStore) -> None:  # noqa: F811
    async def scenario(client: Client) -> None:
        expired = await store.create_key(record("sk-old-0123456789", expires_at=1.0))
        made = {"id": expired.key_id, "key": "sk-old-0123456789"}
        assert posted(await update(client, made, name="renamed"), 200)["state"] == "expired"
        assert posted(await update(client, made, expires_at="2999-01-31T00:00:00Z"), 200)["state"] == "active"
        assert await status_of(client, made) == 200
        await revoke(client, made)
        assert (await update(client, made, expires_at=None)).status == 409
        assert await status_of(client, made) == 401

    with_keys(store, scenario)


def test_two_updates_at_once_lose_none(store: FakeStore) -> None:  # noqa: F811
    async def scenario(client: Client) -> None:
        made = await create(client)
        read = await store.key(made["id"])
        with mock.patch.object(store, "key", return_value=read):  # both have read the same state
            replies = [await update(client, made, name="one"), await update(client, made, metrics=True)]
        assert [reply.status for reply in replies] == [200, 409]
        assert ((await store.key(made["id"])).name, (await store.key(made["id"])).metrics) == ("one", False)

    with_keys(store, scenario)
