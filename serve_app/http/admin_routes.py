"""Routes for operators: they require a key with `auth.keys[].admin`.

    GET /admin/quota            the ledger of GPU memory
    GET /admin/requests/{id}    the receipt of a request, from whichever router received it

Invariant: no other key gets an answer from these routes, whatever its class.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from serve_app.errors import Forbidden, NotFound, Unavailable
from serve_app.http.local_routes import JSON, Answer
from serve_app.http.routes import AdminCall, HttpRoute
from serve_app.types import Identity

ANSWER_TIMEOUT_S = 2.0  # the quota actor answers in milliseconds, and within seconds after its own death
SHOWN_ID_CHARS = 64  # of an unknown request id, in the error

GetFigures = Callable[[], Awaitable[dict[str, Any]]]
FindReceipt = Callable[[str], Awaitable[dict[str, Any] | None]]


class AdminRoutes:
    """Answers the requests of operators.

    Args:
        get_figures: asks the quota actor for its figures.
        actor_errors: what `get_figures` raises while the actor is unreachable.
        find_receipt: a receipt by any id of its request, as plain data; None: no router has it. Bounded in time.
    """

    def __init__(
        self, get_figures: GetFigures, actor_errors: tuple[type[BaseException], ...], find_receipt: FindReceipt
    ) -> None:
        self._get_figures, self._find_receipt = get_figures, find_receipt
        self._actor_errors: tuple[type[BaseException], ...] = (TimeoutError, *actor_errors)

    async def answer(self, route: HttpRoute, identity: Identity) -> Answer:
        """The complete answer to an admin route.

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
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                return await self._get_figures()
        except self._actor_errors as error:
            raise Unavailable("the quota actor does not answer at the moment", code="no_quota") from error

    async def request(self, request_id: str) -> dict[str, Any]:
        """A request's receipt, as `serve-app explain --json` prints it. Raises NotFound: no router has the receipt."""
        found = await self._find_receipt(request_id)
        if found is None:
            shown = request_id[:SHOWN_ID_CHARS]
            raise NotFound(
                f"no receipt of {shown!r}: it has not ended yet, or ended too long ago",
                code="request_not_found",
            )
        return found
