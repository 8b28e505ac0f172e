"""What an operator asks of the endpoint: `GET /admin/quota`, with a key that is an operator's (`auth.keys[].admin`).

Invariant: nothing of it is answered to any other key, whatever its class.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from serve_app.errors import Forbidden, Unavailable
from serve_app.http.local_routes import JSON, Answer
from serve_app.types import Identity

ANSWER_S = 2.0  # the quota actor answers in milliseconds, and within seconds after its own death

Figures = Callable[[], Awaitable[dict[str, Any]]]


class AdminRoutes:
    """Answers operators.

    Args:
        figures: asks the quota actor for its figures.
        away: what that raises while the actor is away.
    """

    def __init__(self, figures: Figures, away: tuple[type[BaseException], ...]) -> None:
        self._figures, self._away = figures, away

    async def quota(self, identity: Identity) -> Answer:
        """The ledger of GPU memory, as `serve-app quota --json` prints it.

        Raises:
            Forbidden: the key is not an operator's. Unavailable: the quota actor does not answer.
        """
        if not identity.admin:
            raise Forbidden("this key is not an operator's: set admin on it (auth.keys)", code="not_admin")
        try:
            async with asyncio.timeout(ANSWER_S):
                found = await self._figures()
        except (TimeoutError, *self._away) as error:
            raise Unavailable("the quota actor does not answer at the moment", code="no_quota") from error
        return 200, JSON, msgspec.json.encode(found)
