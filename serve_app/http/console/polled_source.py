"""One source that is asked again and again, without holding up who reads its last answer.

Invariant: at most one question runs at a time, and it ends within `limit_s`. A source whose last question failed has no
value: what it said before is not shown as if it still held.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from serve_app.errors import ServeAppError
from serve_app.ray_adapter import NO_ANSWER, in_fresh_context

logger = logging.getLogger("ray.serve")

FAILURES: tuple[type[BaseException], ...] = (ServeAppError, *NO_ANSWER)
EARLY_S = 0.1  # a question may begin so much before it is due: its turn comes with the others

Tenants = tuple[str, ...]
T = TypeVar("T")


class PolledSource(Generic[T]):
    """`value`: the last answer; None: there is none.

    Args:
        name: for the log.
        ask: asks; it is given the tenants that somebody watches.
        every_s: between the beginnings of two questions.
        limit_s: for an answer.
    """

    def __init__(self, name: str, ask: Callable[[Tenants], Awaitable[T]], every_s: float, limit_s: float) -> None:
        self._name = name
        self._ask = ask
        self._every_s = every_s
        self._limit_s = limit_s
        self._task: asyncio.Task[None] | None = None
        self._began: float | None = None
        self._asked_for: Tenants = ()
        self.value: T | None = None

    def begin(self, tenants: Tenants) -> asyncio.Task[None] | None:
        """Ask if that is due, or for tenants that were not asked for yet; the question that runs, None: none does."""
        now = asyncio.get_running_loop().time()
        if self._task is not None and not self._task.done():
            return self._task
        is_due = self._began is None or now >= self._began + self._every_s - EARLY_S
        if not is_due and set(tenants) <= set(self._asked_for):
            return None
        self._began = now
        self._asked_for = tenants
        self._task = in_fresh_context(self._run(tenants), f"console asks {self._name}")
        return self._task

    def close(self) -> None:
        """End the question that runs, and forget the answer."""
        if self._task is not None:
            self._task.cancel()
        self._task = self._began = self.value = None

    async def _run(self, tenants: Tenants) -> None:
        try:
            async with asyncio.timeout(self._limit_s):
                self.value = await self._ask(tenants)
        except FAILURES as error:
            if self.value is not None:
                logger.warning("Console gets nothing of %s, which does not answer: %s", self._name, error)
            self.value = None
        except Exception:
            logger.exception("Console gets nothing of %s, whose answer failed. Report this traceback", self._name)
            self.value = None
