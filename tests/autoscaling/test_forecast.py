"""Forecasts of a series with a season, against statsmodels' answers (`forecast_reference.py` makes them)."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoscaling.policies.forecast import SeasonalForecast
from tests.autoscaling.forecast_reference import CASES, FILE
from tests.effort import examples

REFERENCES: list[dict[str, Any]] = json.loads(FILE.read_text())


@pytest.mark.parametrize("known", REFERENCES, ids=lambda known: f"period {known['period']}")
def test_it_forecasts_what_statsmodels_does(known: dict[str, Any]) -> None:
    period = known["period"]
    series = SeasonalForecast(period, known["level_part"], known["season_part"])
    one_ahead = []
    for place, value in enumerate(known["values"]):
        if place >= period:
            one_ahead.append(series.ahead(1))
        series.add(value)
    assert one_ahead == pytest.approx(known["one_ahead"], rel=1e-9)
    # Of a whole period ahead, statsmodels 0.15 does not count the newest value of the season.
    ahead = [series.ahead(step) for step in range(1, period)]
    assert ahead == pytest.approx(known["ahead"][:-1], rel=1e-9)


def test_every_case_was_asked_for() -> None:
    assert [(one["period"], one["level_part"], one["season_part"]) for one in REFERENCES] == [one[:3] for one in CASES]


@given(season=st.lists(st.floats(0.0, 1e6), min_size=1, max_size=30), passes=st.integers(1, 4), more=st.integers(0, 29))
@settings(max_examples=examples(100))
def test_what_repeats_is_foreseen(season: list[float], passes: int, more: int) -> None:
    series = SeasonalForecast(len(season), 0.1, 0.3)
    more %= len(season)
    for value in [*season * passes, *season[:more]]:
        series.add(value)
    for step in range(1, len(season) + 1):
        assert series.ahead(step) == pytest.approx(season[(more + step - 1) % len(season)], abs=1e-3)


def test_nothing_is_foreseen_before_a_whole_season() -> None:
    series = SeasonalForecast(3, 0.1, 0.3)
    for value in (1.0, 2.0):
        series.add(value)
    assert series.ahead(1) is None
    series.add(3.0)
    assert series.ahead(1) == pytest.approx(1.0)


def test_what_was_not_measured_changes_nothing() -> None:
    whole = SeasonalForecast(3, 0.5, 0.5)
    for value in (1.0, 2.0, 3.0):
        whole.add(value)
    before = [whole.ahead(step) for step in (1, 2, 3)]
    for _ in range(6):
        whole.add(math.nan)
    assert [whole.ahead(step) for step in (1, 2, 3)] == before


def test_a_first_season_in_which_nothing_was_measured_is_made_up_for() -> None:
    series = SeasonalForecast(2, 0.5, 0.5)
    for value in (math.nan, math.nan, math.nan, 4.0):
        series.add(value)
    assert series.ahead(2) == pytest.approx(4.0)
