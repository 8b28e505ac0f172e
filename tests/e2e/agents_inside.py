"""Agents by Python handle, in a process that is in the cluster: functions for `Place.within`."""

from __future__ import annotations

import asyncio
from typing import Any

from serve_app import connect
from serve_app.agents import AgentScheduler, AgentState
from serve_app.client import AgentSession

ASKED = [{"role": "user", "content": "Hello!"}]


def run_agents(key: str, model: str, agents: int, concurrency: int) -> dict[str, Any]:
    """Agents of two calls each, one of which fails, under a bound; what came of them."""

    async def go() -> dict[str, Any]:
        running = 0
        most = 0

        async def task(session: AgentSession) -> int:
            nonlocal running, most
            running += 1
            most = max(most, running)
            try:
                for _ in range(2):
                    await session.chat(ASKED, max_tokens=3)
                    await asyncio.sleep(0.02)  # a tool
                if session.id.endswith("-3"):
                    raise LookupError("the tool failed")
                return session.info.kv_tokens
            finally:
                running -= 1

        async with connect(api_key=key, model=model) as llm:
            async with AgentScheduler(llm, concurrency=concurrency, kv_tokens=256) as scheduler:
                for number in range(1, agents + 1):
                    scheduler.submit(task, name=f"run-{number}")
                runs = await scheduler.wait()
            return {
                "most": most,
                "done": [run.result for run in runs if run.state is AgentState.DONE],
                "failed": [str(run.error) for run in runs if run.state is AgentState.FAILED],
            }

    return asyncio.run(go())


def without_await(key: str, model: str) -> tuple[str, int, str]:
    """A session in a script: its id, its tokens, and what the answer's object is."""
    with (
        connect(api_key=key, model=model) as llm,
        llm.sync.session("script-1", kv_tokens=256, ttl_s=5) as session,
    ):
        answer = session.chat(ASKED, max_tokens=3)
        return session.id, session.info.kv_tokens, answer.object
