"""A router's client of the limits that all routers share: `core.limits` with a clock, over the stream of `QueueClient`.

Invariant: a request that `acquire` has charged is settled or refunded once; one whose caller leaves before that leaves
nothing behind.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from serve_app.core.limits import Charged, LimitDecision, LimitedRequest, Scopes, Standing
from serve_app.errors import RateLimited, ServeAppError, Unavailable
from serve_app.router.queue_client import QueueClient


class LimitClient:
    """Charges requests against their limits."""

    def __init__(self, client: QueueClient) -> None:
        self._client = client

    async def acquire(self, request: LimitedRequest) -> LimitCharge:
        """Charge a request; waits for the quota actor where this router has no credit for it, and, if it may, until the
        request is within its limits.

        Raises:
            RateLimited: a limit refuses it. Unavailable: the quota actor is away, and no credit is left.
        """
        client = self._client
        request_id = request.request_id
        decision = client.core.charge(request, time.monotonic())
        if decision is None:
            decided = client.charges[request_id] = asyncio.get_running_loop().create_future()
            try:
                client.apply_actions([])
                decision = await decided
            except BaseException:
                client.core.limits.on_cancel(request_id)
                client.core.limits.on_end(request_id, None, 0, time.monotonic())  # if it was charged meanwhile
                client.apply_actions([])
                raise
            finally:
                del client.charges[request_id]
        if isinstance(decision, Charged):
            return LimitCharge(client, request_id, decision.waited_s)
        raise _error(decision)

    def standing(self, scopes: Scopes) -> Standing:
        """What is left of the limits a minute of these scopes, over all routers."""
        return self._client.core.limits.standing(scopes, time.monotonic())


@dataclass(slots=True)
class LimitCharge:
    """A charge that has not ended. `waited_s`: from the request's arrival until it was charged."""

    client: QueueClient
    request_id: str
    waited_s: float

    def refund(self) -> None:
        """End the charge of a request that was refused or failed."""
        self.settle(None, 0)

    def settle(self, tokens: int | None, cost_micro: int) -> None:
        """End the charge by what the request used; None: as `refund`."""
        self.client.core.limits.on_end(self.request_id, tokens, cost_micro, time.monotonic())
        self.client.apply_actions([])


def _error(refused: LimitDecision) -> ServeAppError:
    assert not isinstance(refused, Charged)
    wait_s = refused.retry_after_s
    if not refused.limit:
        message = "the limits of this key cannot be charged at the moment"
        return Unavailable(message, code="limits_unavailable", retry_after_s=wait_s)
    if wait_s is None:
        message = f"The request is larger than a limit: {refused.limit}. It can never be served."
    else:
        message = f"Rate limit reached: {refused.limit}. Please try again in {wait_s:.3f}s."
    return RateLimited(message, code=refused.reason.value, retry_after_s=wait_s)
