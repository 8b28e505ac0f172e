"""How long a cold start takes: from the first request that needs a replica while there is none to the first slot.

The measurement includes the decision to start a replica, its placement, its process and its engine. Until one start
is measured, the start time that an engine reported for itself is used, which is shorter.
"""

from __future__ import annotations

DEFAULT_REMAINING_S = 10.0  # nothing known, or later than expected: an engine takes at least this to its first answer
# After this a start counts as given up, and the next request begins another: the scaling policy holds one as long.
LONGEST_START_S = 1800.0


class ReplicaStart:
    """The time of the present start and the duration of the last one. O(1) per call."""

    def __init__(self) -> None:
        self._needed_at: float | None = None  # since when requests need a replica while there is none
        self._reported_s: float | None = None
        self.measured_s: float | None = None

    def begin(self, now: float) -> None:
        """A request waits, and no replica has a slot."""
        if self._needed_at is None or now - self._needed_at > LONGEST_START_S:
            self._needed_at = now

    def replica_ready(self, now: float, is_new: bool) -> None:
        """A replica has slots; the return of a known replica (`is_new` False) does not measure a start."""
        if is_new and self._needed_at is not None and now - self._needed_at <= LONGEST_START_S:
            self.measured_s = now - self._needed_at
        self._needed_at = None

    def reported(self, start_s: float) -> None:
        """An engine reports how long its own start took."""
        self._reported_s = start_s

    def remaining_s(self, now: float) -> float:
        """Seconds until a replica is expected."""
        expected_s = self._reported_s if self.measured_s is None else self.measured_s
        if expected_s is None:
            return DEFAULT_REMAINING_S
        elapsed_s = 0.0 if self._needed_at is None else now - self._needed_at
        return expected_s - elapsed_s if elapsed_s < expected_s else DEFAULT_REMAINING_S
