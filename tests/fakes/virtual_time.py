"""An event loop whose clock jumps: what waits for hours takes no time, and a busy machine changes nothing.

The clock moves where the loop would wait: for a timer it jumps, for another thread (`run_in_executor`,
`asyncio.to_thread`) it goes on with the wall's. While anything runs it stands still, or a turn takes as long as it is
said to: a scenario that turns until something happens then sees its timers. Sockets may be used within the
process: what is sent over loopback is there before the clock jumps. A scenario that would start another process, for
which the clock would not wait, fails.
"""

from __future__ import annotations

import asyncio
import multiprocessing.process
import selectors
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar
from unittest import mock

T = TypeVar("T")

TURN_S = 20e-6  # of a turn of the loop where production's code runs, on an idle machine
# A timer fires so much early at most, as asyncio has it, and may be set again for the same moment, which then never
# comes; so many turns do not follow each other otherwise.
EARLY_S = 1e-9
MANY_TURNS = 1000
FAR_S = 0.01  # a jump that could pass by what a busy kernel has not yet handed over, of what was sent in the process
GLANCE_S = 0.0002  # real time in which it does, before such a jump


class _NoWait(selectors.DefaultSelector):  # type: ignore[misc, valid-type]
    """Adds up the waits instead of waiting, but for other threads. `turn_s`: of each turn that waits for nothing."""

    def __init__(self, turn_s: float) -> None:
        super().__init__()
        self.now = 0.0
        self.turn_s = turn_s
        self._turns = 0  # without a wait
        self.threads = 0  # calls that run in other threads

    def select(self, timeout: float | None = None) -> list[Any]:
        found: list[Any] = super().select(0)
        if found or timeout == 0:
            self._turns += 1
            self.now += self.turn_s if self._turns % MANY_TURNS else self.turn_s + EARLY_S
            return found
        self._turns = 0
        if self.threads:
            began_s = time.perf_counter()
            found = super().select(timeout)
            self.now += time.perf_counter() - began_s
            return found
        if timeout is None:
            raise RuntimeError("the scenario waits for something that never happens")
        if timeout > FAR_S and len(self.get_map()) > 1:  # of its own the loop has a pipe
            found = super().select(GLANCE_S)
        if not found:
            self.now += timeout
        return found


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    def __init__(self, turn_s: float) -> None:
        self._waits = _NoWait(turn_s)
        super().__init__(self._waits)

    def time(self) -> float:
        return self._waits.now

    def look(self) -> float:
        """The same as `time.monotonic`: a look takes a hundredth of a turn, so that no two find the same moment."""
        self._waits.now += self._waits.turn_s / 100
        return self._waits.now

    def run_in_executor(self, executor: Executor | None, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        self._waits.threads += 1
        future: asyncio.Future[T] = super().run_in_executor(executor, func, *args)
        future.add_done_callback(self._thread_ended)
        return future

    async def shutdown_default_executor(self, *args: Any) -> None:
        self._waits.threads += 1  # it waits in a thread of its own
        await super().shutdown_default_executor(*args)

    async def _make_subprocess_transport(self, *args: Any, **kwargs: Any) -> Any:
        _no_process()

    def _thread_ended(self, _: asyncio.Future[Any]) -> None:
        self._waits.threads -= 1


def _no_process(*_: Any) -> NoReturn:
    raise RuntimeError("a clock that jumps does not wait for another process: run this in real time")


@contextmanager
def virtual_runner(turn_s: float = 0.0) -> Iterator[asyncio.Runner]:
    """A runner of such a loop, whose clock is `time.monotonic` as well for the block."""
    with (
        asyncio.Runner(loop_factory=lambda: VirtualTimeLoop(turn_s)) as runner,
        mock.patch("time.monotonic", runner.get_loop().look),
        mock.patch.object(multiprocessing.process.BaseProcess, "start", _no_process),
    ):
        yield runner


def now() -> float:
    """The time of the running loop."""
    return asyncio.get_running_loop().time()


def run_in_virtual_time(scenario: Coroutine[Any, Any, T], bound_s: float | None = None) -> T:
    """Run a scenario to its end; AssertionError if it leaves a task behind, or an error that nobody has seen.

    Args:
        bound_s: of virtual time, against hanging, where a timer starts itself again and again.
    """
    unseen: list[str] = []
    with virtual_runner() as runner:
        runner.get_loop().set_exception_handler(lambda _, context: unseen.append(str(context)))
        result = runner.run(_settled(scenario, bound_s))
    assert not unseen, unseen
    return result


async def _settled(scenario: Coroutine[Any, Any, T], bound_s: float | None) -> T:
    async with asyncio.timeout(bound_s):
        result = await scenario
    for _ in range(20):
        await asyncio.sleep(0)
    left = [str(task) for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    assert not left, left
    return result


async def time_passes(seconds: float) -> None:
    await asyncio.sleep(seconds)  # virtual: takes no time
