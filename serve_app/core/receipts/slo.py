"""Service levels: whether a request was served as its class promises, told from when its tokens came. Pure.

Rules
- TTFT is from the request's arrival at the router to the arrival there of the first frame with a token of its answer.
- ITL is the mean: from the first token's arrival to the last one's, over the tokens after the first, of each answer.
  A frame carries several tokens where its reader was behind, so a gap between frames is not one token's: the longest is
  told and not judged.
- Neither has the client's network or its reading in it.
- Of an answer that comes whole no single token is seen. It is in time if it is there when a stream that just keeps both
  levels would have ended; without either of them there is no such moment, and whatever is answered is in time.
- A client that leaves has missed what was beyond a level by then, and of a whole answer nothing that could be told.

Invariant: a request that was offered has exactly one verdict; what is wrong by itself (a 4xx) was not offered.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

from serve_app.types import Outcome


@dataclass(frozen=True, slots=True)
class ServiceLevel:
    """What a class promises, in seconds; None: nothing. ValueError: a bound that is not above 0."""

    ttft_s: float | None = None
    itl_s: float | None = None

    def __post_init__(self) -> None:
        for bound_s in (self.ttft_s, self.itl_s):
            if bound_s is not None and not bound_s > 0:
                raise ValueError(f"a service level is {bound_s} s")


class Verdict(enum.StrEnum):
    """How a request was served; a label of the metrics. All but MET and LEFT are misses."""

    MET = "met"
    TTFT = "ttft"  # the first token came late, or was late when its client left
    ITL = "itl"  # the first came in time, the others too slowly
    LATE = "late"  # a whole answer came after a stream that keeps its levels would have ended
    REFUSED = "refused"
    FAILED = "failed"  # the engine's failure, or ours
    LEFT = "left"  # its client went while all was well


class Pace:
    """When the tokens of one request came, in seconds of one monotonic clock."""

    __slots__ = ("first_at", "last_at", "longest_gap_s")

    def __init__(self) -> None:
        self.first_at: float | None = None
        self.last_at = 0.0
        self.longest_gap_s = 0.0

    def came(self, now: float) -> None:
        """A frame with tokens has come."""
        if self.first_at is None:
            self.first_at = now
        elif now - self.last_at > self.longest_gap_s:
            self.longest_gap_s = now - self.last_at
        self.last_at = now


@dataclass(frozen=True, slots=True)
class Served:
    """What is held against a level.

    Args:
        total_s: from its arrival to its end.
        ttft_s: None: no token came.
        span_s: from its first token to its last one.
        tokens: of each answer, the mean.
        streamed: whether they came as they were made.
    """

    outcome: Outcome
    total_s: float
    ttft_s: float | None = None
    span_s: float = 0.0
    tokens: float = 0.0
    streamed: bool = True

    @property
    def itl_s(self) -> float | None:
        """The mean; None: it cannot be told."""
        return self.span_s / (self.tokens - 1) if self.streamed and self.tokens > 1 else None


_NOT_OFFERED = (Outcome.BAD_REQUEST, Outcome.UNAUTHORIZED)
_FAILED = (Outcome.ENGINE_FAILED, Outcome.INTERNAL_ERROR)


def judge(level: ServiceLevel, served: Served) -> Verdict | None:
    """How a request that generates was served; None: it was not offered, as what was wrong by itself."""
    if served.outcome in _NOT_OFFERED:
        return None
    if served.outcome is Outcome.REFUSED:
        return Verdict.REFUSED
    if served.outcome in _FAILED:
        return Verdict.FAILED
    kept = Verdict.MET if served.outcome is Outcome.OK else Verdict.LEFT
    if not served.streamed:
        late = kept is Verdict.MET and served.total_s > _whole_by_s(level, served.tokens)
        return Verdict.LATE if late else kept
    first_s = served.total_s if served.ttft_s is None else served.ttft_s
    if level.ttft_s is not None and first_s > level.ttft_s:
        return Verdict.TTFT
    if level.itl_s is not None and (served.itl_s or 0.0) > level.itl_s:
        return Verdict.ITL
    return kept


def _whole_by_s(level: ServiceLevel, tokens: float) -> float:
    """When a stream of so many tokens that just keeps both levels has ended."""
    if level.ttft_s is None or level.itl_s is None:
        return math.inf
    return level.ttft_s + level.itl_s * max(0.0, tokens - 1)
