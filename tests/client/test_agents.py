"""Agents under a bound, with a client whose sessions are counted."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from types import TracebackType
from typing import Any

import pytest

from serve_app.agents import AgentScheduler, AgentState
from serve_app.errors import BadRequest, InsufficientMemory, Overloaded


class FakeSession:
    def __init__(self, llm: FakeClient, session_id: str | None, wait_s: float) -> None:
        self.llm = llm
        self.id = session_id
        self.wait_s = wait_s

    async def open(self) -> None:
        await asyncio.sleep(0)
        if self.llm.error is not None:
            raise self.llm.error
        if len(self.llm.open) >= self.llm.room:
            raise InsufficientMemory("no room")
        self.llm.open.append(self)
        self.llm.most = max(self.llm.most, len(self.llm.open))

    async def __aexit__(
        self, type_: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.sleep(0)
        self.llm.open.remove(self)


class FakeClient:
    def __init__(self, room: int = 100) -> None:
        self.room = room
        self.most = 0
        self.open: list[FakeSession] = []
        self.asked: list[dict[str, Any]] = []
        self.error: Exception | None = None

    def session(self, session_id: str | None = None, **asked: Any) -> Any:
        self.asked.append({"session_id": session_id, **asked})
        return FakeSession(self, session_id, asked["wait_s"])


async def quick(session: Any) -> str:
    await asyncio.sleep(0)
    return f"{session.id} done"


async def endless(session: Any) -> None:
    await asyncio.Event().wait()


def run(scenario: Awaitable[None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(10):
            await scenario

    asyncio.run(bounded())


def test_no_more_tasks_run_than_the_bound_and_each_has_a_session() -> None:
    async def scenario() -> None:
        llm = FakeClient()
        async with AgentScheduler(llm, concurrency=3, vram_gb=0.25, model="m") as agents:
            runs = [agents.submit(quick, name=f"a{number}") for number in range(10)]
        assert [run.result for run in runs] == [f"a{number} done" for number in range(10)]
        assert (llm.most, llm.open) == (3, [])
        assert llm.asked[0] | {"wait_s": 0} == {
            "session_id": "a0",
            "vram_gb": 0.25,
            "kv_tokens": None,
            "model": "m",
            "ttl_s": None,
            "wait_s": 0,
        }

    run(scenario())


def test_a_task_that_fails_is_its_own_affair_and_its_session_is_closed() -> None:
    async def scenario() -> None:
        async def fails(session: Any) -> None:
            raise LookupError("the tool failed")

        llm = FakeClient()
        async with AgentScheduler(llm, concurrency=1, vram_gb=1) as agents:
            bad = agents.submit(fails)
            good = agents.submit(quick)
        assert (bad.state, good.state, llm.open) == (AgentState.FAILED, AgentState.DONE, [])
        with pytest.raises(LookupError, match="tool"):
            await bad.wait()

    run(scenario())


def test_a_task_without_memory_waits_or_is_refused_as_its_options_say() -> None:
    async def scenario() -> None:
        llm = FakeClient(room=1)
        async with AgentScheduler(llm, concurrency=2, vram_gb=1, wait_s=0) as agents:
            first = agents.submit(endless)
            await asyncio.sleep(0.01)  # bound: it is under way
            second = agents.submit(quick)
            with pytest.raises(InsufficientMemory):
                await second.wait()
            assert second.state is AgentState.REFUSED
            first.cancel()
        llm = FakeClient(room=1)
        async with AgentScheduler(llm, concurrency=4, vram_gb=1) as agents:
            runs = [agents.submit(quick) for _ in range(4)]
        assert {run.state for run in runs} == {AgentState.DONE}
        assert llm.most == 1

    run(scenario())


def test_what_can_never_be_is_refused_at_once() -> None:
    async def scenario() -> None:
        llm = FakeClient()
        llm.error = BadRequest("too large", code="session_too_large")
        async with AgentScheduler(llm, concurrency=1, vram_gb=1) as agents:
            run_ = agents.submit(quick)
        assert (run_.state, run_.error) == (AgentState.REFUSED, llm.error)

    run(scenario())


def test_a_cancelled_run_gives_its_session_back_and_the_others_go_on() -> None:
    async def scenario() -> None:
        llm = FakeClient()
        async with AgentScheduler(llm, concurrency=1, vram_gb=1) as agents:
            running = agents.submit(endless)
            waiting = agents.submit(endless)
            last = agents.submit(quick)
            await asyncio.sleep(0.01)  # bound: the first is under way
            waiting.cancel()
            running.cancel()
            assert await last.wait() == "None done"
        assert [run.state for run in agents.runs] == [AgentState.CANCELLED, AgentState.CANCELLED, AgentState.DONE]
        assert llm.open == []
        with pytest.raises(asyncio.CancelledError):
            await running.wait()

    run(scenario())


def test_leaving_the_block_by_an_error_ends_all_of_them() -> None:
    async def scenario() -> None:
        llm = FakeClient()
        agents = AgentScheduler(llm, concurrency=2, vram_gb=1)

        async def block() -> None:
            async with agents:
                agents.submit(endless)
                agents.submit(endless)
                await asyncio.sleep(0.01)  # bound: they are under way
                raise RuntimeError("mine")

        with pytest.raises(RuntimeError, match="mine"):
            await block()
        assert {run.state for run in agents.runs} == {AgentState.CANCELLED}
        assert llm.open == []

    run(scenario())


def test_bounds_and_keywords_that_make_no_sense_are_refused() -> None:
    async def scenario() -> None:
        llm = FakeClient()
        with pytest.raises(ValueError, match="concurrency is 0"):
            AgentScheduler(llm, concurrency=0)
        with pytest.raises(ValueError, match="wait_s is -1"):
            AgentScheduler(llm, concurrency=1, wait_s=-1)
        async with AgentScheduler(llm, concurrency=1, max_waiting=1, vram_gb=1) as agents:
            with pytest.raises(TypeError, match="vram"):
                agents.submit(quick, vram=1)
            runs = [agents.submit(quick, kv_tokens=64), agents.submit(quick)]
            with pytest.raises(Overloaded) as full:
                agents.submit(quick)
            assert full.value.code == "agents_full"
        assert (llm.asked[0]["vram_gb"], llm.asked[0]["kv_tokens"]) == (None, 64)
        assert {run.state for run in runs} == {AgentState.DONE}

    run(scenario())
