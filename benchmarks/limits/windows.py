"""What was charged against what limits allow: the worst window, what stayed unused, the most at once.

Pure. Invariant: a charge counts at the moment at which its request was handed to a replica, so neither the router's nor
the quota actor's own count is believed. Its tokens are those that it was charged then and had used in the end; what it
used beyond its estimate, a debt, is told apart: nobody knows it at that moment.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MINUTE_S = 60.0
Floats = NDArray[np.float64]
Span = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Bucket:
    """A token bucket: `burst` at most at once, `per_minute` in the long run."""

    burst: float
    per_minute: float

    def allows(self, span_s: float) -> float:
        """The most that may be charged in a window of so many seconds."""
        return self.burst + self.per_minute * span_s / MINUTE_S


@dataclass(frozen=True, slots=True)
class Charge:
    """A request that was admitted: handed to a replica at `at`, ended at `until`, in seconds of one clock.

    Args:
        tokens: that it used; `estimate`: that it was charged until its end.
    """

    at: float
    until: float
    tokens: int
    estimate: int


def over_share(at: Sequence[float], amounts: Sequence[float], bucket: Bucket) -> float:
    """By which part the worst window is above what the bucket allows; 0.0: none is.

    Windows begin and end at charges: a longer one allows more and has no more in it.
    """
    if not at:
        return 0.0
    order = np.argsort(np.asarray(at, float), kind="stable")
    moments = np.asarray(at, float)[order]
    sizes = np.asarray(amounts, float)[order]
    if _never_empty(moments, sizes, bucket):
        return 0.0
    sums = np.concatenate(([0.0], np.cumsum(sizes)))
    worst = 0.0
    for first in range(len(moments)):
        charged = sums[first + 1 :] - sums[first]
        allowed = bucket.burst + bucket.per_minute / MINUTE_S * (moments[first:] - moments[first])
        worst = max(worst, float(np.max(charged / allowed)) - 1.0)
    return worst


def _never_empty(moments: Floats, sizes: Floats, bucket: Bucket) -> bool:
    """Whether a bucket that is full at the first charge has enough for every one: then no window is above."""
    level = bucket.burst
    before = float(moments[0])
    for moment, size in zip(moments.tolist(), sizes.tolist(), strict=True):
        level = min(bucket.burst, level + (moment - before) * bucket.per_minute / MINUTE_S) - size
        before = moment
        if level < -1e-9 * bucket.burst:
            return False
    return True


def unused_share(
    charges: Sequence[Charge], requests: Bucket | None, tokens: Bucket | None, slots: int | None, span: Span
) -> float:
    """Which part of a time, in which somebody asked all the time, limits would not have needed for what was charged.

    An ideal server charges the same requests in the same order, each as soon as all limits allow it, and one more of
    their mean size. What it had left at the end of the time is what was not used, at least 0.0.
    """
    begin, end = span
    found = sorted((charge for charge in charges if charge.at <= end), key=lambda charge: charge.at)
    if not found:
        return 1.0
    mean = Charge(end, end, 0, sum(one.estimate for one in found) // len(found))
    ideal = _Ideal(begin, requests, tokens, slots)
    for charge in (*found, mean):
        ideal.admit(charge)
    return max(0.0, 1.0 - (ideal.now - begin) / (end - begin))


class _Ideal:
    """Buckets and slots without routers: what is charged by estimate at its start is settled at its end."""

    def __init__(self, begin: float, requests: Bucket | None, tokens: Bucket | None, slots: int | None) -> None:
        never = Bucket(math.inf, 1.0)
        self.now = begin
        self._slots = math.inf if slots is None else slots
        self._buckets = (requests or never, tokens or never)
        self._levels = [bucket.burst for bucket in self._buckets]
        self._ends: list[tuple[float, int]] = []  # with the tokens that come back then

    def admit(self, charge: Charge) -> None:
        """Charge a request at the first moment from now on at which it may be."""
        need = (1.0, float(charge.estimate))
        while True:
            waits = [
                (amount - level) * MINUTE_S / bucket.per_minute
                for amount, level, bucket in zip(need, self._levels, self._buckets, strict=True)
            ]
            at = self.now + max(0.0, *waits) if len(self._ends) < self._slots else math.inf
            if not self._ends or at <= self._ends[0][0]:
                break
            self._end_one()
        self._pass(at)
        self._levels = [level - amount for level, amount in zip(self._levels, need, strict=True)]
        heapq.heappush(self._ends, (at + charge.until - charge.at, charge.estimate - charge.tokens))

    def _end_one(self) -> None:
        at, back = heapq.heappop(self._ends)
        self._pass(at)
        self._levels[1] = min(self._buckets[1].burst, self._levels[1] + back)

    def _pass(self, at: float) -> None:
        at = max(at, self.now)
        self._levels = [
            min(bucket.burst, level + (at - self.now) * bucket.per_minute / MINUTE_S)
            for level, bucket in zip(self._levels, self._buckets, strict=True)
        ]
        self.now = at


def most_at_once(spans: Sequence[Span]) -> int:
    """The most spans that have a moment in common; one that ends as another begins does not overlap it."""
    steps = sorted([(begin, 1) for begin, _ in spans] + [(end, -1) for _, end in spans])
    most = now = 0
    for _, step in steps:
        now += step
        most = max(most, now)
    return most
