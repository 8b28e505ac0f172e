"""`benchmarks.strategies`: the bound against steps played one by one, figures by hand, verdicts, a whole small run."""

from __future__ import annotations

import dataclasses
import json
import random
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.common.arms import BenchmarkError
from benchmarks.common.traces import AZURE_FILE
from benchmarks.strategies.bound import StepTimes, continuous_steps, predict, running_by_step
from benchmarks.strategies.engine import engine_process, settings_of
from benchmarks.strategies.figures import Figures, batches_of, figures_of, medians, slots_of
from benchmarks.strategies.main import main
from benchmarks.strategies.measure import order_of, whole
from benchmarks.strategies.orders import Ended, Ran, Row
from benchmarks.strategies.plot import plot
from benchmarks.strategies.report import REPORTED
from benchmarks.strategies.strategy import (
    CONTINUOUS,
    GATED,
    SORTED_ORACLE,
    SORTED_PROMPT,
    STATIC,
    UNKNOWN,
    complexity,
    strategies,
)
from benchmarks.strategies.workload import Ask, azure_lengths, clipped, drawn, prompt_ids

SVG = "{http://www.w3.org/2000/svg}"
TIMES = StepTimes({1: 0.002, 8: 0.003, 32: 0.006}, 0.0001)
FIGURES = Figures(1000.0, 20.0, 100.0, 80.0, 150.0, 180.0, 0.5, 30.0, 0.5, 1.0, 5.0, 0.0)
outputs = st.lists(st.integers(1, 30), min_size=1, max_size=40)


def played(lengths: list[int], slots: int, *, refill: bool) -> list[int]:
    """Sequences of each step, step by step; `refill`: a free slot takes the next request at once."""
    waiting = list(lengths)
    counts = []
    running: list[int] = []
    while waiting or running:
        if refill or not running:
            while waiting and len(running) < slots:
                running.append(waiting.pop(0))
        counts.append(len(running))
        running = [left - 1 for left in running if left > 1]
    return counts


# The bound.


@given(outputs, st.integers(1, 9))
def test_continuous_steps_are_those_of_a_scheduler_played_step_by_step(lengths: list[int], slots: int) -> None:
    assert continuous_steps(lengths, slots) == played(lengths, slots, refill=True)


@given(outputs, st.integers(1, 9))
def test_what_is_predicted_is_the_sum_of_steps_played_one_by_one(lengths: list[int], slots: int) -> None:
    found = predict([(3, output) for output in lengths], slots, TIMES)
    prompts_s = 3 * len(lengths) * TIMES.prompt_token_s
    static, continuous = (played(lengths, slots, refill=refill) for refill in (False, True))
    assert found.static_s == pytest.approx(prompts_s + sum(map(TIMES.step, static)))
    assert found.continuous_s == pytest.approx(prompts_s + sum(map(TIMES.step, continuous)))
    assert (found.static_steps, found.continuous_steps) == (len(static), len(continuous))
    assert found.padded_s >= found.static_s - 1e-9


def test_a_step_that_always_takes_the_same_makes_padding_free() -> None:
    found = predict([(1, output) for output in (10, 1, 1, 1)], 2, StepTimes({1: 0.01, 2: 0.01}, 0.0))
    assert found.bound == pytest.approx(found.bound_padded) == pytest.approx(found.bound_flat)
    assert found.bound == pytest.approx(11 / 10)


def test_rows_that_end_leave_a_batch_step_by_step() -> None:
    assert running_by_step([3, 1, 2]) == [3, 2, 1]


def test_step_times_between_sizes_are_on_a_line_and_beyond_them_on_the_fit() -> None:
    times = StepTimes({1: 0.003, 2: 0.005, 4: 0.009}, 0.0)
    assert times.fit() == (pytest.approx(0.001), pytest.approx(0.002))
    assert times.step(3) == pytest.approx(0.007)
    assert times.step(10) == pytest.approx(0.021)
    assert StepTimes({8: 0.004}, 0.0).fit() == (0.004, 0.0)


def test_no_requests_have_no_bound() -> None:
    with pytest.raises(ValueError, match="no requests"):
        predict([], 4, TIMES)


# Figures of a run.


def row(number: int, started_s: float, ended_s: float, output: int = 10, outcome: Ended = Ended.DONE) -> Row:
    return Row(number, 4, output, 0.0, started_s, started_s + 0.01, ended_s, outcome)


