"""Replicas ahead of a load that comes back every day: `slo`, and a floor under it from a forecast.

What is forecast is the offered load, in requests that run at once: those that run, times the tokens that arrive over
those that are served (Little's law), so that a queue that only stands does not count again. Minutes are the series, a
day is its season (`forecast`), of logarithms: a day with a quarter of the users has a quarter at all hours. What comes
corrects the level within a quarter of an hour.

Rules
- The floor is for the highest minute from now to the end of a start: a replica that is asked for now serves from then
  on. It has slots for that load and its swings, as in `slo`.
- The floor sinks only when the lower one would have been enough for as long as `slo` holds its number.
- It also holds where no replica runs, so that the first one is there before the first request.
- Until a day has passed there is no forecast, and this is `slo`. A controller that starts anew begins anew.

On a load without a daily shape the floor lies near what `slo` wants by itself: see docs/decisions/scaling.md.
"""

from __future__ import annotations

import math

from autoscaling.policies.forecast import SeasonalForecast
from autoscaling.policies.ongoing_requests import Average, RuledPolicy
from autoscaling.policies.signals import Cause, Decision, Signals
from autoscaling.policies.slo import (
    HOLD_S,
    SAFETY,
    STARTS_HELD,
    USUAL_START_S,
    HighestSince,
    SloSizing,
    staffed,
    within,
)

DAY_S = 86_400.0
MINUTE_S = 60.0
LEVEL_PART = 0.1  # of a minute's error
SEASON_PART = 0.3  # of a day's
MOST_OVER = 4.0  # arrivals over service, in a minute in which hardly anything was served


class ForecastFloor:
    """See the module. `period_s`: of the season, a multiple of `bin_s`, the span of one value of the series."""

    def __init__(self, safety: float = SAFETY, period_s: float = DAY_S, bin_s: float = MINUTE_S) -> None:
        self._safety = safety
        self._bin_s = bin_s
        self._series = SeasonalForecast(round(period_s / bin_s), LEVEL_PART, SEASON_PART)
        self._average = Average()
        self._mean = math.nan  # of this bin, up to now
        self._bin: int | None = None
        self._highest = HighestSince()

    def decide(self, signals: Signals) -> Decision | None:
        """The least number of replicas, with its reason; None: nothing is known of what comes."""
        self._see(signals)
        start_s = signals.start_s or USUAL_START_S
        coming = self._coming(start_s)
        if coming is None:
            return None
        needed = staffed(coming, self._safety, signals.slots or signals.target_ongoing)
        hold_s = within(HOLD_S, STARTS_HELD * start_s)
        replicas = self._highest.add(needed, signals.now, hold_s, min(needed, signals.target))
        reason = f"{coming:.1f} requests are forecast to run within the {start_s:.0f} s of a start, by earlier days"
        held = f", {replicas} not long ago" if replicas > needed else ""
        return Decision(replicas, coming, f"{reason}: {needed} wanted{held}", Cause.FORECAST)

    def _see(self, signals: Signals) -> None:
        """Add what has come; a bin without a complete look counts as not measured."""
        number = int(signals.now // self._bin_s)
        if self._bin is None:
            self._bin = number
        for _ in range(min(number - self._bin, self._series.period)):
            self._series.add(math.log1p(self._mean))
            self._mean = math.nan
            self._average = Average()
        self._bin = max(number, self._bin)
        if signals.complete:
            self._mean = self._average.add(offered_load(signals), signals.now, self._bin_s)

    def _coming(self, start_s: float) -> float | None:
        """The highest of the bins from the present one to the one in which a start ends."""
        bins = min(math.ceil(start_s / self._bin_s) + 1, self._series.period)
        found = [self._series.ahead(step) for step in range(1, bins + 1)]
        known = [max(0.0, math.expm1(value)) for value in found if value is not None]
        return max(known, default=None)


class PredictivePolicy(RuledPolicy):
    """See the module."""

    has_own_delays = True

    def __init__(self, safety: float = SAFETY, period_s: float = DAY_S, bin_s: float = MINUTE_S) -> None:
        super().__init__(SloSizing(safety), ForecastFloor(safety, period_s, bin_s))


def offered_load(signals: Signals) -> float:
    """The requests that would run if none had to wait. What runs, where the rates in tokens are not known."""
    running = max(signals.granted - signals.rows, signals.executing, 0.0)
    if not signals.served_tokens_s:
        return running if signals.running else signals.load
    return running * min(MOST_OVER, signals.arrived_tokens_s / signals.served_tokens_s)
