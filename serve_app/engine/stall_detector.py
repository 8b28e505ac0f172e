"""Decides whether an engine is frozen.

Invariant: an engine is reported frozen if and only if it has not answered, stepped or computed for `bound_s`.
"""

from __future__ import annotations


class StallDetector:
    """Compares progress counters between health checks.

    Args:
        bound_s: seconds without an answer or progress after which the engine counts as frozen.
    """

    def __init__(self, bound_s: float) -> None:
        self._bound_s = bound_s
        self._counters: tuple[float, ...] | None = None
        self._alive_at: float | None = None

    def observe(self, answered: bool, counters: tuple[float, ...], now: float) -> float | None:
        """Take one observation: whether the engine answered, and its growing counters (steps, CPU seconds), which
        count if it did not. The first observation after an answer is what later ones are compared with, and no sign of
        a frozen engine: after a pause of this process, the answer is there and not read yet.

        Returns:
            Seconds without an answer or progress if the engine is frozen, else None.
        """
        before, self._counters = self._counters, None if answered else counters
        if answered or self._alive_at is None or (before is not None and counters != before):
            self._alive_at = now
        if before is None or answered:
            return None
        silent_s = now - self._alive_at
        return silent_s if silent_s >= self._bound_s else None
