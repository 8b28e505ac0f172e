"""`benchmarks.strategies`: the bound against steps played one by one, figures by hand, verdicts, a whole small run."""

from __future__ import annotations

import dataclasses
import json
import random
import xml.etree.ElementTree as ET
from pathlib import Path

import pynvml
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.common.arms import BenchmarkError
from benchmarks.common.gpu_use import GpuUse
from benchmarks.common.traces import AZURE_FILE
from benchmarks.strategies import embeddings
from benchmarks.strategies.bound import StepTimes, continuous_steps, predict, running_by_step
from benchmarks.strategies.by_length import (
    AWARE,
    BLOCKS,
    LONG,
    ONE_AT_A_TIME,
    SHORT,
    candidates,
    length_verdicts,
    prompts_of,
)
from benchmarks.strategies.claims import shortest_p99, verdicts, which_when
from benchmarks.strategies.embeddings import embedding_figures, faster_than_own
from benchmarks.strategies.engine import engine_process, settings_of
from benchmarks.strategies.figures import Figures, batches_of, cost_per_million, figures_of, medians, slots_of
from benchmarks.strategies.load import BURSTS, RAMP, STEADY, VARIABLE, arrivals, asks_at
from benchmarks.strategies.main import main, options_of
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
from benchmarks.strategies.sweep import SWEEP_SLOTS, queued, sweep_verdicts, swept
from benchmarks.strategies.workload import Ask, azure_lengths, clipped, drawn, levelled, prompt_ids
from serve_app.core.batching import Batcher, BatchItem

SVG = "{http://www.w3.org/2000/svg}"
TIMES = StepTimes({1: 0.002, 8: 0.003, 32: 0.006}, 0.0001)
FIGURES = Figures(1000.0, 20.0, 100.0, 80.0, 150.0, 180.0, 0.5, 30.0, 0.5, 1.0, 10.0, 5.0, 0.0)
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
    assert found.write_up_ms == pytest.approx(500.0)
    assert found.success_share == 1.0


def test_without_batches_the_size_is_that_of_a_step_and_nothing_is_padded() -> None:
    found = figures_of(Ran(TWO_BATCHES, 2.0, 20, 0.1), 2, in_batches=False)
    assert (found.padding_ratio, found.batch_mean, found.write_up_ms) == (0.0, 35 / 20, 500.0)


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


def test_a_million_tokens_cost_the_hours_that_they_take() -> None:
    assert cost_per_million(1e6 / 3600, 2.0) == pytest.approx(2.0)


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


def test_levelled_lengths_are_all_the_mean() -> None:
    assert levelled([(1, 10), (3, 30)]) == [(2, 20), (2, 20)]


@pytest.mark.parametrize(("pattern", "mean"), [(STEADY, 0.7), (BURSTS, 0.7), (RAMP, 1.5 * 0.55)])
def test_a_pattern_has_its_mean_rate(pattern: str, mean: float) -> None:
    moments = arrivals(pattern, 100.0, 100.0, 1)
    assert len(moments) / 100.0 == pytest.approx(100.0 * mean, rel=0.05)
    assert moments == sorted(moments)


def test_bursts_come_at_their_rate_and_a_ramp_rises() -> None:
    within = [at for at in arrivals(BURSTS, 100.0, 100.0, 1) if at % 5.0 < 1.0]
    assert len(within) / 20.0 == pytest.approx(210.0, rel=0.1)
    ramp = arrivals(RAMP, 100.0, 100.0, 1)
    assert sum(at < 20.0 for at in ramp) < sum(at > 80.0 for at in ramp) / 3


def test_uniform_requests_have_one_length_and_variable_ones_the_drawn_ones() -> None:
    lengths = [(1, 1), (99, 9)]
    assert {(ask.prompt, ask.output) for ask in asks_at([0.1, 0.2, 0.3, 0.4, 0.5], lengths, 1)} == set(lengths)
    assert len({(ask.prompt, ask.output) for ask in asks_at([0.1, 0.2, 0.3], lengths, 1, uniform=True)}) == 1


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


def test_the_sweep_has_the_fields_sizes_and_ours_of_the_settings() -> None:
    found = {one.name: one.policy for one in swept()}
    sizes = [policy.max_size for policy in found.values() if policy is not None and not policy.is_continuous]
    assert sizes == [8, 16, 32, 64, 8, 32, 64]
    ours = [policy.max_size for policy in found.values() if policy is not None and policy.is_continuous]
    assert ours == [8, 32, SWEEP_SLOTS]
    assert {policy.max_queued for policy in found.values() if policy is not None} == {256}


