"""The load of class `high` and the figures of its windows, on windows made by hand."""

from __future__ import annotations

import pytest

from benchmarks.preemption.high_load import Answered, poisson
from benchmarks.preemption.windows import MIN_P99, Counters, Window, first_tokens, p99, parts_of

EDGES = Counters(0.0, 50.0, 7.0), Counters(10.0, 150.0, 407.0)


def test_requests_come_at_the_asked_rate() -> None:
    planned = poisson(1, 20.0, 500.0)
    assert planned == poisson(1, 20.0, 500.0)
    assert len(planned) == pytest.approx(10_000, rel=0.05)
    assert all(one.at_s < 500.0 for one in planned)


def test_a_p99_needs_enough_requests() -> None:
    assert p99([1.0] * (MIN_P99 - 1)) is None
    assert p99([1.0] * MIN_P99) == 1.0


def test_a_window_has_the_measured_step_and_the_sequences_of_one() -> None:
    window = Window([], *EDGES)
    assert window.step_s == 0.1
    assert window.after.sequences_since(window.before) == 4.0


def test_the_time_to_the_first_token_is_reported_by_its_parts_and_without_failed_requests() -> None:
    answers = [Answered(0.0, first_s=0.5, ended_s=1.0, queue_s=0.1, engine_s=0.25)] * MIN_P99
    windows = [Window([*answers, Answered(0.0, 9.0, 9.0, "503")], *EDGES)]
    assert first_tokens(windows) == [0.5] * MIN_P99
    found = parts_of(windows)
    assert {part: found[part]["p99_s"] for part in ("queue", "engine", "outside")} == {
        "queue": 0.1,
        "engine": 0.25,
        "outside": 0.15,
    }
    assert parts_of([]) == {}


def test_the_engines_counters_are_summed_over_its_replicas() -> None:
    lines = []
    for replica, value in (("a", 3.0), ("b", 4.0)):
        for figure in ("steps", "sequence_steps", "running"):
            lines.append(f'serve_app_engine_{figure}_total{{model="tiny",replica="{replica}"}} {value}')
    assert Counters.of("\n".join(lines) + "\n", 5.0) == Counters(5.0, 7.0, 7.0)