TWO_BATCHES = [row(0, 0.0, 1.0, 10), row(1, 0.0, 0.5, 5), row(2, 1.0, 2.0, 10), row(3, 1.0, 2.0, 10)]


def test_a_batch_begins_where_all_before_it_has_ended() -> None:
    found = batches_of(random.Random(1).sample(TWO_BATCHES, 4))
    assert [sorted(one.number for one in batch) for batch in found] == [[0, 1], [2, 3]]


def test_figures_of_two_batches_by_hand() -> None:
    found = figures_of(Ran(TWO_BATCHES, 2.0, 20, 0.1), 2, in_batches=True)
    assert (found.tokens_per_s, found.requests_per_s) == (17.5, 2.0)
    assert found.latency_mean_ms == pytest.approx(1375.0)
    assert found.padding_ratio == pytest.approx((0.25 + 0.0) / 2)
    assert found.batch_mean == 2.0
    assert found.slot_use == pytest.approx(35 / 40)
    assert found.success_share == 1.0


def test_without_batches_the_size_is_that_of_a_step_and_nothing_is_padded() -> None:
    found = figures_of(Ran(TWO_BATCHES, 2.0, 20, 0.1), 2, in_batches=False)
    assert (found.padding_ratio, found.batch_mean) == (0.0, 35 / 20)


def test_refused_and_late_requests_are_failures_and_no_latencies() -> None:
    lost = [row(4, -1.0, -1.0, outcome=Ended.REFUSED), row(5, 2.0, 9.0, outcome=Ended.LATE)]
    found = figures_of(Ran([*TWO_BATCHES, *lost], 2.0, 20, 0.1), 2, in_batches=False)
    assert found.success_share == pytest.approx(4 / 6)
    assert found.latency_p99_ms <= 2000.0
    with pytest.raises(ValueError, match="no request was answered"):
        figures_of(Ran(lost, 2.0, 20, 0.1), 2, in_batches=True)
    with pytest.raises(BenchmarkError, match="2 of 6"):
        whole(Ran([*TWO_BATCHES, *lost], 2.0, 20, 0.1))


def test_medians_are_taken_figure_by_figure() -> None:
    rounds = [dataclasses.replace(FIGURES, tokens_per_s=speed, slot_use=1 / speed) for speed in (1.0, 4.0, 2.0)]
    assert (medians(rounds).tokens_per_s, medians(rounds).slot_use) == (2.0, 0.5)


@given(st.lists(st.tuples(st.floats(0.0, 9.0), st.floats(0.01, 5.0)), min_size=1, max_size=30))
def test_no_two_requests_share_a_slot_at_one_time(spans: list[tuple[float, float]]) -> None:
    rows = [Row(number, 1, 1, 0.0, at, at, at + span, Ended.DONE) for number, (at, span) in enumerate(spans)]
    by_slot: dict[int, list[Row]] = {}
    for slot, row in slots_of(rows):
        assert all(other.ended_s <= row.first_s for other in by_slot.get(slot, []))
        by_slot.setdefault(slot, []).append(row)
    assert sum(map(len, by_slot.values())) == len(rows)


# Requests and strategies.


def test_lengths_are_at_least_one_and_fit_the_model() -> None:
    assert clipped(0, 0) == (1, 1)
    assert clipped(90, 50, 100) == (90, 10)
    assert clipped(500, 50, 100) == (99, 1)


def test_a_seed_gives_the_same_requests_and_another_one_others() -> None:
    lengths = [(number, number + 1) for number in range(1, 50)]
    assert drawn(lengths, 20, 1) == drawn(lengths, 20, 1) != drawn(lengths, 20, 2)
    ask = Ask(1, 0.0, 40, 5)
    other = Ask(2, 0.0, 40, 5)
    assert prompt_ids(ask, 1) == prompt_ids(ask, 1) != prompt_ids(other, 1)
    assert prompt_ids(ask, 1) != prompt_ids(ask, 2)


def test_no_strategy_runs_more_requests_than_there_are_slots() -> None:
    for strategy in strategies(32).values():
        assert strategy.policy is None or strategy.policy.max_size <= 32
    assert strategies(32)[CONTINUOUS].policy is None
    assert strategies(32, 256)[STATIC].policy == dataclasses.replace(strategies(32)[STATIC].policy, max_queued=256)  # type: ignore[type-var]


