"""One answer for all who ask the same within a moment: however many terminals watch, the cluster is asked once.

Invariant: the question runs at most once at a time, also while it hangs; who asks meanwhile waits for its answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from serve_app.ray_adapter import in_fresh_context

T = TypeVar("T")


class SharedAnswer(Generic[T]):
    """The answer of `ask`.

    Args:
        fresh_s: an answer may be given again for so long after its question began.
    """

    def __init__(self, ask: Callable[[], Awaitable[T]], fresh_s: float) -> None:
        self._ask = ask
        self._fresh_s = fresh_s
        self._task: asyncio.Task[T] | None = None
        self._began = 0.0

    async def get(self) -> T:
        """The answer. Raises as `ask`."""
        now = asyncio.get_running_loop().time()
        if self._task is None or (
            self._task.done() and (now - self._began >= self._fresh_s or _has_failed(self._task))
        ):
            self._task = in_fresh_context(self._run(), "shared answer")
            self._began = now
        return await asyncio.shield(self._task)

    async def _run(self) -> T:
        return await self._ask()


def _has_failed(task: asyncio.Task[T]) -> bool:
    """Whether it has ended without an answer. Its error counts as seen: every caller may have left before it came."""
    return task.cancelled() or task.exception() is not None
