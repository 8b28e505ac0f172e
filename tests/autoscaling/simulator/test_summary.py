"""The figures of a run are those of all its requests, whatever their number."""

from __future__ import annotations

import random

import pytest

from autoscaling.simulator import Summary
from autoscaling.simulator.requests import RequestEnd
from autoscaling.simulator.summary import TimeHistogram
from serve_app.types import Outcome, RequestClass

OK = RequestEnd(0, RequestClass.HIGH, "t", "m", 10.0, 10.0, 10.5, 12.0, 5, 20, Outcome.OK, "", "m-1", 1, 0, True)


def test_a_refusal_has_missed_the_level_and_a_bad_request_was_not_offered() -> None:
    summary = Summary()
    summary.add(OK)
    summary.add(OK._replace(is_in_time=False, first_s=14.0))
    summary.add(OK._replace(is_in_time=False, first_s=None, outcome=Outcome.REFUSED, refused="shed", output_tokens=0))
    summary.add(OK._replace(is_in_time=False, first_s=None, outcome=Outcome.BAD_REQUEST, refused="too_large"))
    figures = summary.by_class[RequestClass.HIGH]
    assert figures.attainment == summary.attainment == pytest.approx(1 / 3)
    assert figures.outcomes.total() == 4
    assert figures.refusals == {"shed": 1, "too_large": 1}
    assert summary.good_tokens == 20
    assert figures.first_token.quantile(0.5) == pytest.approx(0.5, rel=0.01)
    assert Summary().attainment is None


def test_quantiles_are_exact_to_a_bucket() -> None:
    draw = random.Random(1)
    times = sorted(draw.lognormvariate(0.0, 2.0) for _ in range(2_000))
    histogram = TimeHistogram()
    for seconds in times:
        histogram.add(seconds)
    for share in (0.5, 0.9, 0.99):
        assert histogram.quantile(share) == pytest.approx(times[round(share * 2_000) - 1], rel=0.006)
    assert histogram.count_within(times[999]) == pytest.approx(1_000, abs=20)
    assert TimeHistogram().quantile(0.5) is None
