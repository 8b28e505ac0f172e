"""How much the tests of a run try."""

from __future__ import annotations

from collections.abc import Iterator

import hypothesis
import pytest

from tests.effort import FEWEST, FULL, PART, QUICK, effort, examples, profile_of


@pytest.fixture(params=[QUICK, FULL])
def profile(request: pytest.FixtureRequest) -> Iterator[str]:
    before = hypothesis.settings.get_current_profile_name()
    hypothesis.settings.load_profile(request.param)
    yield request.param
    hypothesis.settings.load_profile(before)


@pytest.mark.parametrize(
    ("marks", "expected"), [("not long", QUICK), ("not long and not slow", QUICK), ("", FULL), ("long", FULL)]
)
def test_runs_without_the_long_tests_are_quick(marks: str, expected: str) -> None:
    assert profile_of(marks) == expected


def test_this_run_has_the_profile_of_its_marks(request: pytest.FixtureRequest) -> None:
    assert hypothesis.settings.get_current_profile_name() == profile_of(request.config.getoption("markexpr"))


def test_a_quick_run_tries_a_part_and_a_full_one_everything(profile: str) -> None:
    is_quick = profile == QUICK
    assert hypothesis.settings.default.max_examples == (100 // PART if is_quick else 100)
    assert effort(3, 1000) == (3 if is_quick else 1000)
    assert [examples(full) for full in (5, 20, 400)] == ([5, FEWEST, 400 // PART] if is_quick else [5, 20, 400])
