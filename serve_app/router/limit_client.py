"""Stub."""

from __future__ import annotations

from typing import Any

from serve_app.core.limits import LimitedRequest, Standing


class LimitCharge:
    waited_s: float = 0.0

    def settle(self, tokens: int, cost_micro: int) -> None:
        raise NotImplementedError

    def refund(self) -> None:
        raise NotImplementedError


class LimitClient:
    def __init__(self, client: Any) -> None: ...

    async def acquire(self, request: LimitedRequest) -> LimitCharge:
        raise NotImplementedError

    def standing(self, scopes: Any) -> Standing:
        raise NotImplementedError
