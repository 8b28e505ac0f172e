"""What an operator asks of the endpoint, with a key that is an operator's (`auth.keys[].admin`).

    GET /admin/quota            the ledger of GPU memory
    GET /admin/requests/{id}    what became of a request, whichever router it came to

Invariant: nothing of it is answered to any other key, whatever its class.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from serve_app.errors import Forbidden, NotFound, Unavailable
from serve_app.http.local_routes import JSON, Answer
from serve_app.http.routes import AdminCall, Route
from serve_app.types import Identity

ANSWER_S = 2.0  # the quota actor answers in milliseconds, and within seconds after its own death
SHOWN_ID_CHARS = 64  # of an id nobody knows, in the error

Figures = Callable[[], Awaitable[dict[str, Any]]]
FindReceipt = Callable[[str], Awaitable[dict[str, Any] | None]]


class AdminRoutes:
    """Answers operators.

    Args:
        figures: asks the quota actor for its figures.
        away: what that raises while the actor is away.
        receipt: that of a request, by any of its ids, as plain data; None: no router has it. Bounded in time.
    """

    def __init__(self, figures: Figures, away: tuple[type[BaseException], ...], receipt: FindReceipt) -> None:
        self._figures, self._receipt = figures, receipt
        self._away: tuple[type[BaseException], ...] = (TimeoutError, *away)

    async def answer(self, route: Route, identity: Identity) -> Answer:
        """The whole answer.

        Raises:
            Forbidden: the key is not an operator's. Otherwise as `quota` and `request`.
        """
        if not identity.admin:
            raise Forbidden("this key is not an operator's: set admin on it (auth.keys)", code="not_admin")
        found = await (self.request(route.argument) if route.target is AdminCall.REQUEST else self.quota())
        return 200, JSON, msgspec.json.encode(found)

    async def quota(self) -> dict[str, Any]:
        """The ledger, as `serve-app quota --json` prints it. Raises Unavailable: the quota actor does not answer."""
        try:
            async with asyncio.timeout(ANSWER_S):
                return await self._figures()
        except self._away as error:
            raise Unavailable("the quota actor does not answer at the moment", code="no_quota") from error

    async def request(self, request_id: str) -> dict[str, Any]:
        """A request's receipt, as `serve-app explain --json` prints it. Raises NotFound: nobody has it any more."""
        found = await self._receipt(request_id)
        if found is None:
            shown = request_id[:SHOWN_ID_CHARS]
            raise NotFound(f"no receipt of {shown!r}: still running, or too long ago", code="request_not_found")
        return found
