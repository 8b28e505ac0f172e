"""Finds the receipt of a request on any router replica.

Invariant: a search ends within `other_routers.ANSWER_TIMEOUT_S`, however many routers do not answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from serve_app.core.receipts import Receipts, explain
from serve_app.ray_adapter import NO_ANSWER, in_fresh_context
from serve_app.router.other_routers import ANSWER_TIMEOUT_S, answer_or_none

logger = logging.getLogger("ray.serve")

Plain = dict[str, Any]
Answers = Iterable[Awaitable[Plain | None]]
AskAll = Callable[[str, str | None], Awaitable[Answers]]  # as `ReceiptSearch.find_here`


class ReceiptSearch:
    """Searches this router first, then all routers at once.

    Args:
        receipts: of this router.
        ask_all: asks every router for the receipt; the call and the answers may raise CALL_ERRORS.
    """

    def __init__(self, receipts: Receipts, ask_all: AskAll) -> None:
        self._receipts = receipts
        self._ask_all = ask_all

    def find_here(self, request_id: str, tenant: str | None) -> Plain | None:
        """The receipt as plain data with its `story` in sentences, if this router has it and it is of `tenant` (None:
        all tenants')."""
        receipt = self._receipts.find(request_id, tenant)
        return None if receipt is None else receipt.to_json_fields() | {"story": explain(receipt)}

    async def find_anywhere(self, request_id: str, tenant: str | None) -> Plain | None:
        """As `find_here`, from any router; None: no router that answers in time has it."""
        found = self.find_here(request_id, tenant)
        if found is not None:
            return found
        # in a context of its own: the calling HTTP request must not decide how replies are read
        asking = in_fresh_context(self._first_found(request_id, tenant), "receipt")
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                return await asking  # cancelled with this call, together with the calls it has begun
        except NO_ANSWER as error:
            logger.warning(
                "Receipt of request %s was not looked up on every router and may be missed: %s", request_id, error
            )
            return None

    async def _first_found(self, request_id: str, tenant: str | None) -> Plain | None:
        """The answer of the first router that has the receipt."""
        answers = await self._ask_all(request_id, tenant)
        asked = [asyncio.ensure_future(answer_or_none(answer, "the receipt search")) for answer in answers]
        try:
            for answer in asyncio.as_completed(asked):
                found = await answer
                if found is not None:
                    return found
        finally:
            for task in asked:
                task.cancel()
        return None
