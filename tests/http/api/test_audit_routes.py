"""The audit record over HTTP: what operators read of the changes of keys, page by page, and when it ends."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

import pytest

from serve_app.http.api.store_sweep import StoreSweep
from serve_app.settings import Settings
from serve_app.store import AuditAction, AuditEntry, Author
from tests.fakes.asgi_client import BATCH_KEY, KEY, Client
from tests.fakes.engines import run
from tests.fakes.stores import FakeStore
from tests.http.api.test_key_routes import (
    ADMIN,
    create,
    posted,
    revoke,
    rotate,
    store,  # noqa: F401 - a fixture
    with_keys,
)

AUDIT = "/admin/audit"
DAY_S = 86_400.0
DAYS = 30


async def page(client: Client, **query: Any) -> dict[str, Any]:
    return posted(await client.get(AUDIT, key=ADMIN, query=urlencode(query)), 200)


def test_an_operator_reads_who_made_replaced_and_ended_a_key(store: FakeStore) -> None:  # noqa: F811
    async def scenario(client: Client) -> None:
        made = await create(client)
        rotated = await rotate(client, made, grace_s=0)
        await revoke(client, made)
        found = await page(client)
        assert [one["action"] for one in found["data"]] == ["key.create", "key.rotate", "key.revoke"]
        assert {(one["author"], one["tenant"], one["target"]) for one in found["data"]} == {
            ("ops", "default", made["id"])
        }
        assert found["data"][0]["time"].endswith("Z")
        assert not found["has_more"]
        assert made["key"] not in str(found)
        assert rotated.status == 200

    with_keys(store, scenario)


def test_pages_follow_each_other_by_their_cursor(store: FakeStore) -> None:  # noqa: F811
    async def scenario(client: Client) -> None:
        for number in range(5):
            await create(client, name=str(number))
        first = await page(client, limit=2)
        second = await page(client, limit=2, cursor=first["next_cursor"])
        third = await page(client, limit=2, cursor=second["next_cursor"])
        names = [one["details"]["name"] for found in (first, second, third) for one in found["data"]]
        assert names == ["0", "1", "2", "3", "4"]
        assert [found["has_more"] for found in (first, second, third)] == [True, True, False]
        empty = await page(client, cursor=third["next_cursor"])
        assert (empty["data"], empty["next_cursor"]) == ([], third["next_cursor"]), "a collector goes on from there"

    with_keys(store, scenario)


def test_entries_are_asked_for_by_time(store: FakeStore) -> None:  # noqa: F811
    async def scenario(client: Client) -> None:
        for at in (1e9, 2e9):
            await store.add_audit(AuditEntry(AuditAction.DRAIN, str(at), Author("machine"), at))
        found = await page(client, since="2030-01-01T00:00:00+01:00")
        assert [(one["time"], one["author"], one["tenant"]) for one in found["data"]] == [
            ("2033-05-18T03:33:20Z", "machine", None)
        ]

    with_keys(store, scenario)


@pytest.mark.parametrize("key", [KEY, BATCH_KEY])
def test_a_tenant_s_key_reads_nothing(store: FakeStore, key: str) -> None:  # noqa: F811
    async def scenario(client: Client) -> None:
        reply = await client.get(AUDIT, key=key)
        assert (reply.status, reply.error["code"]) == (403, "not_admin")

    with_keys(store, scenario)


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("since=yesterday", "since"),
        ("since=2026-11-01T00:00:00", "since"),
        ("limit=0", "limit"),
        ("limit=1001", "limit"),
        ("cursor=x", "cursor"),
        ("cursor=-1", "cursor"),
        ("until=2026-11-01T00:00:00Z", "until"),
    ],
)
def test_a_wrong_parameter_is_named(store: FakeStore, query: str, param: str) -> None:  # noqa: F811
    async def scenario(client: Client) -> None:
        reply = await client.get(AUDIT, key=ADMIN, query=query)
        assert (reply.status, reply.error["param"]) == (400, param)

    with_keys(store, scenario)


def test_while_the_store_is_away_there_is_no_record(store: FakeStore) -> None:  # noqa: F811
    async def scenario(client: Client) -> None:
        store.away = True
        reply = await client.get(AUDIT, key=ADMIN)
        assert (reply.status, reply.error["code"]) == (503, "no_store")

    with_keys(store, scenario)


def test_entries_end_after_the_days_of_the_settings(store: FakeStore) -> None:  # noqa: F811
    async def scenario(_: Any) -> None:
        for age_days in (DAYS + 1, DAYS - 1):
            await store.add_audit(
                AuditEntry(AuditAction.DRAIN, str(age_days), Author("machine"), 1e9 - age_days * DAY_S)
            )
        settings = Settings.model_validate({"store": {"audit_days": DAYS}})
        sweep = StoreSweep(lambda: store, lambda: settings, lambda: 1e9)
        assert await sweep.sweep() == 1
        assert [one.target for one in await store.audit(0.0, 0, 9)] == [str(DAYS - 1)]

    run(scenario)
