"""How long a model without a replica takes to have one again, measured from the moment somebody needed it.

The measure spans everything between the need and the first slot: the decision to start a replica, its place, its
process, its engine. Until a first one is measured, what an engine told of its own start stands in, which is shorter.
"""

from __future__ import annotations

DEFAULT_REMAINING_S = 10.0  # nothing known, or later than expected: an engine takes at least this to its first answer
# Beyond it a start was given up, and the next need begins another: the scaling policy holds one for as long.
LONGEST_START_S = 1800.0


class StartUp:
    """The clock of the present start, and what the last one took. O(1) per call."""

    def __init__(self) -> None:
        self._needed_at: float | None = None  # since when somebody needs a replica while there is none
        self._told_s: float | None = None
        self.measured_s: float | None = None

    def needed(self, now: float) -> None:
        """Somebody waits, and no replica has a slot."""
        if self._needed_at is None or now - self._needed_at > LONGEST_START_S:
            self._needed_at = now

    def came(self, now: float, new: bool) -> None:
        """A replica has slots; one that is not new was only away, which tells nothing of a start."""
        if new and self._needed_at is not None and now - self._needed_at <= LONGEST_START_S:
            self.measured_s = now - self._needed_at
        self._needed_at = None

    def told(self, start_s: float) -> None:
        """An engine says what its own start took."""
        self._told_s = start_s

    def remaining_s(self, now: float) -> float:
        """Seconds until a replica can be expected."""
        expected_s = self._told_s if self.measured_s is None else self.measured_s
        if expected_s is None:
            return DEFAULT_REMAINING_S
        elapsed_s = 0.0 if self._needed_at is None else now - self._needed_at
        return expected_s - elapsed_s if elapsed_s < expected_s else DEFAULT_REMAINING_S
