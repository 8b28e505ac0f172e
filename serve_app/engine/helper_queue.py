"""Questions to a helper that answers one at a time: tenants take turns, each in order of arrival.

Invariant: a question whose caller was cancelled while it waited is never asked.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from serve_app.core.turns import TenantTurns

Q = TypeVar("Q")
A = TypeVar("A")


class HelperQueue(Generic[Q, A]):
    """The queue in front of a helper.

    Args:
        answer: asks the helper; called by one task, never concurrently. `ask` raises its errors.
    """

    def __init__(self, answer: Callable[[Q], Awaitable[A]]) -> None:
        self._answer = answer
        self._turns = TenantTurns[tuple[Q, asyncio.Future[A]]]()  # with the answer
        self._worker: asyncio.Task[None] | None = None

    async def ask(self, tenant: str, question: Q) -> A:
        """The helper's answer; cancelling this removes the question from the queue. Raises as `answer`."""
        answer: asyncio.Future[A] = asyncio.get_running_loop().create_future()
        self._turns.arrive(tenant, (question, answer))
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work(), name="helper-queue", context=contextvars.Context())
        return await answer

    async def _work(self) -> None:
        while (begun := self._turns.begin()) is not None:
            tenant, (question, answer) = begun
            try:
                if not answer.done():
                    found = await self._answer(question)
                    if not answer.done():
                        answer.set_result(found)
            except BaseException as error:  # noqa: BLE001 - raised in the waiting `ask`
                if not answer.done():
                    answer.set_exception(error)
            finally:
                self._turns.end(tenant)
