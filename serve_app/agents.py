"""Runs agent tasks with bounded concurrency, each with its own KV cache session.

    async with AgentScheduler(llm, concurrency=4, vram_gb=0.25) as agents:
        for topic in topics:
            agents.submit(research(topic))  # async def (session) -> anything
    print([run.result for run in agents.runs])

Invariant: no more than `concurrency` tasks run at any time; each has an open session while it runs, and the session is
closed when the task ends, also by an error. An exception of a task is stored in its run and affects no other run.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from serve_app.errors import InsufficientMemory, Overloaded

if TYPE_CHECKING:  # it imports Ray; agents run with any client
    from serve_app.client import AgentSession

__all__ = ["DEFAULT_MAX_WAITING", "STEP_WAIT_S", "AgentRun", "AgentScheduler", "AgentState", "Sessions", "Task"]

DEFAULT_MAX_WAITING = 10_000  # tasks; each is a coroutine and a few hundred bytes; more is a runaway loop
STEP_WAIT_S = 30.0  # of one attempt to reserve: below the server's maximum of 60 s; an attempt that fails is repeated

Task = Callable[["AgentSession"], Awaitable[Any]]


class Sessions(Protocol):
    """Opens sessions: `serve_app.client.client.Client`."""

    def session(self, session_id: str | None = None, **asked: Any) -> AgentSession: ...


class AgentState(enum.StrEnum):
    """The state of a run."""

    WAITING = "waiting"  # for a free place under `concurrency`, or for its memory
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"  # the task raised
    REFUSED = "refused"  # its memory was not granted
    CANCELLED = "cancelled"


@dataclass(slots=True, eq=False)
class AgentRun:
    """One task: `result` once it is done, `error` if it failed or was refused."""

    name: str
    state: AgentState = AgentState.WAITING
    result: Any = None
    error: BaseException | None = None
    _task: asyncio.Task[None] = field(init=False)

    @property
    def ended(self) -> bool:
        return self.state not in (AgentState.WAITING, AgentState.RUNNING)

    def cancel(self) -> None:
        """Cancel a waiting or running task and close its session; no effect on one that has ended."""
        self._task.cancel()

    async def wait(self) -> Any:
        """Wait for the result.

        Raises:
            The task's exception; InsufficientMemory and the like: it was refused; CancelledError: it was cancelled.
        """
        await asyncio.wait({self._task})
        if self.error is not None:
            raise self.error
        if self.state is AgentState.CANCELLED:
            raise asyncio.CancelledError(f"agent {self.name} was cancelled")
        return self.result


class AgentScheduler:
    """Runs agent tasks; see the module. Leaving its `async with` block waits for all; leaving by an error cancels them.

    Args:
        llm: a client (`serve_app.connect`).
        concurrency: tasks that run at a time.
        vram_gb, kv_tokens, model, ttl_s: of each task's session, as in `Client.session`; `submit` may override them.
        wait_s: how long a task with a free place waits for its memory; None: without limit; 0: not at all.
        max_waiting: tasks that may wait for a free place.

    Raises:
        ValueError: a bound below one, or a negative wait.
    """

    def __init__(
        self,
        llm: Sessions,
        *,
        concurrency: int,
        vram_gb: float | None = None,
        kv_tokens: int | None = None,
        model: str | None = None,
        ttl_s: float | None = None,
        wait_s: float | None = None,
        max_waiting: int = DEFAULT_MAX_WAITING,
    ) -> None:
        if concurrency < 1:
            raise ValueError(f"concurrency is {concurrency}; at least one task has to run")
        if max_waiting < 0 or (wait_s is not None and wait_s < 0):
            raise ValueError(f"max_waiting is {max_waiting}, wait_s is {wait_s}; neither can be negative")
        self._llm = llm
        self._session_options = {"vram_gb": vram_gb, "kv_tokens": kv_tokens, "model": model, "ttl_s": ttl_s}
        self._wait_s = math.inf if wait_s is None else wait_s
        self._max_active = concurrency + max_waiting
        self._concurrency_limit = asyncio.Semaphore(concurrency)
        self._active_runs: set[AgentRun] = set()
        self.runs: list[AgentRun] = []  # all that were submitted, in that order

    def submit(self, task: Task, *, name: str | None = None, **asked: Any) -> AgentRun:
        """Queue a task until it has a free place and its memory, then run it; returns at once.

        Args:
            task: an async callable that takes the session.
            name: of the run and of its session; generated if not given.
            asked: `vram_gb`, `kv_tokens`, `model` or `ttl_s` of this task's session, instead of the scheduler's.

        Raises:
            Overloaded: `max_waiting` is reached; nothing was started.
            TypeError: an unknown keyword.
        """
        unknown = asked.keys() - self._session_options.keys()
        if unknown:
            raise TypeError(f"submit() knows no {sorted(unknown)[0]!r}")
        if len(self._active_runs) >= self._max_active:
            raise Overloaded(f"{len(self._active_runs)} agents run or wait, which is all that may", code="agents_full")
        size = {"vram_gb": None, "kv_tokens": None} if asked.keys() & {"vram_gb", "kv_tokens"} else {}
        run = AgentRun(name or f"agent-{len(self.runs) + 1}")
        self.runs.append(run)
        self._active_runs.add(run)
        work = self._run(run, task, name, self._session_options | size | asked)
        run._task = asyncio.get_running_loop().create_task(work, name=run.name)
        run._task.add_done_callback(lambda _: self._ended(run))
        return run

    async def wait(self) -> list[AgentRun]:
        """Wait until all submitted runs have ended; returns them in the order of submission."""
        while tasks := [run._task for run in self._active_runs]:
            await asyncio.wait(tasks)
            await asyncio.sleep(0)  # for their callbacks
        return list(self.runs)

    async def cancel(self) -> None:
        """Cancel all running and waiting tasks; returns when their sessions are closed."""
        for run in list(self._active_runs):
            run.cancel()
        await self.wait()

    async def __aenter__(self) -> AgentScheduler:
        return self

    async def __aexit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        try:
            if error_type is None:
                await self.wait()
        finally:
            await self.cancel()

    def _ended(self, run: AgentRun) -> None:
        self._active_runs.discard(run)
        if not run.ended:
            run.state = AgentState.CANCELLED

    async def _run(self, run: AgentRun, task: Task, session_id: str | None, asked: dict[str, Any]) -> None:
        try:
            async with self._concurrency_limit, contextlib.AsyncExitStack() as stack:
                session = await self._open_session(session_id, asked)
                stack.push_async_exit(session)  # already open
                run.state = AgentState.RUNNING
                run.result = await task(session)
            run.state = AgentState.DONE
        except Exception as error:  # noqa: BLE001 - any error belongs to this run alone
            run.state = AgentState.REFUSED if run.state is AgentState.WAITING else AgentState.FAILED
            run.error = error

    async def _open_session(self, session_id: str | None, asked: dict[str, Any]) -> AgentSession:
        """An open session. Raises what refused it; `InsufficientMemory` after `wait_s`."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._wait_s
        while True:
            left_s = max(0.0, deadline - loop.time())
            session = self._llm.session(session_id, wait_s=min(left_s, STEP_WAIT_S), **asked)
            try:
                await session.open()
                return session
            except InsufficientMemory:
                if loop.time() >= deadline:
                    raise
