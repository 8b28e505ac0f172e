"""Calls of the actor that owns SQLite files: repeated over its death, bounded while it is away."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError

from serve_app.errors import StoreAway
from serve_app.names import STORE_FILE
from serve_app.store import owner
from serve_app.store.owner import OwnerCalls, StoreOwner
from tests.store.records import key


class FakeHandle:
    """An actor whose calls end as `ends` says, the last of them for ever."""

    def __init__(self, *ends: Callable[[], Any]) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.run = self.upgrade = self
        self._ends = list(ends)

    def remote(self, *arguments: Any) -> Any:
        async def answer() -> Any:
            self.calls.append(arguments)
            end = self._ends.pop(0) if len(self._ends) > 1 else self._ends[0]
            return end()

        return answer() if len(arguments) > 1 else None


def died() -> Any:
    raise ActorDiedError


def unavailable() -> Any:
    raise ActorUnavailableError("it restarts", None)


def unknown_key() -> Any:
    raise RayTaskError("run", "a traceback", KeyError("key_0"), pid=1, ip="here").as_instanceof_cause()


@pytest.fixture
def actors(monkeypatch: pytest.MonkeyPatch) -> list[FakeHandle]:
    """The actors found one after the other."""
    found: list[FakeHandle] = []
    monkeypatch.setattr(owner, "store_actor", lambda: found.pop(0) if len(found) > 1 else found[0])
    monkeypatch.setattr(owner, "RETRY_S", 0.0)
    return found


def test_a_call_is_repeated_while_the_actor_restarts(actors: list[FakeHandle]) -> None:
    actors.append(FakeHandle(unavailable, unavailable, lambda: (0, [])))
    assert asyncio.run(OwnerCalls(None)("keys_since", 0)) == (0, [])
    assert actors[0].calls == [(None, "keys_since", (0,), {})] * 3


def test_an_actor_that_was_ended_for_good_is_started_again(actors: list[FakeHandle]) -> None:
    gone = FakeHandle(died)
    new = FakeHandle(lambda: 3)
    actors += [gone, new]
    assert asyncio.run(OwnerCalls("sqlite:////f")("end_source", "router")) == 3
    assert new.calls == [("sqlite:////f", "end_source", ("router",), {})]


def test_an_actor_that_stays_away_is_said_to_be_away(actors: list[FakeHandle], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, "CALL_S", 0.05)
    actors.append(FakeHandle(unavailable))
    with pytest.raises(StoreAway):
        asyncio.run(OwnerCalls(None)("keys"))


def test_what_the_store_raises_comes_out_as_it_is(actors: list[FakeHandle]) -> None:
    actors.append(FakeHandle(unknown_key))
    with pytest.raises(KeyError) as raised:
        asyncio.run(OwnerCalls(None)("key", "key_0"))
    assert type(raised.value) is KeyError
    assert len(actors[0].calls) == 1


def test_without_a_url_the_file_is_the_one_that_the_environment_names(
    monkeypatch: pytest.MonkeyPatch, sqlite_url: str
) -> None:
    monkeypatch.setenv(STORE_FILE, sqlite_url.removeprefix("sqlite:///"))
    actor = StoreOwner()
    made = actor.run(None, "create_key", (key(),), {})
    assert actor.run(sqlite_url, "keys", (), {}) == [made]
    monkeypatch.delenv(STORE_FILE)
    monkeypatch.setenv("HOME", "/home/somebody")
    assert owner.default_url() == "sqlite:////home/somebody/.local/state/serve-app/store.sqlite"
