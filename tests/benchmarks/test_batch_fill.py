"""The interactive load and the figures of `benchmarks.batch_fill`, on windows made by hand."""

from __future__ import annotations

import json

import pytest

from benchmarks.batch_fill.figures import MIN_P99, Counters, Window, fill_share, first_tokens, p99, result
from benchmarks.batch_fill.load import HIGH, Answered, poisson
from benchmarks.batch_fill.main import SHAPES, configuration, options_of
from serve_app.settings import parse

SLOTS = 10


def window(sequences: float, latency_s: float = 1.0, steps: float = 100.0, failure: str = "") -> Window:
    """Of 10 s, with so many sequences a step, and 400 answers."""
    answers = [Answered(0.0, HIGH, latency_s / 2, latency_s, failure) for _ in range(400)]
    return Window(answers, Counters(0.0, 50.0, 7.0), Counters(10.0, 50.0 + steps, 7.0 + sequences * steps))


def test_requests_come_at_the_asked_rate_and_a_part_is_high() -> None:
    planned = poisson(1, 20.0, 500.0, 0.2)
    assert planned == poisson(1, 20.0, 500.0, 0.2)
    assert len(planned) == pytest.approx(10_000, rel=0.05)
    assert sum(one.level == HIGH for one in planned) / len(planned) == pytest.approx(0.2, abs=0.02)
    assert all(one.at_s < 500.0 for one in planned)


def test_rows_that_take_every_slot_people_leave_fill_all_of_it() -> None:
    assert fill_share(window(4.0), window(10.0), SLOTS) == pytest.approx(1.0)


def test_rows_that_take_half_of_what_is_idle_fill_half() -> None:
    assert fill_share(window(4.0), window(7.0), SLOTS) == pytest.approx(0.5)


def test_nothing_idle_is_no_share() -> None:
    assert fill_share(window(10.0), window(10.0), SLOTS) == 0.0


def test_a_p99_needs_enough_requests() -> None:
    assert p99([1.0] * (MIN_P99 - 1)) is None
    assert p99([1.0] * MIN_P99) == 1.0


def test_the_result_has_ratio_fill_and_the_measured_step() -> None:
    found = result([window(4.0), window(4.0)], [window(9.4, 1.05), window(10.0, 1.05)], SLOTS)
    assert found["interactive_p99_ratio"] == 1.05
    assert found["idle_fill_share"] == pytest.approx(0.95)
    assert found["fill_by_round"] == [0.9, 1.0]
    assert found["full_step_s"] == 0.1
    assert found["first_token_added_steps"] == 0.25  # 25 ms of steps of 100 ms
    assert found["first_token"]["beside"][HIGH]["p50_s"] == 0.525
    assert found["failed"] == 0
    json.dumps(found, allow_nan=False)


def test_the_time_to_the_first_token_is_reported_by_its_parts() -> None:
    answers = [Answered(0.0, HIGH, first_s=0.5, ended_s=1.0, queue_s=0.1, engine_s=0.25)] * MIN_P99
    counters = window(4.0)
    found = first_tokens([Window(answers, counters.before, counters.after)])[HIGH]
    assert {part: found[part]["p99_s"] for part in ("queue", "engine", "outside")} == {
        "queue": 0.1,
        "engine": 0.25,
        "outside": 0.15,
    }


def test_a_failed_request_is_counted_and_gives_no_latency() -> None:
    whole = window(10.0)
    broken = window(10.0, 9.0, failure="503")
    mixed = Window([*whole.answers, broken.answers[0]], whole.before, whole.after)
    found = result([window(4.0)], [mixed], SLOTS)
    assert found["failed"] == 1
    assert found["interactive_p99_ratio"] == 1.0


def test_the_engines_counters_are_summed_over_its_replicas() -> None:
    lines = []
    for replica, value in (("a", 3.0), ("b", 4.0)):
        for figure in ("steps", "sequence_steps", "running"):
            lines.append(f'serve_app_engine_{figure}_total{{model="tiny",replica="{replica}"}} {value}')
    assert Counters.of("\n".join(lines) + "\n", 5.0) == Counters(5.0, 7.0, 7.0)


@pytest.mark.parametrize("engine", sorted(SHAPES))
def test_what_is_measured_is_a_configuration(engine: str) -> None:
    settings = parse(configuration(engine, SHAPES[engine], 0.25))
    (model,) = settings.models
    assert settings.admission.guard_slots_share == 0.25
    assert (model.engine, model.max_num_seqs) == (engine, SHAPES[engine].slots)


def test_quick_means_shorter_windows() -> None:
    assert options_of(["--quick"]).quick
    assert not options_of([]).quick
