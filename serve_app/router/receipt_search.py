"""Finds what became of a request, whichever router replica it came to.

Invariant: who asks hears within `ANSWER_S`, however many routers do not answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from serve_app.core.receipts import Receipts, explain
from serve_app.ray_adapter import CALL_ERRORS, NO_ANSWER, in_fresh_context

logger = logging.getLogger("ray.serve")

ANSWER_S = 2.0  # a router answers within milliseconds; one that is on its way out, never

Plain = dict[str, Any]
Answers = Iterable[Awaitable[Plain | None]]
AskAll = Callable[[str], Awaitable[Answers]]


class ReceiptSearch:
    """Asks here first, then all routers at once.

    Args:
        kept: the receipts of this router.
        ask_all: asks every router for a receipt it may have; both this and the answers raise CALL_ERRORS.
    """

    def __init__(self, kept: Receipts, ask_all: AskAll) -> None:
        self._kept, self._ask_all = kept, ask_all

    def here(self, request_id: str) -> Plain | None:
        """The receipt as plain data with its `story` in words, if this router has it."""
        receipt = self._kept.find(request_id)
        return None if receipt is None else receipt.plain() | {"story": explain(receipt)}

    async def anywhere(self, request_id: str) -> Plain | None:
        """The same from whichever router has it; None: none that answers in time."""
        found = self.here(request_id)
        if found is not None:
            return found
        # in a context of its own: the HTTP request that asks must not decide how replies are read
        asking = in_fresh_context(self._first(request_id), "receipt")
        try:
            async with asyncio.timeout(ANSWER_S):
                return await asking  # cancelled with us, and what it has begun with it
        except NO_ANSWER as error:
            logger.warning("not every router was asked for a receipt: %s", error)
            return None

    async def _first(self, request_id: str) -> Plain | None:
        """What the first router that has it says."""
        asked = [asyncio.ensure_future(_told(answer)) for answer in await self._ask_all(request_id)]
        try:
            for answer in asyncio.as_completed(asked):
                found = await answer
                if found is not None:
                    return found
        finally:
            for one in asked:
                one.cancel()
        return None


async def _told(answer: Awaitable[Plain | None]) -> Plain | None:
    try:
        return await answer
    except CALL_ERRORS as error:
        logger.warning("a router does not tell its receipts: %s", error)
        return None
