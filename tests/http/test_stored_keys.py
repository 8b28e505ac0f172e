"""A router and the keys of the store: it follows them, and goes on without it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import tracemalloc
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import RayError

from serve_app.core.limits import Limits
from serve_app.errors import StoreAway, Unauthorized
from serve_app.http import stored_keys
from serve_app.http.keys import KeyRing
from serve_app.http.stored_keys import KeyFollower, KeyTable, identity_of
from serve_app.settings import AuthSettings
from serve_app.types import Identity
from tests.effort import effort
from tests.fakes.engines import until
from tests.fakes.router import SOON_S
from tests.fakes.stores import FakeStore, Routers, follower_of, record

OF_FILE = "sk-of-the-file-0123456789"
MINE = "sk-mine-0123456789"
OTHER = "sk-other-0123456789"
AUTH = AuthSettings.model_validate(
    {"keys": [{"key": OF_FILE, "name": "ops"}], "key_limits": {"requests_per_minute": 60}}
)
HOUR_S = 3600.0
MANY = effort(2_000, 10_000)
MANY_BYTES = 3 * 2**10 * MANY


class Clock:
    def __init__(self) -> None:
        self.now_s = 1.8e9

    def __call__(self) -> float:
        return self.now_s


class Ring:
    """The keys of one router, with a clock of its own."""

    def __init__(self, follower: KeyFollower) -> None:
        self.clock = Clock()
        self.follower = follower
        self.keys = KeyRing(AUTH, follower.stored, self.clock)

    def identify(self, secret: str) -> Identity:
        return self.keys.identify({b"authorization": f"Bearer {secret}".encode()})

    def refusal(self, secret: str) -> str:
        with pytest.raises(Unauthorized) as refused:
            self.identify(secret)
        return refused.value.message


@pytest.fixture
def store(tmp_path: Path) -> FakeStore:
    return FakeStore(tmp_path)


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(scenario)


async def follow_rounds(follower: KeyFollower, rounds: int) -> None:
    """Run the follower until it has asked the store so often."""
    store = follower.store
    assert isinstance(store, FakeStore)
    task = asyncio.create_task(follower.run())
    last = store.calls + rounds
    await until(lambda: store.calls >= last, SOON_S, "the follower asks")
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


def test_a_change_is_followed_at_the_next_look(store: FakeStore) -> None:
    async def scenario() -> None:
        ring = Ring(follower_of(store))
        await ring.follower.follow()
        assert "no such key" in ring.refusal(MINE)
        made = await store.create_key(record(MINE, models=("tiny",)))
        await ring.follower.follow()
        identity = ring.identify(MINE)
        assert (identity.tenant, identity.key_id, identity.models) == ("acme", made.key_id, frozenset({"tiny"}))
        await store.change_key(made.key_id, revoked_at=ring.clock())
        await ring.follower.follow()
        assert "revoked" in ring.refusal(MINE)
        assert ring.identify(OF_FILE).key_id == "ops"

    run(scenario())


def test_a_router_looks_twice_a_second(store: FakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    slept = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 4:
            raise asyncio.CancelledError

    monkeypatch.setattr(stored_keys.asyncio, "sleep", sleep)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(follower_of(store).run())
    assert slept == [0.5] * 4
    assert store.calls == 4


def test_the_store_away_for_an_hour_refuses_nobody_who_is_known(
    store: FakeStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(stored_keys, "POLL_S", 0.0)
    caplog.set_level(logging.INFO, logger="ray.serve")

    async def scenario() -> None:
        ring = Ring(follower_of(store))
        await store.create_key(record(MINE))
        await ring.follower.follow()
        store.away = True
        for _ in range(60):
            ring.clock.now_s += HOUR_S / 60
            await follow_rounds(ring.follower, 2)
            assert ring.identify(MINE).tenant == "acme"
            assert ring.identify(OF_FILE).key_id == "ops"
        assert "no such key" in ring.refusal(OTHER)  # it had a list: who is not on it is refused
        store.away = False
        await store.create_key(record(OTHER))
        await follow_rounds(ring.follower, 2)
        assert ring.identify(OTHER).tenant == "acme"

    run(scenario())
    reported = [one.getMessage() for one in caplog.records]
    assert len(reported) == 2
    assert "away" in reported[0]
    assert "answers again" in reported[1]


def test_a_router_that_never_had_a_list_says_503_and_not_401(store: FakeStore) -> None:
    ring = Ring(follower_of(store))
    with pytest.raises(StoreAway) as away:
        ring.identify(MINE)
    assert (away.value.status, away.value.retry_after_s) == (503, 1.0)
    assert ring.identify(OF_FILE).key_id == "ops"
    with pytest.raises(Unauthorized):
        ring.keys.identify({})


def test_a_router_that_starts_without_the_store_asks_the_others(
    store: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_keys, "POLL_S", 0.0)

    async def scenario() -> None:
        old = record(MINE, version=3)
        new = record(OTHER, version=4)
        routers = Routers(None, (3, [old]), RayError(), (4, [old, new]))
        ring = Ring(follower_of(store, routers))
        store.away = True
        await follow_rounds(ring.follower, 3)
        assert ring.identify(MINE).tenant == ring.identify(OTHER).tenant == "acme"
        assert "no such key" in ring.refusal("sk-nobodys-0123456789")
        assert routers.asked <= 2  # at once, and when the store was found to be away; no more once it knows
        await ring.follower.wait_for_list(0.0)

    run(scenario())


def test_routers_that_do_not_answer_are_not_waited_for(store: FakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_keys, "ROUTERS_S", 0.01)
    monkeypatch.setattr(stored_keys, "POLL_S", 0.0)

    async def never() -> list[Any]:
        await asyncio.Event().wait()
        return []

    async def scenario() -> None:
        follower = KeyFollower(None, never, lambda _: store)
        store.away = True
        await follow_rounds(follower, 2)
        assert follower.stored.version is None
        store.away = False
        await follow_rounds(follower, 1)
        assert follower.stored.version == 0

    run(scenario())


def test_an_error_nobody_thought_of_does_not_end_the_following(
    store: FakeStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(stored_keys, "POLL_S", 0.0)

    async def scenario() -> None:
        follower = follower_of(store)
        right, store.sql = store.sql, None  # type: ignore[assignment]
        await follow_rounds(follower, 2)
        store.sql = right
        await follow_rounds(follower, 1)
        assert follower.stored.version == 0

    run(scenario())
    assert "Store keys could not be read" in caplog.text


def test_a_store_restored_from_a_backup_counts_as_it_is(store: FakeStore, tmp_path: Path) -> None:
    async def scenario() -> None:
        ring = Ring(follower_of(store))
        kept = await store.create_key(record(MINE))
        backup = FakeStore(tmp_path / "backup")
        await backup.create_key(kept)
        await store.create_key(record(OTHER))
        await ring.follower.follow()
        assert ring.identify(OTHER)
        store.sql = backup.sql
        await ring.follower.follow()
        assert ring.identify(MINE)
        assert "no such key" in ring.refusal(OTHER)

    run(scenario())


def test_another_store_replaces_the_keys_once_its_list_is_here(store: FakeStore, tmp_path: Path) -> None:
    async def scenario() -> None:
        other = FakeStore(tmp_path / "other")
        stores = {None: store, "postgresql://there/keys": other}
        ring = Ring(KeyFollower(None, Routers(), stores.__getitem__))
        await store.create_key(record(MINE))
        await other.create_key(record(OTHER))
        await ring.follower.follow()
        ring.follower.configure("postgresql://there/keys")
        assert store.closed
        other.away = True
        with pytest.raises(StoreAway):
            await ring.follower.follow()
        assert ring.identify(MINE)
        other.away = False
        await ring.follower.follow()
        assert ring.identify(OTHER)
        assert "no such key" in ring.refusal(MINE)

    run(scenario())


def test_a_key_expires_at_its_moment_by_itself(store: FakeStore) -> None:
    ring = Ring(follower_of(store))
    ring.follower.stored.replace(1, [record(MINE, expires_at=ring.clock() + 60)])
    ring.clock.now_s += 59.9
    assert ring.identify(MINE)
    ring.clock.now_s += 0.1
    assert "it expired at 2027-01-15T08:01:00Z" in ring.refusal(MINE)


def test_keys_are_counted_by_source_and_state(store: FakeStore) -> None:
    ring = Ring(follower_of(store))
    soon = ring.clock() + 60
    keys = [
        record(OTHER, revoked_at=1.0, expires_at=soon),
        replace(record(MINE, expires_at=soon), key_id="key_expires"),
        replace(record(MINE), key_id="key_stays"),
    ]
    ring.follower.stored.replace(1, keys)
    stored = {"valid": 2, "revoked": 1, "expired": 0}
    configured = {("configured", "valid"): 1, ("configured", "revoked"): 0, ("configured", "expired"): 0}
    assert ring.keys.counts() == configured | {("stored", state): count for state, count in stored.items()}
    ring.clock.now_s = soon
    later = {"valid": 1, "revoked": 1, "expired": 1}
    assert ring.keys.counts() == configured | {("stored", state): count for state, count in later.items()}


def test_a_rotated_key_is_good_for_the_grace_and_no_longer(store: FakeStore) -> None:
    ring = Ring(follower_of(store))
    old = record(MINE, version=1)
    new = replace(old, digest=record(OTHER).digest, version=2, previous_digest=old.digest)
    ring.follower.stored.replace(1, [old])
    ring.follower.stored.update(2, [replace(new, previous_until=ring.clock() + 60)])
    assert ring.identify(MINE) == ring.identify(OTHER)
    ring.clock.now_s += 60
    assert "replaced" in ring.refusal(MINE)
    assert ring.identify(OTHER)
    ring.follower.stored.update(3, [replace(new, previous_digest=None, version=3)])
    assert "no such key" in ring.refusal(MINE)


def test_an_older_state_of_a_key_never_replaces_a_newer_one() -> None:
    stored = KeyTable()
    revoked = record(MINE, version=5, revoked_at=1.0)
    stored.learn(revoked)
    stored.update(4, [replace(revoked, version=4, revoked_at=None)])
    assert stored.find(revoked.digest) == (revoked, identity_of(revoked))


def test_a_key_of_the_file_wins_over_the_same_key_in_the_store(store: FakeStore) -> None:
    ring = Ring(follower_of(store))
    ring.follower.stored.replace(1, [record(OF_FILE, revoked_at=1.0)])
    assert ring.identify(OF_FILE).tenant == "default"


def test_a_key_has_its_own_limits_or_those_of_every_key(store: FakeStore) -> None:
    ring = Ring(follower_of(store))
    own = Limits(max_concurrent=2)
    ring.follower.stored.replace(1, [record(MINE, limits=own), record(OTHER)])
    assert ring.keys.limits_of(ring.identify(MINE)) == own
    every = Limits(requests_per_minute=60)
    assert ring.keys.limits_of(ring.identify(OTHER)) == ring.keys.limits_of(ring.identify(OF_FILE)) == every
    ring.follower.stored.update(2, [replace(record(MINE), key_id="another", version=2)])
    assert ring.keys.limits_of(replace(ring.identify(OF_FILE), key_id="gone meanwhile")) == every


def test_thousands_of_keys_are_small_and_each_is_found(store: FakeStore) -> None:
    ring = Ring(follower_of(store))
    tracemalloc.start()
    try:
        ring.follower.stored.replace(
            1, [record(f"sk-many-{one}", limits=Limits(max_concurrent=one)) for one in range(MANY)]
        )
        size, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert size < MANY_BYTES
    found = [ring.keys.limits_of(ring.identify(f"sk-many-{one}")).max_concurrent for one in range(MANY)]
    assert found == list(range(MANY))
    assert "no such key" in ring.refusal(f"sk-many-{MANY}")
