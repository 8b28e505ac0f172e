"""When an engine counts as frozen."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from serve_app.engine.stall_detector import StallDetector


def test_an_engine_that_answers_is_alive_however_long_it_did_nothing() -> None:
    detector = StallDetector(30.0)
    assert [detector.observe(True, (0, 0.0), now) for now in (0.0, 100.0, 1000.0)] == [None, None, None]


def test_a_busy_engine_that_does_not_answer_is_alive_while_it_uses_cpu() -> None:
    detector = StallDetector(30.0)
    assert [detector.observe(False, (0, float(now)), float(now)) for now in range(0, 300, 10)] == [None] * 30


def test_silence_without_cpu_time_for_the_bound_is_frozen() -> None:
    detector = StallDetector(30.0)
    seen = [detector.observe(False, (5, 1.5), now) for now in (0.0, 10.0, 29.9, 30.0, 45.0)]
    assert seen == [None, None, None, 30.0, 45.0]


def test_a_mark_of_life_starts_the_count_anew() -> None:
    detector = StallDetector(30.0)
    for now, marks in ((0.0, (1, 1.0)), (29.0, (1, 1.0)), (30.0, (2, 1.0)), (59.0, (2, 1.0))):
        assert detector.observe(False, marks, now) is None
    assert detector.observe(False, (2, 1.0), 60.0) == 30.0


def test_silence_counts_from_the_last_answer_and_not_from_when_it_was_noticed() -> None:
    detector = StallDetector(8.0)
    assert detector.observe(True, (1, 1.0), 0.0) is None
    seen = [detector.observe(False, (9, 4.0), now) for now in (1.0, 7.9, 8.0)]
    assert seen == [None, None, 8.0]


def test_an_answer_that_waits_to_be_read_after_a_pause_of_the_observer_is_no_silence() -> None:
    detector = StallDetector(8.0)
    assert [detector.observe(answered, (1,), now) for answered, now in ((True, 0.0), (False, 60.0), (True, 60.5))] == [
        None, None, None,
    ]  # fmt: skip


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 2), st.floats(0.1, 20.0)), min_size=1, max_size=40))
def test_frozen_means_exactly_the_bound_without_any_mark(observations: list[tuple[bool, int, float]]) -> None:
    detector = StallDetector(30.0)
    now = 0.0
    alive_at = None
    last = None
    for answered, steps, gap_s in observations:
        now += gap_s
        if answered or alive_at is None or last not in (None, steps):
            alive_at = now
        silent_s = now - alive_at
        expected = silent_s if silent_s >= 30.0 and last is not None else None
        last = None if answered else steps
        assert detector.observe(answered, (steps,), now) == expected
