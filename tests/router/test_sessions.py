"""What a router knows of sessions, with a quota actor that is a dictionary, counts calls, and can be away."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import pytest
from ray.exceptions import RayError

from serve_app.core.memory import Session, SessionEntry, SessionRequest, session_name
from serve_app.errors import InsufficientMemory, LeaseNotFound, NotFound, Unavailable
from serve_app.router import sessions
from serve_app.router.sessions import SessionClient

MODEL = "m"


class Away(RayError):
    """The actor is not there."""


class Actor:
    """The quota actor as the book sees it."""

    def __init__(self) -> None:
        self.sessions: dict[str, Session] = {}
        self.calls: list[str] = []
        self.opened = 0
        self.away = False
        self.hangs = False

    async def call(self, method: str, *arguments: Any) -> Any:
        self.calls.append(method)
        if self.away:
            raise Away
        if self.hangs:
            await asyncio.Event().wait()
        return await getattr(self, method)(*arguments)

    def add(self, tenant: str, own: str, pool: str = "r1") -> Session:
        self.opened += 1
        session = Session(SessionRequest(session_name(tenant, own), MODEL, 100, 60.0), pool, 60.0)
        self.sessions[session.request.session_id] = session
        return session

    async def open_session(self, ask: SessionRequest) -> Session:
        tenant, _, own = ask.session_id.rpartition(" ")
        return self.add(tenant, own)

    async def renew_session(self, name: str) -> Session:
        if name not in self.sessions:
            raise LeaseNotFound("no", code="session_not_found")
        return self.sessions[name]

    async def look_session(self, name: str) -> Session:
        return await self.renew_session(name)

    async def close_session(self, name: str) -> None:
        await self.renew_session(name)
        del self.sessions[name]


def book_of(actor: Actor) -> SessionClient:
    return SessionClient(actor.call, {})


def run(scenario: Awaitable[None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(10):
            await scenario

    asyncio.run(bounded())


def test_whether_an_id_is_a_session_costs_no_question() -> None:
    async def scenario() -> None:
        actor = Actor()
        known: dict[str, SessionEntry] = {}
        book = SessionClient(actor.call, known)
        assert [book.find("t", f"random-{number}", MODEL) for number in range(1000)] == [None] * 1000
        known["t x"] = entry = SessionEntry(SessionRequest("t x", MODEL, 1, 1.0), "t x#1.1", "r1")
        assert book.find("t", "x", MODEL) == entry
        assert book.find("u", "x", MODEL) is None
        assert book.find("t", "x", "other") is None
        assert actor.calls == []

    run(scenario())


def test_no_tenant_can_touch_another_ones_session() -> None:
    async def scenario() -> None:
        actor = Actor()
        book = book_of(actor)
        _ = actor.add("t", "x")
        for call in (book.get, book.renew, book.close):
            with pytest.raises(NotFound):
                await call("u", "x")

    run(scenario())


def test_an_opening_outlasts_the_actors_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        monkeypatch.setattr(sessions, "ACTOR_RETRY_S", 0.01)
        actor = Actor()
        actor.away = True
        opening = asyncio.create_task(book_of(actor).open(SessionRequest(session_name("t", "x"), MODEL, 10, 60.0), 0.0))
        await asyncio.sleep(0.05)  # bound: five attempts
        actor.away = False
        assert (await opening).request.session_id == session_name("t", "x")

    run(scenario())


def test_an_opening_that_is_hopeless_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        monkeypatch.setattr(sessions, "ACTOR_RETRY_S", 0.01)
        monkeypatch.setattr(sessions, "MIN_OPEN_WAIT_S", 0.05)
        actor = Actor()
        actor.away = True
        with pytest.raises(Unavailable) as error:
            await book_of(actor).open(SessionRequest(session_name("t", "x"), MODEL, 10, 60.0), 0.0)
        assert error.value.code == "quota_away"

    run(scenario())


def test_a_caller_who_leaves_while_he_waits_takes_his_question_back() -> None:
    async def scenario() -> None:
        actor = Actor()

        async def never(ask: SessionRequest) -> Session:
            actor.add("t", "x")  # it opens in the very moment
            await asyncio.Event().wait()
            raise AssertionError

        actor.open_session = never  # type: ignore[method-assign]
        opening = asyncio.create_task(
            book_of(actor).open(SessionRequest(session_name("t", "x"), MODEL, 10, 60.0), 30.0)
        )
        await asyncio.sleep(0.01)  # bound: it is under way
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        await asyncio.sleep(0.01)  # bound: for the task that takes it back
        assert not actor.sessions

    run(scenario())


def test_a_refusal_of_the_actor_is_reported_as_it_was_raised() -> None:
    async def scenario() -> None:
        actor = Actor()

        async def refuse(ask: SessionRequest) -> Session:
            raise InsufficientMemory("3 asked, 2 free")

        actor.open_session = refuse  # type: ignore[method-assign]
        with pytest.raises(InsufficientMemory, match="3 asked"):
            await book_of(actor).open(SessionRequest(session_name("t", "x"), MODEL, 3, 60.0), 0.0)

    run(scenario())
