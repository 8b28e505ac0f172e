"""How much a test tries that draws its cases or plays a world through: all of it in `make test-long`, a part of it in
`make test` and `make check`, whose `-m` leaves the long tests out.

A rule that is broken for one case is broken for many, so the quick runs try a quarter as often; each of them draws
other cases than the run before, except in CI, where hypothesis draws the same ones each time.
"""

from __future__ import annotations

from typing import TypeVar

import hypothesis
import pytest

FULL = "full"
QUICK = "quick"
PART = 4  # of the examples of a full run, a quick one tries one in so many,
FEWEST = 10  # and not fewer than this: below, hypothesis hardly leaves the simplest cases

T = TypeVar("T")


def pytest_configure(config: pytest.Config) -> None:
    """Load the profile of this run; tests are imported after it."""
    # How long an example takes says how busy the machine is: nothing is measured in a unit test.
    hypothesis.settings.register_profile(FULL, deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
    full = hypothesis.settings.get_profile(FULL)
    hypothesis.settings.register_profile(QUICK, full, max_examples=full.max_examples // PART)
    hypothesis.settings.load_profile(profile_of(config.getoption("markexpr", "")))


def profile_of(marks: str) -> str:
    """The profile of a run with this `-m`."""
    return QUICK if "not long" in marks else FULL


def effort(quick: T, full: T) -> T:
    """A number of steps, requests or seeds, or what else says how large a test is; the caller says why `quick` is
    enough to break what it tests."""
    return quick if hypothesis.settings.get_current_profile_name() == QUICK else full


def examples(full: int) -> int:
    """For `max_examples` where the default is wrong."""
    return effort(min(full, max(full // PART, FEWEST)), full)
