"""The synthetic load: its clients, its burstiness, its day; one seed gives one load."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import replace
from statistics import fmean, pstdev

import pytest

from autoscaling.simulator import SyntheticLoad
from autoscaling.simulator.synthetic import BURSTY_SHARE, STEADY_SHARE, gap_s
from serve_app.errors import ConfigError

FLAT = SyntheticLoad("m", 10.0, 2_000.0, day_swing=0.0)


def test_one_seed_gives_one_load_and_it_comes_in_order() -> None:
    first = list(itertools.islice(FLAT.requests(), 2_000))
    assert first == list(itertools.islice(FLAT.requests(), 2_000))
    assert first != list(itertools.islice(replace(FLAT, seed=2).requests(), 2_000))
    assert [request.at_s for request in first] == sorted(request.at_s for request in first)


def test_five_clients_have_most_of_the_requests() -> None:
    counts = Counter(request.tenant for request in replace(FLAT, clients=50, span_s=6_000.0).requests())
    total = counts.total()
    assert total == pytest.approx(60_000, rel=0.15)
    assert sum(counts[f"client-{at:02}"] for at in range(5)) / total == pytest.approx(0.65, abs=0.1)


def test_a_client_is_steady_bursty_or_on_and_off() -> None:
    """By the coefficient of variation of its gaps."""
    found = []
    for kind in (0.0, STEADY_SHARE, STEADY_SHARE + BURSTY_SHARE):
        draw = random.Random(1)
        gaps = [gap_s(draw, 1.0, kind) for _ in range(60_000)]
        assert fmean(gaps) == pytest.approx(1.0, rel=0.25)
        found.append(pstdev(gaps) / fmean(gaps))
    assert found[0] == pytest.approx(1.2, rel=0.1)
    assert found[1] == pytest.approx(5.0, rel=0.15)
    assert found[2] == pytest.approx(15.0, rel=0.15)


def test_noon_is_busier_than_midnight_by_the_swing() -> None:
    day = replace(FLAT, day_swing=0.5, day_s=2_000.0, rate=20.0)
    moments = [request.at_s for request in day.requests()]
    noon = sum(900.0 <= at_s < 1_100.0 for at_s in moments)
    midnight = sum(at_s < 100.0 or at_s >= 1_900.0 for at_s in moments)
    assert noon / midnight == pytest.approx(3.0, rel=0.35)


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"rate": 0.0}, "rate"),
        ({"clients": 5}, "clients"),
        ({"day_swing": 1.0}, "day_swing"),
        ({"span_s": -1.0}, "span_s"),
    ],
)
def test_a_load_that_cannot_be_drawn_is_refused_by_the_field(changes: dict[str, float], param: str) -> None:
    with pytest.raises(ConfigError) as refused:
        replace(FLAT, **changes)
    assert refused.value.param == param