def test_sorted_by_prompt_does_not_see_the_output_and_the_oracle_does() -> None:
    ask = Ask(1, 0.0, 70, 50)
    found = strategies(32)
    assert found[SORTED_PROMPT].lengths(ask) == (70, UNKNOWN)
    assert found[SORTED_ORACLE].lengths(ask) == (UNKNOWN, 50)
    assert found["dynamic-32"].lengths(ask) == (70, 50)


def test_named_strategies_come_with_the_two_of_the_headline() -> None:
    found = strategies(32)
    assert set(order_of(found, ["predictive"])) == {"predictive", STATIC, CONTINUOUS}
    assert set(order_of(found, [])) == set(found) >= {GATED}
    with pytest.raises(BenchmarkError, match="no strategy is called best"):
        order_of(found, ["best"])


def test_every_strategy_says_what_forming_its_batches_costs() -> None:
    found = {name: complexity(one.policy) for name, one in strategies(32).items()}
    assert found[CONTINUOUS] == found[GATED] == "O(1), none"
    assert found[SORTED_PROMPT] == "O(log n), O(n + b)"
    assert found["length-aware"] == "O(b), O(b)"
    assert found[STATIC] == found["predictive"] == "O(1), O(b)"


# The whole.


def trace_in(folder: Path) -> Path:
    draw = random.Random(1)
    rows = [
        f"2023-11-16 18:15:46.6805900,{draw.randrange(100, 900)},{draw.randrange(20, 200)}" for _ in range(40)
    ]  # fmt: skip
    (folder / AZURE_FILE).write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    return folder


def test_lengths_of_the_trace_are_over_the_divisors(tmp_path: Path) -> None:
    (tmp_path / AZURE_FILE).write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:46.6805900,8,2\n"
    )
    assert azure_lengths(tmp_path) == [(23, 11), (1, 1)]


def test_without_the_trace_it_says_where_it_looked_and_where_the_trace_is_published(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--quick", "--data", str(tmp_path)]) == 1
    reported = " ".join(capsys.readouterr().err.split())
    assert f"skipped: {AZURE_FILE} is not in {tmp_path} (--data names another folder): it is Azure" in reported


def test_the_plot_has_a_bar_for_each_request_and_says_how_much_is_used(tmp_path: Path) -> None:
    file = tmp_path / "slots.svg"
    plot({STATIC: (TWO_BATCHES, 0.55), CONTINUOUS: (TWO_BATCHES, 0.9)}, 2, file)
    text = " ".join(ET.parse(file).getroot().itertext())
    assert "55% of the slots used" in text
    assert "90% of the slots used" in text
    with pytest.raises(ValueError, match="nothing to draw"):
        plot({STATIC: ([], 0.0)}, 2, file)


def test_an_engine_that_does_not_start_is_an_error_with_its_last_words() -> None:
    settings = settings_of("simulated", 4, simulated={"kv_cache_tokens": 16})
    with pytest.raises(BenchmarkError, match="kv_cache_tokens"), engine_process(settings):
        pass


@pytest.mark.long
def test_a_small_run_on_the_simulated_engine_gives_every_figure(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--requests", "64", "--rounds", "1", "--seconds", "0.3"]
    arguments = ["--engine", "simulated", "--data", str(trace_in(tmp_path)), *sizes, "--strategies", "predictive"]
    assert main([*arguments, "--plot", str(tmp_path / "slots.svg")]) == 0
    result = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert set(result["strategies"]) == {STATIC, CONTINUOUS, "predictive"}
    assert all(set(one) == set(REPORTED) for one in result["strategies"].values())
    named = ("continuous_over_static_tokens_per_s", "bound", "bound_padded", "latency_mean_ratio", "success_share")
    assert all(result[key] > 0.0 for key in named)
    assert result["bound_flat"] > 1.0
    assert result["strategies"][CONTINUOUS]["slot_use"] > result["strategies"][STATIC]["slot_use"]
    assert result["batch_sizes"][STATIC] == [32, 32]
    assert result["batch_sizes"]["predictive"][:6] == [16, 16, 16, 16]
    assert (tmp_path / "slots.svg").is_file()
