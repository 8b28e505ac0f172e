"""A part of the store as the rest of the system asks it: calls by name, wherever the `SqlStore` is."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

CLAIM_BYTES = 8  # of a claim's name: unique among those of one worker


class SentCalls:
    """Each method is a call of the one of the same name of a part of the `SqlStore`.

    Args:
        call: runs a method of the `SqlStore`.
        part: the name of the part there.
        claims: the method that claims: each call has a name, so that its repeats get the same.
    """

    def __init__(self, call: Callable[..., Awaitable[Any]], part: str, claims: str = "") -> None:
        self._call = call
        self._part = part
        self._claims = claims

    def __getattr__(self, method: str) -> Callable[..., Awaitable[Any]]:
        call = partial(self._call, f"{self._part}.{method}")
        if method != self._claims:
            return call
        return lambda *arguments, **named: call(*arguments, **named, claim=secrets.token_hex(CLAIM_BYTES))
