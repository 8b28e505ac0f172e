"""Questions to a helper that answers one at a time: tenants take turns, each in order of arrival.

Invariant: a question whose caller was cancelled while it waited is never asked.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable, Callable
from typing import Generic, NamedTuple, TypeVar

from serve_app.core.turns import TenantTurns

Q = TypeVar("Q")
A = TypeVar("A")


class _Asked(NamedTuple, Generic[Q, A]):
    question: Q
    answer: asyncio.Future[A]


class HelperQueue(Generic[Q, A]):
    """The queue in front of a helper.

    Args:
        answer: asks the helper; called by one task, never concurrently. `ask` raises its errors.
    """

    def __init__(self, answer: Callable[[Q], Awaitable[A]]) -> None:
        self._answer = answer
        self._turns = TenantTurns[_Asked[Q, A]]()
        self._worker: asyncio.Task[None] | None = None

    async def ask(self, tenant: str, question: Q) -> A:
        """The helper's answer; cancelling this removes the question from the queue. Raises as `answer`."""
        asked: _Asked[Q, A] = _Asked(question, asyncio.get_running_loop().create_future())
        self._turns.arrive(tenant, asked)
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work(), name="helper-queue", context=contextvars.Context())
        return await asked.answer

    async def _work(self) -> None:
        while (begun := self._turns.begin()) is not None:
            tenant, asked = begun
            try:
                if not asked.answer.done():
                    answer = await self._answer(asked.question)
                    if not asked.answer.done():
                        asked.answer.set_result(answer)
            except BaseException as error:  # noqa: BLE001 - raised in the waiting `ask`
                if not asked.answer.done():
                    asked.answer.set_exception(error)
            finally:
                self._turns.end(tenant)