# Claims.


def waiting(p50_ms: float, p99_ms: float, success: float = 1.0, tokens_per_s: float = 1000.0) -> Figures:
    return dataclasses.replace(
        FIGURES, latency_p50_ms=p50_ms, latency_p99_ms=p99_ms, success_share=success, tokens_per_s=tokens_per_s
    )


def words(by_name: dict[str, Figures], pattern: str) -> dict[str, str]:
    offline = {STATIC: waiting(1, 2), CONTINUOUS: waiting(1, 2, tokens_per_s=2000.0)}
    return {one.claim: one.word for one in verdicts({VARIABLE: offline}, {(pattern, VARIABLE): by_name})}


def test_claims_are_confirmed_where_the_figures_say_so() -> None:
    by_name = {STATIC: waiting(100, 400), "predictive": waiting(50, 100), CONTINUOUS: waiting(60, 140)}
    assert words(by_name, STEADY) == {
        "static for high concurrency": "refuted",
        "predictive for steady load": "confirmed",
        "static jitters": "confirmed",
    }
    found = words({"dynamic-32": waiting(50, 100), CONTINUOUS: waiting(50, 130)}, BURSTS)
    assert found["dynamic for fluctuating load"] == "confirmed"


def test_a_difference_within_noise_decides_no_claim() -> None:
    for p99_ms in (90, 110):
        found = words({"dynamic-32": waiting(50, 100), CONTINUOUS: waiting(50, p99_ms)}, BURSTS)
        assert found["dynamic for fluctuating load"] == "undecided, within noise"


def test_claims_are_refuted_where_another_strategy_is_better() -> None:
    by_name = {STATIC: waiting(100, 150), "predictive": waiting(50, 200), CONTINUOUS: waiting(60, 120)}
    found = words(by_name, STEADY)
    assert (found["predictive for steady load"], found["static jitters"]) == ("refuted", "refuted")
    found = words({"dynamic-32": waiting(50, 300), CONTINUOUS: waiting(50, 99)}, RAMP)
    assert found["dynamic for fluctuating load"] == "refuted"


def test_a_short_p99_of_few_answers_is_no_best() -> None:
    by_name = {"dynamic-32": waiting(5, 10, success=0.5), CONTINUOUS: waiting(50, 99)}
    assert shortest_p99(by_name) == CONTINUOUS
    assert words(by_name, BURSTS)["dynamic for fluctuating load"] == "refuted"
    table = which_when({VARIABLE: {STATIC: FIGURES, CONTINUOUS: FIGURES}}, {(BURSTS, VARIABLE): by_name})
    assert [cells[0] for cells in table] == [
        "all at once, variable lengths, by tokens/s",
        "bursts, variable lengths, by p99",
    ]
    assert table[1][1:] == ("continuous (99 ms)", "dynamic-32 (10 ms)")


# The field's further claims.


def at_speed(tokens_per_s: float) -> Figures:
    return dataclasses.replace(FIGURES, tokens_per_s=tokens_per_s, requests_per_s=tokens_per_s / 10)


def test_prompts_of_each_kind_make_the_rule_take_both_of_its_sizes() -> None:
    lengths = [(prompt, 5) for prompt in (10, 60, 200, 90)] * 64
    policy = candidates()[0].policy
    assert policy is not None
    taken = {}
    for kind in (SHORT, LONG, BLOCKS):
        batcher = Batcher(policy)
        found = [
            batch
            for number, (prompt, output) in enumerate(prompts_of(kind, lengths))
            for batch in batcher.on_arrive(BatchItem(str(number), prompt, output), 0.0)
        ]
        found += batcher.close(0.0)
        for batch in found:  # it grows
            for item in batch.items:
                found += batcher.on_end(item.item_id, 1.0)
        taken[kind] = {len(batch.items) for batch in found}
    assert (taken[SHORT], taken[LONG]) == ({64}, {16})
    assert taken[BLOCKS] >= {64, 16}


