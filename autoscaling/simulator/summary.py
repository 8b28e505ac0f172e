"""The figures of a run, added up as its requests end: a million of them need no list."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from autoscaling.simulator.requests import RequestEnd
from serve_app.types import Outcome, RequestClass

GROWTH = 1.01  # of a bucket: a quantile is exact to half a per cent
PER_E = 1.0 / math.log(GROWTH)
LEAST_S = 1e-4


def _bucket(seconds: float) -> int:
    return round(math.log(max(seconds, LEAST_S)) * PER_E)


class TimeHistogram:
    """Seconds in buckets that grow by one per cent each."""

    def __init__(self) -> None:
        self._buckets: Counter[int] = Counter()
        self.count = 0

    def add(self, seconds: float) -> None:
        self._buckets[_bucket(seconds)] += 1
        self.count += 1

    def count_within(self, seconds: float) -> int:
        """How many were no longer, to the nearest bucket."""
        most = _bucket(seconds)
        return sum(count for bucket, count in self._buckets.items() if bucket <= most)

    def quantile(self, share: float) -> float | None:
        """The time that this share does not exceed; None: there was none."""
        left = math.ceil(share * self.count)
        for bucket in sorted(self._buckets):
            left -= self._buckets[bucket]
            if left <= 0:
                return GROWTH**bucket
        return None


@dataclass(slots=True)
class ClassSummary:
    """Requests of one class.

    Args:
        offered: without bad requests, which no system could serve.
        in_time: answered, with the first token within its level.
        good_tokens: of output, of those.
    """

    offered: int = 0
    in_time: int = 0
    output_tokens: int = 0
    good_tokens: int = 0
    first_token: TimeHistogram = field(default_factory=TimeHistogram)
    outcomes: Counter[Outcome] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)

    @property
    def attainment(self) -> float | None:
        """The part of the offered requests that met its level; a refusal has missed it. None: none was offered."""
        return self.in_time / self.offered if self.offered else None


@dataclass(slots=True)
class Summary:
    """All requests of a run; `add` takes each end."""

    by_class: dict[RequestClass, ClassSummary] = field(default_factory=dict)
    runs: int = 0
    last_s: float = 0.0

    def add(self, end: RequestEnd) -> None:
        """A request has ended."""
        figures = self.by_class.get(end.request_class)
        if figures is None:
            figures = self.by_class[end.request_class] = ClassSummary()
        figures.outcomes[end.outcome] += 1
        if end.outcome is not Outcome.BAD_REQUEST:
            figures.offered += 1
        figures.output_tokens += end.output_tokens
        self.runs += end.runs
        self.last_s = max(self.last_s, end.ended_s)
        if end.refused:
            figures.refusals[end.refused] += 1
        if end.first_s is not None:
            figures.first_token.add(end.first_s - end.offered_s)
        if end.is_in_time:
            figures.in_time += 1
            figures.good_tokens += end.output_tokens

    @property
    def offered(self) -> int:
        return sum(figures.offered for figures in self._all())

    @property
    def in_time(self) -> int:
        return sum(figures.in_time for figures in self._all())

    @property
    def attainment(self) -> float | None:
        """As `ClassSummary.attainment`, of all classes."""
        return self.in_time / self.offered if self.offered else None

    @property
    def good_tokens(self) -> int:
        """Output tokens of requests that met their level: the goodput, times the span."""
        return sum(figures.good_tokens for figures in self._all())

    def _all(self) -> Iterator[ClassSummary]:
        return iter(self.by_class.values())
