"""The client of the limits, without limits: records what is charged, and refuses or holds what a test says."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from serve_app.core.limits import LimitedRequest, Standing
from serve_app.core.limits.policy import Bucket
from serve_app.errors import ServeAppError


@dataclass
class FakeCharge:
    """`end`: how it was ended: tokens and cost, or "refunded"."""

    request: LimitedRequest
    waited_s: float
    end: tuple[int, int] | str | None = None

    def settle(self, tokens: int, cost_micro: int) -> None:
        assert self.end is None, "a charge is ended once"
        self.end = (tokens, cost_micro)

    def refund(self) -> None:
        assert self.end is None, "a charge is ended once"
        self.end = "refunded"


@dataclass
class FakeLimits:
    """In place of `serve_app.router.LimitClient`.

    Args:
        refusal: what `acquire` raises.
        held: what `acquire` waits for.
    """

    refusal: ServeAppError | None = None
    held: asyncio.Event | None = None
    waited_s: float = 0.0
    charges: list[FakeCharge] = field(default_factory=list)
    asked: list[LimitedRequest] = field(default_factory=list)
    cancelled: int = 0

    async def acquire(self, request: LimitedRequest) -> FakeCharge:
        self.asked.append(request)
        if self.refusal is not None:
            raise self.refusal
        if self.held is not None:
            try:
                await self.held.wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        self.charges.append(FakeCharge(request, self.waited_s))
        return self.charges[-1]

    def standing(self, scopes: object) -> Standing:
        return Standing(Bucket(60, 58, 2.0), None) if scopes else Standing()

    @property
    def ends(self) -> list[tuple[int, int] | str | None]:
        return [charge.end for charge in self.charges]
