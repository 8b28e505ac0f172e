"""Crashes of engines: why the last one of each model ended; and crash loops: engines of a model that end soon after
their start, again and again, start more and more seldom. Pure.

Rules
- An engine that fails says why in its last report. One that has ended without a report was killed, with its process.
- An engine that has crashed before it ran as long as it took to start counts, for `KEPT_S`. One that ran longer ends
  the loop: its start was worth it.
- After `FREE` such crashes each further one doubles the pause before the model's next start, up to `MAX_PAUSE_S`.

Invariant: a model without such crashes never waits, and no model waits longer than `MAX_PAUSE_S`.
"""

from __future__ import annotations

from dataclasses import dataclass

FREE = 3  # chance, or a node that fails
FIRST_PAUSE_S = 5.0  # of a start that takes tens of seconds
MAX_PAUSE_S = 60.0  # the cause may be over: a full disk, a lost mount
KEPT_S = 600.0  # ten times the longest pause; and the next start may take as long to fail
KILLED = "its process was killed, for want of memory or by hand, or its machine is gone"


@dataclass(frozen=True, slots=True)
class CrashLoop:
    """A model's engines crash. `pause_s`: until one may start again."""

    model: str
    crashes: int
    pause_s: float


@dataclass(frozen=True, slots=True)
class EngineFailure:
    """Why the last engine of a model that crashed has ended, and how long ago."""

    model: str
    why: str
    ago_s: float


class CrashLoops:
    """The recent crashes of all models."""

    def __init__(self) -> None:
        self._crashes: dict[str, list[float]] = {}
        self._failures: dict[str, tuple[str, float]] = {}  # by model: why its last engine has failed, and when

    def record_failure(self, model: str, why: str, now: float) -> None:
        """An engine has failed, and is about to end or has ended."""
        self._failures[model] = (why, now)

    def failures(self, now: float) -> list[EngineFailure]:
        """The last failure of each model, of the last `KEPT_S`."""
        found = sorted(self._failures.items())
        return [EngineFailure(model, why, round(now - at, 1)) for model, (why, at) in found if at > now - KEPT_S]

    def on_crash(self, model: str, start_s: float, ran_s: float, now: float) -> None:
        """An engine has ended unasked, after it has run so long; 0: it never did."""
        if ran_s > start_s:
            self._crashes.pop(model, None)
        else:
            self._crashes[model] = [*self._recent(model, now), now]

    def pause_s(self, model: str, now: float) -> float:
        """How long the model's next engine has to wait before it loads."""
        crashes = self._recent(model, now)
        over = len(crashes) - FREE
        if over <= 0:
            return 0.0
        return max(0.0, min(MAX_PAUSE_S, FIRST_PAUSE_S * 2.0 ** (over - 1)) - (now - crashes[-1]))

    def all(self, now: float) -> list[CrashLoop]:
        """The models whose engines have crashed more often than by chance."""
        found = ((model, len(self._recent(model, now))) for model in sorted(self._crashes))
        return [CrashLoop(model, count, self.pause_s(model, now)) for model, count in found if count > FREE]

    def _recent(self, model: str, now: float) -> list[float]:
        return [at for at in self._crashes.get(model, ()) if at > now - KEPT_S]
