"""Service levels: whether a request met the TTFT and ITL that its class promises, by the times of its tokens. Pure.

Rules
- TTFT: from the request's arrival at the router to the arrival there of the first frame with a token of its answer. An
  answer that is not streamed has a frame that only tells its first token.
- ITL is a mean: from the first token's arrival to the last one's, divided by the tokens after the first, per answer.
  A frame carries several tokens if its reader was behind, so a gap between frames is not an ITL: the longest gap is
  reported and not judged.
- Neither includes the client's network or the client's reading.
- When a client leaves, a level that is exceeded by then is missed.

Invariant: a request that was offered has exactly one verdict; a bad request (a 4xx) was not offered.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from serve_app.types import Outcome


@dataclass(frozen=True, slots=True)
class ServiceLevel:
    """What a class promises, in seconds above 0 (the settings check it); None: no promise."""

    ttft_s: float | None = None
    itl_s: float | None = None


class SloVerdict(enum.StrEnum):
    """Whether a request met its service level; a label of the metrics. All but MET and CLIENT_LEFT are misses."""

    MET = "met"
    TTFT = "ttft"  # the first token came late, or was late already when the client left
    ITL = "itl"  # the first token came in time, the others too slowly
    REFUSED = "refused"
    FAILED = "failed"  # a failure of the engine or of this system
    CLIENT_LEFT = "left"  # the client left, and no level was missed by then


@dataclass(slots=True)
class TokenPace:
    """The times at which the tokens of one request arrived, in seconds of one monotonic clock."""

    first_at: float | None = None
    last_at: float = 0.0
    longest_gap_s: float = 0.0

    def on_tokens(self, now: float) -> None:
        """A frame with tokens has arrived."""
        if self.first_at is None:
            self.first_at = now
        elif now - self.last_at > self.longest_gap_s:
            self.longest_gap_s = now - self.last_at
        self.last_at = now


def judge(
    service_level: ServiceLevel, outcome: Outcome, total_s: float, ttft_s: float | None, itl_s: float | None
) -> SloVerdict | None:
    """The verdict on a request that generates tokens; None: it was a bad request, so it was not offered.

    Args:
        total_s: from arrival to end.
        ttft_s: None: no token arrived.
        itl_s: the mean; None: fewer than two tokens.
    """
    match outcome:
        case Outcome.BAD_REQUEST | Outcome.UNAUTHORIZED:
            return None
        case Outcome.REFUSED:
            return SloVerdict.REFUSED
        case Outcome.ENGINE_FAILED | Outcome.INTERNAL_ERROR:
            return SloVerdict.FAILED
    kept = SloVerdict.MET if outcome is Outcome.OK else SloVerdict.CLIENT_LEFT
    first_s = total_s if ttft_s is None else ttft_s
    if service_level.ttft_s is not None and first_s > service_level.ttft_s:
        return SloVerdict.TTFT
    return SloVerdict.ITL if service_level.itl_s is not None and (itl_s or 0.0) > service_level.itl_s else kept
