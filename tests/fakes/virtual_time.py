"""An event loop whose time is made up: where nothing is ready, it jumps to the next timer."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Awaitable, Callable
from typing import Any

BOUND_S = 1000.0  # made-up seconds of one scenario, against hanging: they take under a hundred


class _JumpingSelector(selectors.DefaultSelector):  # type: ignore[valid-type, misc]
    """Passes the time that it is asked to wait, instead of waiting."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        found = super().select(0)
        if not found:
            assert timeout is not None, "every task waits, and no timer is left"
            self.now += max(0.0, timeout)
        return found


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """For code without I/O. `time` is its clock."""

    def __init__(self) -> None:
        self._clock = _JumpingSelector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now


def run(scenario: Callable[[], Awaitable[Any]]) -> Any:
    """Run a scenario in made-up time; it must leave no task behind."""

    async def checked() -> Any:
        async with asyncio.timeout(BOUND_S):
            result = await scenario()
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return result

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(checked())


def now() -> float:
    """The time of the running loop."""
    return asyncio.get_running_loop().time()