def test_the_rule_by_length_is_judged_against_the_best_static_size_and_batching_against_none() -> None:
    names = {
        AWARE: 120.0,
        "static-64": 100.0,
        "static-32": 90.0,
        "static-16": 80.0,
        CONTINUOUS: 150.0,
        ONE_AT_A_TIME: 30.0,
    }
    better = {name: at_speed(speed) for name, speed in names.items()}
    slower = better | {AWARE: at_speed(85.0), ONE_AT_A_TIME: at_speed(100.0)}
    found = [(one.claim, one.word) for one in length_verdicts({SHORT: better, LONG: slower})]
    assert found == [
        (AWARE, "confirmed"),
        ("batching gives 3 to 10 times", "confirmed"),
        (AWARE, "refuted"),
        ("batching gives 3 to 10 times", "refuted"),
    ]


def test_the_fields_batch_and_queue_are_judged_in_overload() -> None:
    names = [one.name for one in (*swept(), *queued())]
    by_name = {name: {0.7: at_speed(1.0), 1.5: at_speed(100.0)} for name in names}
    by_name["batch 64 / 30 ms"] = {0.7: at_speed(1.0), 1.5: at_speed(130.0)}
    batch, queue = sweep_verdicts(by_name)
    assert (batch.word, batch.where) == ("refuted", "150% of capacity")
    assert queue.word == "undecided, within noise"
    assert [one.policy.max_queued for one in queued() if one.policy is not None] == [64, 128, 512, 1024]


def test_every_strategy_says_what_forming_its_batches_costs() -> None:
    found = {name: complexity(one.policy) for name, one in strategies(32).items()}
    assert found[CONTINUOUS] == found[GATED] == "O(1), none"
    assert found[SORTED_PROMPT] == "O(log n), O(n + b)"
    assert found["length-aware"] == "O(b), O(b)"
    assert found[STATIC] == found["predictive"] == "O(1), O(b)"


def test_without_a_gpu_its_use_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", absent)
    with GpuUse() as gpu:
        pass
    assert gpu.share is None


# Embeddings.


def test_embeddings_are_counted_after_the_warm_part_of_their_window() -> None:
    rows = [Row(number, 10, 1, at - 0.1, at, at, at, Ended.DONE) for number, at in enumerate((0.1, 1.0, 1.5, 2.5))]
    found = embedding_figures(Ran(rows, 2.5, 4, 0.004), 2.0)
    assert (found.requests_per_s, found.tokens_per_s) == (pytest.approx(2 / 1.6), pytest.approx(20 / 1.6))
    assert found.latency_p50_ms == pytest.approx(100.0)
    assert found.cpu_us == pytest.approx(1000.0)
    faster = dataclasses.replace(found, tokens_per_s=2 * found.tokens_per_s)
    cases = {(VARIABLE, 8): {embeddings.OWN: found, embeddings.SORTED: faster, embeddings.DYNAMIC: found}}
    assert faster_than_own(cases) == {embeddings.SORTED: 1, embeddings.DYNAMIC: 0}


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


def test_beside_more_than_the_headline_it_compares_two_strategies_by_as_many_requests() -> None:
    assert options_of(["--load"]).brief
    assert options_of(["--load"]).requests == options_of([]).requests
    assert not options_of(["--load", "--strategies", "predictive"]).brief


@pytest.mark.long
def test_a_small_run_on_the_simulated_engine_gives_every_figure(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--requests", "64", "--rounds", "1", "--seconds", "0.3"]
    arguments = ["--engine", "simulated", "--data", str(trace_in(tmp_path)), *sizes, "--strategies", "predictive"]
    assert main([*arguments, "--plot", str(tmp_path / "slots.svg")]) == 0
    output = capfd.readouterr()
    result = json.loads(output.out.splitlines()[-1])
    assert set(result["strategies"]) == {STATIC, CONTINUOUS, "predictive"}
    assert all(set(one) == set(REPORTED) for one in result["strategies"].values())
    named = ("continuous_over_static_tokens_per_s", "bound", "bound_padded", "latency_mean_ratio", "success_share")
    assert all(result[key] > 0.0 for key in named)
    assert result["bound_flat"] > 1.0
    assert result["strategies"][CONTINUOUS]["slot_use"] > result["strategies"][STATIC]["slot_use"]
    assert result["batch_sizes"][STATIC] == [32, 32]
    assert result["batch_sizes"]["predictive"][:6] == [16, 16, 16, 16]
    assert result["gpu_use"].keys() == result["strategies"].keys()
    assert "the best configuration: by cost" in output.err
    assert (tmp_path / "slots.svg").is_file()
