"""Waiting for a condition that nothing signals."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

TURNS = 2  # of the event loop that a call, a reply or a cancellation is on its way
POLL_S = 0.005  # between looks at a condition that nothing signals
STALL_S = 0.05  # a longer pause between two looks is the machine's doing and counts as this much
SOON_S = 10.0  # for what takes milliseconds on an idle machine


async def turns(count: int = TURNS) -> None:
    """Let the event loop turn."""
    for _ in range(count):
        await asyncio.sleep(0)


async def until(condition: Callable[[], bool], bound_s: float, goal: str) -> float:
    """Wait for a condition that nothing signals; returns the seconds it took. AssertionError after `bound_s`."""
    took_s = 0.0
    while not condition():
        assert took_s < bound_s, f"not within {bound_s} s: {goal}"
        looked = time.monotonic()
        await asyncio.sleep(POLL_S)  # bound: bound_s
        took_s += min(time.monotonic() - looked, STALL_S)
    return took_s
