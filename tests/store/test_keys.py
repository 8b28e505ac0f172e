"""Keys in the store, the same on every database."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from serve_app.core.limits import Limits
from serve_app.errors import KeyConflict
from serve_app.store.store import Store
from serve_app.types import RequestClass
from tests.store.conftest import OpenStore
from tests.store.records import key

EVERYTHING = {
    "previous_digest": b"\x00" * 32,
    "previous_until": 1_900_000_000.125,
    "max_class": RequestClass.CRITICAL,
    "default_class": RequestClass.LOW,
    "admin": True,
    "metrics": True,
    "deploy": True,
    "models": ("Qwen/Qwen3-0.6B", "tiny"),
    "limits": Limits(requests_per_minute=7.5, tokens_per_day=2**50, budget_per_month=0.01),
    "batch_limits": Limits(requests_per_day=7, max_concurrent=3),
    "expires_at": 2e9,
}
NAMES = (
    "Robert'); DROP TABLE api_keys;--",
    '" OR 1=1',
    "%_\\",
    "\u202e\u0627\u0644",
    "\U0001f511" * 64,
    "e\u0301 \u00e9",
    "${HOME}",
)
WRITERS = 6
KEYS_EACH = 8


@pytest.mark.parametrize("fields", [{}, EVERYTHING, {"models": ()}], ids=["defaults", "everything", "no model"])
def test_a_key_is_read_as_it_was_written(open_store: OpenStore, fields: dict[str, Any]) -> None:
    async def scenario() -> None:
        written = key(**fields)
        made = await open_store().create_key(written)
        assert made == replace(written, version=1)
        other = open_store()
        assert await other.keys() == [made]
        assert await other.key(made.key_id) == made
        assert await other.keys_since(0) == (1, [made])

    asyncio.run(scenario())


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_names_are_values_and_never_statements(open_store: OpenStore, name: str) -> None:
    async def scenario() -> None:
        store = open_store()
        made = await store.create_key(key(name, tenant=name, models=(name,)))
        assert (made.name, made.tenant, made.models) == (name, name, (name,))
        with pytest.raises(KeyError):
            await store.key(name)
        assert await store.keys() == [made]

    asyncio.run(scenario())


def test_what_changed_since_a_version_is_reported_once(open_store: OpenStore) -> None:
    async def scenario() -> None:
        store = open_store()
        first = await store.create_key(key("first"))
        second = await store.create_key(key("second"))
        assert await store.keys_since(2) == (2, [])
        revoked = await store.change_key(first.key_id, revoked_at=5.0)
        assert revoked == replace(first, revoked_at=5.0, version=3)
        assert await store.keys_since(2) == (3, [revoked])
        assert await store.keys_since(0) == (3, [second, revoked])

    asyncio.run(scenario())


def test_a_store_that_is_behind_tells_everything(open_store: OpenStore) -> None:
    async def scenario() -> None:
        store = open_store()
        made = await store.create_key(key())
        assert await store.keys_since(9) == (1, [made])

    asyncio.run(scenario())


def test_a_key_made_again_after_a_lost_answer_is_the_same_key(open_store: OpenStore) -> None:
    async def scenario() -> None:
        store = open_store()
        record = key()
        made = await store.create_key(record)
        assert await store.create_key(record) == made
        assert await store.keys() == [made]

    asyncio.run(scenario())


def test_two_keys_never_share_a_digest_or_an_id(open_store: OpenStore) -> None:
    async def scenario() -> None:
        store = open_store()
        record = key()
        made = await store.create_key(record)
        for other in (replace(key(), digest=record.digest), replace(record, digest=b"2" * 32)):
            with pytest.raises(KeyConflict):
                await store.create_key(other)
        assert await store.keys_since(0) == (1, [made])

    asyncio.run(scenario())


def test_a_change_of_an_older_state_is_refused_and_its_repeat_is_not(open_store: OpenStore) -> None:
    async def scenario() -> None:
        store = open_store()
        made = await store.create_key(key())
        changed = await store.change_key(made.key_id, if_version=made.version, digest=b"3" * 32)
        assert await store.change_key(made.key_id, if_version=made.version, digest=b"3" * 32) == changed
        with pytest.raises(KeyConflict):
            await store.change_key(made.key_id, if_version=made.version, digest=b"4" * 32)
        assert await store.keys() == [changed]

    asyncio.run(scenario())


def test_an_unknown_key_is_not_changed(open_store: OpenStore) -> None:
    async def scenario() -> None:
        store = open_store()
        with pytest.raises(KeyError):
            await store.change_key("key_0", revoked_at=1.0)
        assert await store.keys_since(0) == (0, [])

    asyncio.run(scenario())


def test_a_follower_misses_no_key_of_many_writers(open_store: OpenStore) -> None:
    async def write(store: Store, number: int) -> None:
        for item in range(KEYS_EACH):
            made = await store.create_key(key(f"{number}-{item}"))
            await store.change_key(made.key_id, metrics=True)

    async def scenario() -> None:
        writing = asyncio.gather(*(write(open_store(), number) for number in range(WRITERS)))
        follower = open_store()
        version = 0
        seen = {}
        while True:
            last = writing.done()
            before = version
            version, changed = await follower.keys_since(version)
            assert version >= before
            seen |= {record.key_id: record for record in changed}
            if last:
                break
        await writing
        assert version == 2 * WRITERS * KEYS_EACH
        assert {record.key_id: record for record in await follower.keys()} == seen
        assert all(record.metrics for record in seen.values())

    asyncio.run(scenario())
