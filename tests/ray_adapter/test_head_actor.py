"""The actors of the head node: found, started, restarted as another release, and called again over their deaths."""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import signal
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError

from serve_app.batch.owned_files import FileOwner
from serve_app.errors import StoreAway
from serve_app.names import DEPLOYMENT_ACTOR, FILES_ACTOR, HEAD_ACTORS, NAMESPACE, QUOTA_ACTOR, RELEASE
from serve_app.quota import GpuMemoryQuota
from serve_app.ray_adapter import HeadActor, end_head_actors, head_actor
from serve_app.store.owner import StoreOwner

OTHER = "9.9.9"
BOUND_S = 0.05


class FakeHandle:
    """An actor whose calls end as `ends` says, the last of them for ever."""

    def __init__(self, *ends: Callable[[], Any]) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.releases: list[str] = []
        self.run, self.upgrade = _Method(self._called), _Method(self.releases.append)
        self._ends = list(ends)

    def _called(self, *arguments: Any) -> Awaitable[Any]:
        async def answer() -> Any:
            self.calls.append(arguments)
            end = self._ends.pop(0) if len(self._ends) > 1 else self._ends[0]
            return end()

        return answer()


class _Method:
    def __init__(self, remote: Callable[..., Any]) -> None:
        self.remote = remote


class FakeRay:
    """Ray, as far as it makes actors: the handles of `made`, one after the other."""

    def __init__(self, *made: FakeHandle) -> None:
        self._left = list(made)

    def __call__(self, actor_class: type[Any]) -> FakeRay:
        return self

    def options(self, **options: Any) -> FakeRay:
        return self

    def remote(self, *arguments: Any) -> FakeHandle:
        return self._left.pop(0)


def died() -> Any:
    raise ActorDiedError


def unavailable() -> Any:
    raise ActorUnavailableError("it restarts", None)


def unknown_key() -> Any:
    raise RayTaskError("run", "a traceback", KeyError("key_0"), pid=1, ip="here").as_instanceof_cause()


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Callable[..., HeadActor]:
    """A head actor whose finds give these handles."""
    monkeypatch.setattr(head_actor, "ACTOR_RETRY_S", 0.0)

    def make(*handles: FakeHandle) -> HeadActor:
        monkeypatch.setattr(ray, "remote", FakeRay(*handles))
        return HeadActor("store", StoreOwner, 8)

    return make


def answered(actor: HeadActor, *arguments: Any) -> Any:
    return asyncio.run(actor.calls_of("a", "the store's actor", BOUND_S, StoreAway)(*arguments))


def test_a_call_is_repeated_while_the_actor_restarts(found: Callable[..., HeadActor]) -> None:
    handle = FakeHandle(unavailable, unavailable, lambda: 3)
    assert answered(found(handle), "keys", 0) == 3
    assert handle.calls == [("a", "keys", (0,), {})] * 3


def test_an_actor_that_was_ended_for_good_is_started_again(found: Callable[..., HeadActor]) -> None:
    gone = FakeHandle(died)
    new = FakeHandle(lambda: 3)
    assert answered(found(gone, new), "keys") == 3
    assert gone.calls == new.calls == [("a", "keys", (), {})]


def test_a_call_that_is_made_once_fails_and_the_next_one_reaches_a_new_actor(found: Callable[..., HeadActor]) -> None:
    new = FakeHandle(lambda: 3)
    actor = found(FakeHandle(died), new)

    async def scenario() -> None:
        with pytest.raises(ActorDiedError):
            await actor.call("run")
        assert await actor.call("run") == 3
        assert await actor.call("run") == 3

    asyncio.run(scenario())
    assert len(new.calls) == 2


def test_an_actor_that_stays_away_is_reported_to_be_away(found: Callable[..., HeadActor]) -> None:
    with pytest.raises(StoreAway, match=r"the store's actor has not answered within 0\.05 s"):
        answered(found(FakeHandle(unavailable)), "keys")


def test_what_the_method_raises_comes_out_as_it_is(found: Callable[..., HeadActor]) -> None:
    handle = FakeHandle(unknown_key)
    with pytest.raises(KeyError) as raised:
        answered(found(handle), "key", "key_0")
    assert type(raised.value) is KeyError
    assert len(handle.calls) == 1


def test_whoever_finds_an_actor_has_it_run_its_own_release(found: Callable[..., HeadActor]) -> None:
    gone = FakeHandle(died)
    new = FakeHandle(lambda: 3)
    answered(found(gone, new), "keys")
    assert (gone.releases, new.releases) == ([RELEASE], [RELEASE])


class Killed(BaseException):
    """In place of the signal, which nothing survives."""


@pytest.mark.parametrize("actor_class", [GpuMemoryQuota, StoreOwner, FileOwner])
@pytest.mark.parametrize(
    ("wanted", "installed", "ends"),
    [(OTHER, OTHER, True), (OTHER, RELEASE, False), (RELEASE, RELEASE, False), (RELEASE, OTHER, False)],
    ids=["upgraded", "elsewhere", "same", "older"],
)
def test_an_actor_restarts_as_the_release_of_a_replica_where_that_is_installed(
    monkeypatch: pytest.MonkeyPatch, actor_class: type[Any], wanted: str, installed: str, ends: bool
) -> None:
    def kill(pid: int, number: int) -> None:
        assert (pid, number) == (os.getpid(), signal.SIGKILL)
        raise Killed

    monkeypatch.setattr(os, "kill", kill)
    monkeypatch.setattr(importlib.metadata, "version", lambda _: installed)
    upgrade = actor_class.__new__(actor_class).upgrade
    killed = False
    try:
        asyncio.run(upgrade(wanted)) if asyncio.iscoroutinefunction(upgrade) else upgrade(wanted)
    except Killed:
        killed = True
    assert killed is ends


def test_with_an_application_all_its_head_actors_end(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []

    def get_actor(name: str, namespace: str) -> str:
        assert namespace == NAMESPACE
        if name == QUOTA_ACTOR:
            raise ValueError("there is none")
        return name

    monkeypatch.setattr(ray, "get_actor", get_actor)
    monkeypatch.setattr(ray, "kill", ended.append)
    end_head_actors()
    assert ended == [*(name for name in HEAD_ACTORS if name != QUOTA_ACTOR), DEPLOYMENT_ACTOR]
    assert FILES_ACTOR in ended
