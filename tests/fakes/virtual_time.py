"""An event loop whose clock jumps: what waits for hours takes no time, and always happens in the same order.

Only for scenarios in one thread, without sockets.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _NoWait(selectors.DefaultSelector):  # type: ignore[misc, valid-type]
    """Adds up the waits instead of waiting."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("the scenario waits for something that never happens")
        self.now += timeout
        found: list[Any] = super().select(0)
        return found


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._waits = _NoWait()
        super().__init__(self._waits)

    def time(self) -> float:
        return self._waits.now


def now() -> float:
    """The time of the running loop."""
    return asyncio.get_running_loop().time()


def run_in_virtual_time(scenario: Coroutine[Any, Any, T], bound_s: float | None = None) -> T:
    """Run a scenario to its end; AssertionError if it leaves a task behind, or an error that nobody has seen.

    Args:
        bound_s: of virtual time, against hanging, where a timer starts itself again and again.
    """
    unseen: list[str] = []
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
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
