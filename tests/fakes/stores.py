"""A store in a file of the test, which can be away."""

from __future__ import annotations

import hashlib
import operator
from pathlib import Path
from typing import Any

from serve_app.errors import StoreAway
from serve_app.http.stored_keys import KeyFollower, KeyList, KeyTable
from serve_app.store import KeyRecord, Store, new_key_id
from serve_app.store.sql import SqlStore
from tests.fakes.databases import with_tables


class FakeStore(Store):
    """Answers in the calling thread, so that a test has no threads. `away`: every call fails."""

    def __init__(self, folder: Path) -> None:
        self.away = False
        self.calls = 0
        self.file = with_tables(folder / "store.sqlite")
        self.sql = SqlStore(f"sqlite:///{self.file}")
        self.closed = False
        super().__init__(self._answer, self._close)

    def _close(self) -> None:
        self.closed = True

    async def _answer(self, method: str, *arguments: Any, **named: Any) -> Any:
        self.calls += 1
        if self.away:
            raise StoreAway("the store is away")
        return operator.attrgetter(method)(self.sql)(*arguments, **named)


class Routers:
    """The other routers, which know these lists."""

    def __init__(self, *lists: KeyList | BaseException | None) -> None:
        self.lists = lists
        self.asked = 0

    async def __call__(self) -> list[Any]:
        self.asked += 1

        async def answer(reply: KeyList | BaseException | None) -> KeyList | None:
            if isinstance(reply, BaseException):
                raise reply
            return reply

        return [answer(one) for one in self.lists]


def no_keys() -> KeyTable:
    """Of a store without a key."""
    table = KeyTable()
    table.replace(0, [])
    return table


def empty_follower() -> KeyFollower:
    """Follows a store that had no key when it was heard of last, and is away."""

    async def away(*_: Any, **__: Any) -> Any:
        raise StoreAway("the store is away")

    follower = KeyFollower(None, Routers(), lambda _: Store(away))
    follower.stored.replace(0, [])
    return follower


def follower_of(store: Store, routers: Routers | None = None) -> KeyFollower:
    return KeyFollower(None, routers or Routers(), lambda _: store)


def record(secret: str, **fields: Any) -> KeyRecord:
    """The record of a key that is `secret`."""
    given = {
        "key_id": new_key_id(),
        "name": "a key",
        "tenant": "acme",
        "digest": hashlib.sha256(secret.encode()).digest(),
    }
    return KeyRecord(**given | fields)
