"""A series with a season, forecast by exponential smoothing.

The additive method of Holt (1957) and Winters ("Forecasting sales by exponentially weighted moving averages", 1960),
without a trend: value = level + season. Each season's first pass sets it; the level starts as that pass's mean.
"""

from __future__ import annotations

import math


class SeasonalForecast:
    """The series so far. A value that is NaN was not measured, and changes nothing.

    Args:
        period: values in a season.
        level_part: of the distance to a new value, by which the level follows it.
        season_part: the same of the season at this place.
    """

    def __init__(self, period: int, level_part: float, season_part: float) -> None:
        self._level_part = level_part
        self._season_part = season_part
        self._season = [math.nan] * period
        self._level = math.nan
        self._place = 0  # of the next value
        self._passes = 0  # of the season, that have ended

    @property
    def period(self) -> int:
        """Values in a season."""
        return len(self._season)

    def add(self, value: float) -> None:
        """The next value."""
        place = self._place
        if not self._passes:
            self._season[place] = value
        elif not math.isnan(value):
            self._learn(place, value)
        self._place = (place + 1) % len(self._season)
        if self._place == 0:
            if not self._passes:
                self._begin()
            self._passes += 1

    def ahead(self, steps: int) -> float | None:
        """The value that is `steps` after the last one, from 1 to the period; None: no season has passed yet."""
        if not self._passes or math.isnan(self._level):
            return None
        return self._level + self._season[(self._place + steps - 1) % len(self._season)]

    def _begin(self) -> None:
        known = [value for value in self._season if not math.isnan(value)]
        self._level = math.fsum(known) / len(known) if known else math.nan
        self._season = [0.0 if math.isnan(value) else value - self._level for value in self._season]

    def _learn(self, place: int, value: float) -> None:
        if math.isnan(self._level):  # nothing was measured in the first pass
            self._level = value
        before = self._level
        self._level += self._level_part * (value - self._season[place] - before)
        self._season[place] += self._season_part * (value - before - self._season[place])
