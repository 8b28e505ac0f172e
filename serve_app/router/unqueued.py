"""Turns of work that takes no slot (tokenizing): it is not in the queue, and an engine's front end does it for all.

Invariant: `PER_REPLICA` works for each replica run at once, half of them at most of one tenant, and tenants take turns.
A work gives up its place when its replica is done with it, however slowly its client reads.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from serve_app.core.turns import TenantTurns
from serve_app.errors import Overloaded

PER_REPLICA = 4  # a front end does one at a time; more would only wait there, in no fair order
MAX_WAITING = 64  # of one tenant in one router: seconds of work; the client that sends more waits itself
RETRY_AFTER_S = 1.0  # most of those that wait have had their turn by then


class UnqueuedTurns:
    """The turns at one model, in one router.

    Args:
        replicas: how many of the model run now.
    """

    def __init__(self, replicas: Callable[[], int]) -> None:
        self._replicas = replicas
        self._turns = TenantTurns[asyncio.Future[None]](MAX_WAITING)

    @contextlib.asynccontextmanager
    async def turn(self, tenant: str, max_wait_s: float) -> AsyncIterator[Callable[[], None]]:
        """Wait for a turn, which ends with the block, or before it when what this yields is called.

        Raises:
            Overloaded: too many works of this tenant wait, or it has waited for `max_wait_s`.
        """
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if not self._turns.arrive(tenant, turn):
            raise Overloaded(
                f"{MAX_WAITING} requests of this tenant that take no slot wait already", retry_after_s=RETRY_AFTER_S
            )
        with contextlib.ExitStack() as stack:
            stack.callback(self._end, tenant, turn)
            self._begin()
            await asyncio.wait([turn], timeout=max_wait_s)
            if not turn.done():
                raise Overloaded("the request had no turn within the longest wait", retry_after_s=RETRY_AFTER_S)
            yield stack.close

    def _end(self, tenant: str, turn: asyncio.Future[None]) -> None:
        """A work has ended, or waits no longer."""
        if turn.done():
            self._turns.end(tenant)
        else:
            self._turns.leave(tenant, turn)
        self._begin()

    def _begin(self) -> None:
        at_once = PER_REPLICA * max(1, self._replicas())
        while (begun := self._turns.begin(at_once, at_once // 2)) is not None:
            begun[1].set_result(None)
