"""Responses in the store: chains, items, times and bounds, the same on every database."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from serve_app.core.responses import StoredItem, StoredResponse
from serve_app.store import Store, sql_responses
from serve_app.store.sql import SqlStore
from tests.store.conftest import OpenStore

NOW = 1e9
KEEP_S = 86_400.0
ROOM = 2**20
TEXT = "\u0000 \U0001f511 '); DROP TABLE responses;--"


class Clock:
    """Seconds since 1970, as a test has them."""

    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> float:
        return self.now


def turn(number: int, previous: int | None = None, *, tenant: str = "acme", at: float = NOW, text: str = "") -> Any:
    """A response with an item in and an item out."""
    names = [(f"msg_{number}_{kind}", kind == "out") for kind in ("in", "out")]
    items = [StoredItem(name, is_output, json.dumps({"id": name, "text": text})) for name, is_output in names]
    name = f"resp_{number}"
    previous_id = None if previous is None else f"resp_{previous}"
    body = json.dumps({"id": name, "status": "completed"})
    return StoredResponse(name, tenant, previous_id, at + number, at + number + KEEP_S, body, tuple(items))


def bytes_of(record: StoredResponse) -> int:
    """Of its items."""
    return sum(len(item.text.encode()) for item in record.items)


def run(scenario: Callable[[Store], Awaitable[None]], open_store: OpenStore) -> None:
    asyncio.run(scenario(open_store()))  # type: ignore[arg-type]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def sql(url: str, clock: Clock) -> SqlStore:
    return SqlStore(url, clock)


def test_a_chain_has_the_items_of_all_turns_in_order(sql: SqlStore) -> None:
    for number, previous in enumerate((None, 0, 1, 0)):  # the last one is another branch
        sql.responses.add(turn(number, previous), ROOM)
    found = sql.responses.chain("acme", "resp_2", [], ROOM)
    assert found.ids == ("resp_0", "resp_1", "resp_2")
    assert [json.loads(item)["id"] for item in found.items] == [
        f"msg_{number}_{kind}" for number in range(3) for kind in ("in", "out")
    ]
    assert sql.responses.chain("acme", "resp_3", [], ROOM).ids == ("resp_0", "resp_3")
    assert found.size == sum(len(item) for item in found.items)  # and not their tools and events


def test_a_record_is_read_as_it_was_written(open_store: OpenStore) -> None:
    async def scenario() -> None:
        import time

        written = turn(1, at=time.time(), text=TEXT)
        assert await open_store().responses.add(written, ROOM) == 0
        assert await open_store().responses.add(written, ROOM) == 0  # a repeat changes nothing
        assert await open_store().responses.response("resp_1", "acme") == written
        assert await open_store().responses.delete("resp_1", "acme")
        assert not await open_store().responses.delete("resp_1", "acme")
        with pytest.raises(KeyError):
            await open_store().responses.response("resp_1", "acme")

    asyncio.run(scenario())


def test_another_tenant_s_turns_and_items_are_unknown(sql: SqlStore) -> None:
    sql.responses.add(turn(1, tenant="other"), ROOM)
    sql.responses.add(turn(2, 1), ROOM)  # as no router adds it: its chain is not of one tenant
    assert sql.responses.chain("acme", "resp_1", ["msg_1_in"], ROOM).missing == "resp_1"
    assert sql.responses.chain("acme", "resp_2", [], ROOM).missing == "resp_1"
    assert sql.responses.chain("acme", None, ["msg_1_in", "msg_2_in"], ROOM).references.keys() == {"msg_2_in"}
    assert not sql.responses.delete("resp_1", "acme")
    with pytest.raises(KeyError):
        sql.responses.response("resp_1", "acme")
    assert sql.responses.response("resp_1", "other").tenant == "other"


def test_a_chain_with_a_deleted_turn_is_not_whole(sql: SqlStore) -> None:
    for number, previous in enumerate((None, 0, 1)):
        sql.responses.add(turn(number, previous), ROOM)
    assert sql.responses.delete("resp_0", "acme")
    found = sql.responses.chain("acme", "resp_2", ["msg_0_in"], ROOM)
    assert (found.missing, found.items, dict(found.references)) == ("resp_0", (), {})


def test_of_an_item_that_was_sent_again_the_newest_is_found(sql: SqlStore) -> None:
    for number in (1, 2):
        record = turn(number)
        item = StoredItem("msg_same", False, json.dumps({"turn": number}))
        changed = StoredResponse(**{name: getattr(record, name) for name in record.__slots__} | {"items": (item,)})
        sql.responses.add(changed, ROOM)
    assert json.loads(sql.responses.chain("acme", None, ["msg_same"], ROOM).references["msg_same"]) == {"turn": 2}


def test_a_chain_above_the_bytes_that_are_asked_for_has_no_items(sql: SqlStore) -> None:
    sql.responses.add(replace(turn(1, text="é"), text=json.dumps({"tools": "x" * 10_000})), ROOM)
    size = bytes_of(turn(1, text="é"))
    assert sql.responses.chain("acme", "resp_1", [], size).size == size
    found = sql.responses.chain("acme", "resp_1", [], size - 1)
    assert (found.is_too_large, found.items) == (True, ())


def test_a_chain_above_the_bytes_is_read_no_further_than_that(sql: SqlStore) -> None:
    for number, previous in enumerate((None, 0, 1)):
        sql.responses.add(turn(number, previous), ROOM)
    found = sql.responses.chain("acme", "resp_2", [], bytes_of(turn(0)))
    assert found.is_too_large
    assert bytes_of(turn(0)) < found.size < bytes_of(turn(0)) + bytes_of(turn(1))


def test_an_item_counts_as_often_as_it_is_referred_to(sql: SqlStore) -> None:
    for number in (1, 2):
        sql.responses.add(turn(number, text="é" * 100), ROOM)
    size = len(turn(1, text="é" * 100).items[0].text.encode())
    asked = ["msg_1_in"] * 3 + ["msg_2_in"]
    found = sql.responses.chain("acme", None, asked, 4 * size)
    assert (found.is_too_large, found.size, len(found.references)) == (False, 4 * size, 2)
    for room in (4 * size - 1, size):  # the second one is less than its characters
        found = sql.responses.chain("acme", None, asked, room)
        assert (found.is_too_large, dict(found.references)) == (True, {})


def test_what_is_no_id_of_an_item_is_none_of_the_store_s(sql: SqlStore) -> None:
    sql.responses.add(turn(1), ROOM)
    found = sql.responses.chain("acme", None, ["a\0b", "\ud800", "", "x" * 65, "msg_1_in"], ROOM)
    assert found.references.keys() == {"msg_1_in"}


def test_a_chain_ends_where_an_id_comes_again(sql: SqlStore) -> None:
    for number, previous in enumerate((2, 0, 1)):
        sql.responses.add(turn(number, previous), ROOM)
    found = sql.responses.chain("acme", "resp_2", [], ROOM)
    assert (found.ids, found.missing, found.items) == (("resp_0", "resp_1", "resp_2"), "resp_2", ())


def test_a_chain_of_too_many_turns_is_too_large(sql: SqlStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sql_responses, "MAX_TURNS", 3)
    for number in range(6):
        sql.responses.add(turn(number, number - 1 if number else None), ROOM)
    assert len(sql.responses.chain("acme", "resp_2", [], ROOM).items) == 6
    for last in (3, 5):
        found = sql.responses.chain("acme", f"resp_{last}", [], ROOM)
        assert (found.is_too_large, found.items, found.missing) == (True, (), None)


def test_an_id_whose_time_is_over_is_free(sql: SqlStore, clock: Clock) -> None:
    sql.responses.add(turn(1, text="old"), ROOM)
    clock.now += 2 * KEEP_S
    again = turn(1, at=clock.now, text="new")
    sql.responses.add(again, ROOM)
    assert sql.responses.response("resp_1", "acme") == again


def test_a_turn_keeps_what_it_continues_and_the_rest_is_removed_after_its_time(sql: SqlStore, clock: Clock) -> None:
    sql.responses.add(turn(0), ROOM)
    sql.responses.add(turn(1), ROOM)
    clock.now = NOW + KEEP_S / 2
    sql.responses.add(turn(2, 0, at=clock.now), ROOM)
    clock.now = NOW + KEEP_S + 1
    assert sql.responses.chain("acme", "resp_2", [], ROOM).ids == ("resp_0", "resp_2")
    assert sql.responses.chain("acme", "resp_1", ["msg_1_in"], ROOM).missing == "resp_1"
    assert sql.responses.forget(10, KEEP_S) == 1
    clock.now += KEEP_S
    assert [sql.responses.forget(limit, KEEP_S) for limit in (1, 10, 10)] == [1, 1, 0]
    assert not sql.responses.chain("acme", None, ["msg_0_in", "msg_2_out"], ROOM).references


def test_what_nothing_has_continued_for_a_shorter_time_goes_too(sql: SqlStore, clock: Clock) -> None:
    for number in (0, 1):
        sql.responses.add(turn(number), ROOM)
    clock.now = NOW + KEEP_S / 2
    sql.responses.add(turn(2, 0, at=clock.now), ROOM)
    clock.now += 10
    assert sql.responses.forget(10, KEEP_S) == 0
    assert sql.responses.forget(10, KEEP_S / 4) == 1  # 1: 0 is as new as the turn that continues it
    assert sql.responses.chain("acme", "resp_2", [], ROOM).ids == ("resp_0", "resp_2")
    with pytest.raises(KeyError):
        sql.responses.response("resp_1", "acme")
    clock.now += KEEP_S / 4
    assert (sql.responses.forget(1, KEEP_S / 4), sql.responses.forget(9, KEEP_S / 4)) == (1, 1)


def test_a_tenant_s_oldest_records_make_room_and_no_other_tenant_s(sql: SqlStore) -> None:
    size = turn(1).size
    sql.responses.add(turn(0, tenant="other"), ROOM)
    for number in (1, 2):
        assert sql.responses.add(turn(number), 2 * size) == 0
    assert sql.responses.add(turn(3, 1), 2 * size) == 1  # 1 lives as long as 3, so 2 is the oldest
    assert [sql.responses.chain("acme", f"resp_{number}", [], ROOM).missing for number in (1, 2, 3)] == [
        None,
        "resp_2",
        None,
    ]
    assert sql.responses.response("resp_0", "other")


def test_many_small_records_make_room_for_a_large_one(sql: SqlStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sql_responses, "EVICTED_AT_ONCE", 2)
    for number in range(9):
        sql.responses.add(turn(number), ROOM)
    large = turn(9, text="x" * 4 * turn(1).size)
    assert sql.responses.add(large, large.size + 2 * turn(1).size) == 7
    assert [sql.responses.chain("acme", f"resp_{number}", [], ROOM).missing for number in (6, 7, 9)] == [
        "resp_6",
        None,
        None,
    ]


def test_a_record_that_alone_is_above_the_bound_is_not_kept(sql: SqlStore) -> None:
    assert sql.responses.add(turn(1), turn(1).size - 1) == 1
    assert sql.responses.chain("acme", "resp_1", [], ROOM).missing == "resp_1"
