"""The offered load repeats with its seed, and what is made of a window is what its definition says."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import astuple, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from benchmarks.common.arms import OURS, VLLM
from benchmarks.common.stats import lower_quantile
from benchmarks.overload.answers import Decision, Window, brief, quantiles
from benchmarks.overload.offered_load import (
    GROUP_SHARES,
    GROUPS,
    HIGH,
    LOW,
    MEAN_OUTPUT_TOKENS,
    NORMAL,
    TEMPLATE_TOKENS,
    TENANTS,
    Label,
    Offer,
    lengths,
    offers,
    request_bytes,
    scaled,
    text,
)
from benchmarks.overload.plan import (
    ARMS,
    ENOUGH_P99,
    FIFO,
    PEAK,
    Levels,
    parse_arguments,
    plan_of,
)
from benchmarks.overload.plot import TITLES, plot
from benchmarks.overload.report import build, high_ratio, over_peak, print_tables
from benchmarks.overload.stage import HELD, admission_of, keys_of, metrics_of
from serve_app.settings import parse

ROWS = [(1000, 211), (20, 5), (400, 417)]
LEVELS = Levels(ttft_s=0.1, itl_ms=2.0, capacity_rps=10.0)  # high 0.5 s, normal 2 s, low 10 s; a gap of 6 ms


def row(
    number: int,
    group: str = HIGH,
    outcome: str = "finished",
    first_s: float | None = 0.1,
    *,
    at_s: float = 5.0,
    output: int = 100,
    gap_ms: float | None = 2.0,
) -> list[Any]:
    return [number, group, 300, at_s, outcome, "", first_s, 1.0, 200, output, gap_ms, 0.1]


def window(
    rows: list[list[Any]], multiple: float = PEAK, arm: str = "ours", decisions: list[list[Any]] | None = None
) -> Window:
    return Window.of(
        {
            "arm": arm,
            "multiple": multiple,
            "warmup_s": 2.0,
            "window_s": 10.0,
            "levels": list(astuple(LEVELS)),
            "rows": rows,
            "decisions": decisions or [],
            "engine": {"generated_tokens": 1000, "prompt_tokens": 3000, "preemptions": 0},
            "cpu_s_by_role": {"EngineCore": 9.0, "router replica": 1.0, "HAProxy": 0.5},
            "cpu_s": 0.5,
            "foreign_s": 0.1,
            "left": {},
            "rss_mb": {},
            "failed": 0,
            "failed_samples": [],
        }
    )


def test_lengths_are_scaled_by_one_factor_to_the_mean_answer() -> None:
    found = scaled(ROWS, 10_000)
    assert fmean(output for _, output in found) == pytest.approx(MEAN_OUTPUT_TOKENS, abs=1)
    factor = MEAN_OUTPUT_TOKENS / fmean(output for _, output in ROWS)
    assert found[0] == (round(1000 * factor), round(211 * factor))
    assert found[1][0] == TEMPLATE_TOKENS + 1  # a prompt below the template's own tokens cannot be asked


def test_what_exceeds_the_model_is_left_out() -> None:
    assert len(scaled(ROWS, 500)) < len(scaled(ROWS, 10_000)) == len(ROWS)


def test_a_missing_trace_says_so(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="is not in"):
        lengths(tmp_path, 4096)


@given(st.integers(0, 2**32), st.floats(1.0, 50.0))
def test_the_same_seed_offers_the_same_load(seed: int, rate: float) -> None:
    first, second = (offers(scaled(ROWS, 10_000), rate, 5.0, seed) for _ in range(2))
    assert first == second
    assert all(a.at_s <= b.at_s for a, b in pairwise(first))
    assert [offer.number for offer in first] == list(range(len(first)))
    assert all(0.0 < offer.at_s < 5.0 for offer in first)


def test_rate_groups_and_tenants_are_those_asked_for() -> None:
    found = offers(scaled(ROWS, 10_000), 100.0, 200.0, 1)
    assert len(found) / 200 == pytest.approx(100, rel=0.03)
    groups = Counter(offer.group for offer in found)
    tenants = Counter(offer.tenant for offer in found)
    for group, share in zip(GROUPS, GROUP_SHARES, strict=True):
        assert groups[group] / len(found) == pytest.approx(share, abs=0.02)
    assert sorted(tenants) == list(range(TENANTS))
    assert max(tenants.values()) < 1.1 * min(tenants.values())


def test_a_request_carries_what_the_arm_labels_and_no_more() -> None:
    offer = Offer(7, 1.0, HIGH, 0, 50, 20)
    named = request_bytes(offer, Label("k" * 16, "high", 1500), "run-7", "h:1", "m", "words").decode()
    plain = request_bytes(offer, Label("k" * 16), "run-7", "h:1", "m", "words").decode()
    assert "x-deadline-ms: 1500" in named
    assert json.loads(named.partition("\r\n\r\n")[2])["priority"] == "high"
    assert "deadline" not in plain
    assert "priority" not in plain
    for sent in (named, plain):
        head, _, body = sent.partition("\r\n\r\n")
        assert f"content-length: {len(body.encode())}" in head
        assert json.loads(body)["max_tokens"] == 20


def test_a_prompt_has_a_word_for_each_token_beside_the_templates() -> None:
    assert len(text(Offer(0, 0.0, LOW, 0, 61, 1), random.Random(1)).split()) == 61 - TEMPLATE_TOKENS


@pytest.mark.parametrize(
    ("change", "counts"),
    [
        ({}, True),
        ({"first_s": 0.5}, True),
        ({"first_s": 0.51}, False),  # past the level of `high`
        ({"first_s": 0.51, "group": NORMAL}, True),
        ({"gap_ms": 6.1}, False),
        ({"gap_ms": None, "output": 1}, True),  # one token has no gap
        ({"outcome": "refused", "first_s": None}, False),
        ({"outcome": "abandoned", "first_s": None}, False),
        ({"outcome": "failed"}, False),
    ],
)
def test_goodput_counts_what_finished_within_both_levels(change: dict[str, Any], counts: bool) -> None:
    found = window([row(1, **change)])
    assert found.goodput == (change.get("output", 100) / 10.0 if counts else 0.0)
    assert found.attainment()["all"] == float(counts)


def test_only_what_was_due_in_the_window_is_measured() -> None:
    found = window([row(n, at_s=at) for n, at in enumerate((1.9, 2.0, 11.9, 12.0))])
    assert [answer.number for answer in found.inside] == [1, 2]


def test_goodput_is_of_what_finished_in_the_window_whenever_it_came() -> None:
    """Each of these ends a second after it was due."""
    found = window([row(n, at_s=at) for n, at in enumerate((0.9, 1.5, 10.9, 11.5))])
    assert found.goodput == found.throughput == 2 * 100 / 10.0


def test_attainment_is_over_all_that_was_offered() -> None:
    rows = [row(1), row(2, outcome="refused", first_s=None), row(3, LOW), row(4, LOW, "abandoned", None)]
    assert window(rows).attainment() == {HIGH: 0.5, NORMAL: None, LOW: 0.5, "all": 0.5}


def test_who_got_no_first_token_waited_for_ever() -> None:
    rows = [row(n, first_s=n / 1000) for n in range(1, 200)]
    answered = window(rows).figures()["ttft_ms"][HIGH]
    assert (answered["p99"], answered["p99_offered"], answered["n"]) == (198, 198, 199)
    rows += [row(1000 + n, outcome="refused", first_s=None) for n in range(3)]
    some_not = window(rows).figures()["ttft_ms"][HIGH]
    assert some_not["p99_offered"] is None
    assert (some_not["p99"], some_not["offered"]) == (198, 202)


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0.01, 1.0))
def test_a_quantile_is_the_smallest_value_with_that_share_below(values: list[float], q: float) -> None:
    found = lower_quantile(values, q)
    assert found in values
    at_or_below = sum(value <= found for value in values)
    assert at_or_below >= q * len(values) - 1e-6
    assert sum(value < found for value in values) < q * len(values) + 1e-6


def test_nothing_has_no_quantile() -> None:
    assert quantiles([]) == {"p50": None, "p95": None, "p99": None, "n": 0}


def test_abandoned_tokens_are_those_the_engine_made_and_nobody_finished() -> None:
    rows = [row(n, output=100, at_s=at) for n, at in enumerate((1.0, 5.0, 5.0, 5.0, 5.0, 5.0, 5.0, 13.0))]
    rows.append(row(9, outcome="abandoned", first_s=None, output=0))
    found = window(rows).abandoned()  # of 1,000 tokens 800 were finished, before, in and after the window
    assert found["token_share"] == pytest.approx(0.2)
    assert found["work_share"] == pytest.approx(1 - (800 + 8 * 200) / 4000)


def decision(number: int, refused: str | None, total_s: float, deadline_s: float | None = 1.0) -> list[Any]:
    return [number, "refused" if refused else "ok", refused, refused is None, total_s, total_s, 300, deadline_s]


def test_refusals_on_arrival_are_kept_apart_from_those_that_waited() -> None:
    rows = [row(n, outcome="refused", first_s=None) for n in range(5)]
    decisions = [
        decision(0, "queue_full", 0.001, None),
        decision(1, "deadline", 0.002),  # by the forecast
        decision(2, "deadline", 1.001),  # it passed
        decision(3, "shed", 0.3),
        decision(4, "timeout", 60.0, None),
    ]
    found = window(rows, decisions=decisions).refusals()
    assert (found["router_ms"]["n"], found["router_ms"]["p99"]) == (2, 2.0)
    assert (found["dropped_after_ms"]["n"], found["dropped_after_ms"]["p50"]) == (3, 1001.0)
    assert found["client_ms"]["n"] == 2
    assert found["reasons"] == {"queue_full": 1, "deadline": 2, "shed": 1, "timeout": 1}


def test_granted_shares_are_those_the_queue_reckoned() -> None:
    rows = [row(0), row(1, NORMAL), row(2, LOW), row(3, LOW, "refused", None)]
    decisions = [decision(n, "queue_full" if n == 3 else None, 0.1) for n in range(4)]
    assert window(rows, decisions=decisions).granted_share() == pytest.approx(
        {HIGH: 1 / 3, NORMAL: 1 / 3, LOW: 1 / 3}, abs=1e-3
    )


def test_a_receipt_is_cut_to_what_a_decision_needs() -> None:
    receipt = dict.fromkeys(("outcome", "refused", "granted", "wait_s", "total_s", "deadline_s"), 1) | {
        "estimated_prompt": 10,
        "estimated_output": 5,
        "story": [],
    }
    assert Decision(*brief(4, receipt)).tokens == 15


def test_all_that_runs_beside_the_engine_is_on_the_other_core() -> None:
    found = window([row(1)]).cpu()
    assert found["engine_core"] == pytest.approx(0.9)
    assert found["other_core"] == pytest.approx(0.2)  # router, HAProxy and the clients


def test_the_ratio_is_between_the_ends_of_the_load() -> None:
    base = window([row(n, first_s=0.1) for n in range(300)], 0.5)
    top = window([row(n, first_s=0.13) for n in range(300)])
    assert high_ratio({0.5: base, PEAK: top}) == (1.3, [1.3, 1.3])
    lost = window([row(n, first_s=None if n < 6 else 0.13, outcome="abandoned") for n in range(300)])
    assert high_ratio({0.5: base, PEAK: lost}) == (None, None)
    assert high_ratio({PEAK: top}) == (None, None)


def test_a_ratio_of_quantiles_needs_requests_beyond_them() -> None:
    few, some, many = ([row(n, first_s=0.1) for n in range(count)] for count in (29, 299, 300))
    whole = window(many, 0.5)
    assert high_ratio({0.5: whole, PEAK: window(some)}) == ("too_few", None)
    assert high_ratio({0.5: window(some, 0.5), PEAK: window(many)}) == ("too_few", None)
    assert high_ratio({0.5: whole, PEAK: window(some)}, 0.9)[0] == 1.0
    assert high_ratio({0.5: whole, PEAK: window(few)}, 0.9)[0] == "too_few"
    result = build([whole, window(few)], LEVELS, {})
    assert (result["high_ttft_p99_ratio_4x"], result["high_ttft_p90_ratio_4x"]) == ("too_few", "too_few")
    assert result["high_4x"] == {"offered": 29, "answered": 29, "p50_ms": 100}
    print_tables(Console(quiet=True), result)


@pytest.mark.parametrize("capacity_rps", [2.6, 30.0, 1000.0])
def test_windows_are_planned_for_the_capacity_that_was_found(capacity_rps: float) -> None:
    plan = plan_of(parse_arguments([], "text"))
    levels = replace(LEVELS, capacity_rps=capacity_rps)
    found = plan.sized(levels)
    for multiple in (0.5, PEAK):
        span_s = found.window_s[multiple]
        high = 0.1 * multiple * capacity_rps * span_s
        assert high >= ENOUGH_P99 or span_s == plan.most_s
        assert span_s >= plan.window_s[multiple]
    assert found.window_s[2.0] == plan.window_s[2.0]


def test_goodput_at_the_peak_is_over_the_best_of_any_load() -> None:
    better = window([row(n) for n in range(4)], 2.0)
    assert over_peak({2.0: better, PEAK: window([row(n) for n in range(3)])}) == 0.75


def test_the_result_has_its_keys_whatever_was_run() -> None:
    keys = {"high_ttft_p99_ratio_4x", "goodput_4x_over_peak", "refusal_p99_ms", "abandoned_token_share"}
    keys |= {"low_granted_share_4x", "attainment", "cpu", "fifo", "vllm"}
    for windows in ([], [window([row(1)])], [window([row(1)], arm=arm) for arm in ARMS]):
        result = build(windows, LEVELS, {})
        assert keys <= result.keys()
        json.dumps(result, allow_nan=False)


def test_a_fifo_has_one_class_and_one_tenant_and_refuses_nobody() -> None:
    keys = keys_of("fifo")
    admission = admission_of("fifo")
    assert {(key["tenant"], key["max_class"]) for key in keys} == {("all", "normal")}
    settings = parse({"auth": {"keys": keys}, "admission": admission})
    assert settings.admission.max_queued_tokens is None
    assert settings.admission.max_queued > 100_000
    assert len({key["tenant"] for key in keys_of("ours")}) == TENANTS
    assert admission_of("ours") == {}


def test_every_arm_gets_the_same_requests_at_a_multiple() -> None:
    plan = plan_of(parse_arguments(["--quick"], "text"))
    seeds = {plan.seed_of(multiple) for multiple in plan.multiples}
    assert len(seeds) == len(plan.multiples)


def test_a_full_run_measures_every_multiple_in_each_of_its_rounds_with_requests_of_its_own() -> None:
    plan = plan_of(parse_arguments([], "text"))
    windows = plan.windows("ours")
    assert [multiple for multiple, _, _ in windows] == [*plan.multiples] * plan.rounds
    assert {m: sum(span_s for one, span_s, _ in windows if one == m) for m in plan.multiples} == pytest.approx(
        dict(plan.window_s)
    )
    assert len({plan.seed_of(multiple, part) for multiple, _, part in windows}) == len(windows)
    assert {part for _, _, part in plan.windows("vllm")} == {0}


def test_windows_of_several_rounds_are_judged_as_one() -> None:
    decision = [0, "ok", None, True, 0.01, 0.5, 300, None]
    refusal = [1, "refused", "queue_full", False, 0.0, 0.004, 300, None]
    first = window([row(0), row(1, LOW, at_s=1.0)], decisions=[decision])
    second = window([row(0, output=300), row(1, LOW, outcome="refused", first_s=None)], decisions=[decision, refusal])
    both = Window.pooled([first, second])
    assert both.window_s == 20.0
    assert both.goodput == pytest.approx((first.goodput + second.goodput) / 2)
    assert both.throughput == pytest.approx((first.throughput + second.throughput) / 2)
    assert len(both.inside) == 3
    assert len({one.number for one in both.everybody}) == 4
    assert both.granted_share() == {HIGH: 1.0, NORMAL: 0.0, LOW: 0.0}
    assert both.refusals()["router_ms"]["n"] == 1
    assert both.cpu() == first.cpu()
    assert both.abandoned()["token_share"] == pytest.approx(1 - 500 / 2000)
    assert Window.pooled([first]).figures() == first.figures()


def test_unknown_arms_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(["--arms", "sglang"], "text")
    assert "--arms takes" in capsys.readouterr().err


def test_both_servers_metrics_have_common_names() -> None:
    vllm = metrics_of(
        'vllm:num_requests_running{model_name="m"} 3\nvllm:generation_tokens_total{model_name="m"} 70\n'
        'vllm:num_requests_waiting{model_name="m"} 1\n'
    )
    ours = metrics_of(
        'serve_app_engine_running_sequences{model="m",replica="a"} 2\n'
        'serve_app_engine_running_sequences{model="m",replica="b"} 1\n'
        'serve_app_engine_generated_tokens_total{model="m",replica="a"} 70\n'
        'vllm:generation_tokens_total{model="m",replica="a",model_name="m"} 70\n'
        'serve_app_waiting{model="m",priority="low"} 1\n'
        'serve_app_slots{model="m",replica="a",state="granted"} 2\n'
        'serve_app_slots{model="m",replica="a",state="total"} 8\n'
    )
    assert vllm == {"running": 3, "generated_tokens": 70, "engine_waiting": 1}
    assert ours == {"running": 3, "generated_tokens": 70, "waiting": 1, "granted": 2}
    assert set(ours) - {"generated_tokens"} <= set(HELD)


def test_levels_follow_from_the_unloaded_figures() -> None:
    assert [LEVELS.ttft_level_s(group) for group in GROUPS] == [0.5, 2.0, 10.0]
    assert LEVELS.itl_level_ms == 6.0
    assert [LEVELS.deadline_ms(group) for group in GROUPS] == [None, 1000, 5000]
    assert [LEVELS.patience_s(group) for group in GROUPS] == [5.0, 8.0, 40.0]


def test_the_plot_shows_every_arm_that_was_measured(tmp_path: Path) -> None:
    result = build(
        [window([row(1, first_s=0.1)], load) for load in (0.5, PEAK)] + [window([row(1)], arm=FIFO)], LEVELS, {}
    )
    file = tmp_path / "plot.svg"
    plot(result, file)
    text = file.read_text()
    assert TITLES[OURS] in text
    assert TITLES[FIFO] in text
    assert TITLES[VLLM] not in text
