"""The audit record in the store, the same on every database."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from serve_app.core.limits import Limits
from serve_app.errors import KeyConflict
from serve_app.store import AuditAction, AuditEntry, Author, Store
from serve_app.store.audit import NOBODY_KNOWN
from serve_app.store.sql import SqlStore
from serve_app.store.sql_audit import SqlAudit
from serve_app.types import RequestClass
from tests.store.conftest import OpenStore
from tests.store.records import key

OPS = Author("ops", "platform")
WRITERS = 6
ENTRIES_EACH = 8


def entry(target: str = "replica", **fields: Any) -> AuditEntry:
    given = {"action": AuditAction.DRAIN, "target": target, "author": Author("machine"), "at": 1e9}
    return AuditEntry(**{**given, **fields})


async def everything(store: Store) -> list[AuditEntry]:
    return await store.audit(0.0, 0, 1000)


def test_an_entry_is_read_as_it_was_written(open_store: OpenStore) -> None:
    async def scenario() -> None:
        written = entry(
            "node \u202e \U0001f511 '); DROP TABLE audit;--",
            at=1_900_000_000.125,
            digest_before="a" * 64,
            digest_after="b" * 64,
            details={"within_s": 30.5, "user": "ops", "steps": ["a", None]},
        )
        await open_store().add_audit(written)
        assert await everything(open_store()) == [replace(written, number=1)]

    asyncio.run(scenario())


def test_an_entry_that_is_sent_twice_is_there_once(open_store: OpenStore) -> None:
    async def scenario() -> None:
        store = open_store()
        written = entry()
        await store.add_audit(written)
        await store.add_audit(written)
        assert [found.entry_id for found in await everything(store)] == [written.entry_id]

    asyncio.run(scenario())


def test_every_change_of_a_key_leaves_one_entry_without_a_digest(open_store: OpenStore) -> None:
    async def scenario() -> None:
        store = open_store()
        made = await store.create_key(key("laptop", limits=Limits(max_concurrent=2)), OPS)
        rights = {"max_class": RequestClass.CRITICAL, "models": ("tiny",), "limits": Limits(max_concurrent=3)}
        await store.change_key(made.key_id, by=OPS, **rights)
        await store.change_key(made.key_id, by=OPS, **rights)  # a repeat changes nothing
        await store.change_key(made.key_id, by=OPS, digest=b"7" * 32, previous_digest=made.digest, previous_until=9.5)
        await store.change_key(made.key_id, by=OPS, revoked_at=7.5)
        found = await everything(store)
        assert [one.action for one in found] == ["key.create", "key.update", "key.rotate", "key.revoke"]
        assert {(one.target, one.author) for one in found} == {(made.key_id, OPS)}
        assert [one.details.get("changed") for one in found[1:]] == [
            {
                "max_class": ["high", "critical"],
                "models": [None, ["tiny"]],
                "limits": [{"max_concurrent": 2}, {"max_concurrent": 3}],
            },
            {"previous_until": [None, 9.5]},
            {"revoked_at": [None, 7.5]},
        ]
        assert found[0].details["limits"] == {"max_concurrent": 2}
        assert {one.details["name"] for one in found} == {"laptop"}
        assert made.digest.hex() not in str(found)
        assert str(made.digest) not in str(found)

    asyncio.run(scenario())


def test_a_change_that_is_refused_leaves_no_entry(open_store: OpenStore) -> None:
    async def scenario() -> None:
        store = open_store()
        record = key()
        made = await store.create_key(record, OPS)
        assert await store.create_key(record, OPS) == made
        with pytest.raises(KeyConflict):
            await store.create_key(replace(key(), digest=record.digest), OPS)
        with pytest.raises(KeyConflict):
            await store.change_key(made.key_id, if_version=99, by=OPS, metrics=True)
        with pytest.raises(KeyError):
            await store.change_key("key_0", by=OPS, metrics=True)
        assert [one.action for one in await everything(store)] == ["key.create"]

    asyncio.run(scenario())


def test_a_key_is_not_changed_if_its_entry_cannot_be_written(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = SqlStore(url)
    made = store.create_key(key(), OPS)

    def full(*_: Any) -> None:
        raise RuntimeError("no room for the entry")

    monkeypatch.setattr(SqlAudit, "add_in", full)
    with pytest.raises(RuntimeError):
        store.create_key(key(), OPS)
    with pytest.raises(RuntimeError):
        store.change_key(made.key_id, by=OPS, metrics=True)
    assert store.keys_since(0) == (1, [made])


def test_whoever_changes_a_key_without_a_name_is_unknown(open_store: OpenStore) -> None:
    async def scenario() -> None:
        store = open_store()
        await store.create_key(key())
        assert [one.author for one in await everything(store)] == [NOBODY_KNOWN]

    asyncio.run(scenario())


def test_entries_are_read_by_time_and_page(open_store: OpenStore) -> None:
    async def scenario() -> None:
        store = open_store()
        for number in range(5):
            await store.add_audit(entry(str(number), at=float(number)))

        async def targets(since: float, after: int, limit: int) -> list[str]:
            return [one.target for one in await store.audit(since, after, limit)]

        assert await targets(0.0, 0, 2) == ["0", "1"]
        assert await targets(0.0, 2, 2) == ["2", "3"]
        assert await targets(3.0, 0, 9) == ["3", "4"]
        assert await targets(0.0, 5, 9) == []

    asyncio.run(scenario())


def test_old_entries_are_forgotten_some_at_a_time(open_store: OpenStore) -> None:
    async def scenario() -> None:
        store = open_store()
        for number in range(5):
            await store.add_audit(entry(str(number), at=float(number)))
        assert [await store.forget_audit(4.0, 3) for _ in range(3)] == [3, 1, 0]
        (left,) = await everything(store)
        assert (left.target, left.number) == ("4", 5)
        await store.add_audit(entry("5"))
        assert [one.number for one in await everything(store)] == [5, 6]

    asyncio.run(scenario())


def test_a_reader_misses_no_entry_of_many_writers(open_store: OpenStore) -> None:
    async def write(store: Store, number: int) -> None:
        for item in range(ENTRIES_EACH):
            await store.add_audit(entry(f"{number}-{item}"))
            await store.create_key(key(), OPS)

    async def scenario() -> None:
        writing = asyncio.gather(*(write(open_store(), number) for number in range(WRITERS)))
        reader = open_store()
        seen: list[AuditEntry] = []
        while True:
            last = writing.done()
            seen += await reader.audit(0.0, seen[-1].number if seen else 0, 7)
            if last and len(seen) >= 2 * WRITERS * ENTRIES_EACH:
                break
            if last:
                before = len(seen)
                seen += await reader.audit(0.0, seen[-1].number, 1000)
                assert len(seen) > before, "the reader has missed entries"
        await writing
        assert await everything(reader) == seen

    asyncio.run(scenario())
