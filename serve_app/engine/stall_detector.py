"""Decides whether an engine is frozen.

Invariant: an engine that answers, steps or computes is never called frozen; one that does none of it for the bound is.
"""

from __future__ import annotations


class StallDetector:
    """Compares marks of life between health checks.

    Args:
        bound_s: seconds without any mark of life after which the engine counts as frozen.
    """

    def __init__(self, bound_s: float) -> None:
        self._bound_s = bound_s
        self._marks: tuple[float, ...] | None = None
        self._alive_at: float | None = None

    def observe(self, answered: bool, marks: tuple[float, ...], now: float) -> float | None:
        """Take one observation: did it answer, and the present values of counters that only grow (steps, CPU seconds).

        Returns:
            Seconds of silence when the engine is frozen, else None.
        """
        if answered or marks != self._marks or self._alive_at is None:
            self._marks, self._alive_at = marks, now
            return None
        silent_s = now - self._alive_at
        return silent_s if silent_s >= self._bound_s else None
