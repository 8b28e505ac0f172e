"""Factors, knees of curves whose knee is known, the use of slots, and the shape of the result."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from benchmarks.common import batch_curve
from benchmarks.common.batch_curve import PUBLISHED_POINTS, CurvePoint, factors, knee, near_knee, slot_use
from benchmarks.common.batch_curve_plot import plot
from benchmarks.common.report import Analysis, Window

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
WINDOW_S = 10.0
TOKENS = 128
# a step's time is a line: these batches have a best of 4
BASE_STEP_S = 0.004
SEQUENCE_STEP_S = 0.001


def curve_of(step_s: float, more_s: float) -> list[CurvePoint]:
    """Closed loops on an engine whose step takes `step_s` and `more_s` for each sequence."""
    return [CurvePoint(b, b / (step_s + more_s * b), TOKENS * (step_s + more_s * b)) for b in BATCHES]


def window(arm: str, clients: int, number: int, answers: int | None = None) -> Window:
    step_s = BASE_STEP_S + SEQUENCE_STEP_S * clients
    tokens_per_s = clients / step_s
    if answers is None:
        answers = int(WINDOW_S * tokens_per_s / TOKENS)
    result: dict[str, Any] = {
        "window_s": WINDOW_S,
        "tokens": tokens_per_s * WINDOW_S,
        "tokens_per_s_slices": [tokens_per_s] * 3,
        "requests": answers,
        "latency_ms": [TOKENS * step_s * 1e3] * answers,
        "decoding_s": 0.9 * clients * WINDOW_S,
    }
    return Window(arm, clients, number, result, {}, foreign_cores=0.0)


def built(arms: tuple[str, ...] = ("ours",), clients: tuple[int, ...] = BATCHES, **more: Any) -> dict[str, Any]:
    windows = [window(arm, c, n, **more) for arm in arms for c in clients for n in (1, 2)]
    return batch_curve.build(Analysis(windows, arms, clients, seed=1), slots=128)


def test_factors_are_over_one_client() -> None:
    assert factors([CurvePoint(2, 30.0, 8.0), CurvePoint(1, 10.0, 4.0)]) == {2: (3.0, 2.0), 1: (1.0, 1.0)}
    assert factors([CurvePoint(2, 30.0, 8.0)]) == {}


def test_published_factors_are_those_of_their_text() -> None:
    throughput, latency = factors(PUBLISHED_POINTS)[32]
    assert throughput == pytest.approx(13.0, abs=0.05)
    assert latency == pytest.approx(2.6, abs=0.05)


def test_published_knee_is_64_by_a_hair() -> None:
    assert knee(PUBLISHED_POINTS) == 64
    assert near_knee(PUBLISHED_POINTS) == [32, 64]


def test_a_linear_curve_has_no_knee_in_its_range() -> None:
    assert knee([CurvePoint(b, 45.0 * b, 2.0) for b in BATCHES]) is None


def test_a_flat_curve_has_its_knee_at_one() -> None:
    assert knee([CurvePoint(b, 45.0, 2.0 * b) for b in BATCHES]) == 1


def test_of_equal_powers_the_smaller_batch_is_the_knee() -> None:
    assert knee([CurvePoint(1, 1.0, 1.0), CurvePoint(2, 2.0, 2.0), CurvePoint(4, 2.0, 4.0)]) == 1


@pytest.mark.parametrize("points", [[], [CurvePoint(1, 1.0, 1.0)]])
def test_fewer_than_two_points_have_no_knee(points: list[CurvePoint]) -> None:
    assert knee(points) is None


@pytest.mark.parametrize("fixed_over_each", [2, 4, 16, 64])
def test_a_steps_fixed_part_over_its_part_a_sequence_is_the_knee(fixed_over_each: int) -> None:
    """Power goes as b / (f + b)**2, which is greatest at b = f."""
    assert knee(curve_of(fixed_over_each * SEQUENCE_STEP_S, SEQUENCE_STEP_S)) == fixed_over_each


@given(st.floats(0.1, 100.0), st.floats(0.01, 10.0), st.permutations(BATCHES))
def test_beyond_the_knee_a_doubling_adds_less_throughput_than_latency(
    step_s: float, more_s: float, order: list[int]
) -> None:
    by_batch = {point.batch: point for point in curve_of(step_s, more_s)}
    at = knee([by_batch[b] for b in order])
    if at is None:
        assert all(by_batch[2 * b].power > by_batch[b].power for b in BATCHES[:-1])
        return
    gain = by_batch[2 * at].tokens_per_s / by_batch[at].tokens_per_s
    growth = by_batch[2 * at].latency / by_batch[at].latency
    assert gain <= growth * (1 + 1e-9)
    assert gain <= 2**0.5 * (1 + 1e-9)  # answers of one length: gain x growth is 2


def test_slot_use_is_decoding_time_over_the_slots_that_clients_could_fill() -> None:
    windows = [window("ours", 4, 1), window("ours", 4, 2)]
    assert slot_use(windows, slots=128) == pytest.approx(0.9)
    assert slot_use(windows, slots=128) == pytest.approx(0.5 * slot_use(windows, slots=2))


def test_the_result_has_the_promised_keys_and_is_json() -> None:
    found = built(("vllm", "ours"))
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert set(found["curves"]) == {"vllm", "ours"}
    assert list(found["curves"]["ours"]) == [str(b) for b in BATCHES]
    wanted = "tokens_per_s requests_per_s latency_ms_p50 latency_ms_p99 throughput_factor latency_factor slot_use"
    assert set(wanted.split()) <= set(found["curves"]["ours"]["8"])
    assert found["knee"] == {"vllm": 4, "ours": 4, "published": 64}
    assert list(found["published"]) == ["1", "4", "8", "16", "32", "64", "128"]
    assert found["published"]["32"] == {
        "tokens_per_s": 587.0,
        "seconds": 87.4,
        "throughput_factor": 13.04,
        "latency_factor": 2.625,
    }


def test_rows_are_of_all_windows_together() -> None:
    row = built()["curves"]["ours"]["4"]
    assert row["tokens_per_s"] == 500.0
    assert row["requests_per_s"] == pytest.approx(500 / TOKENS, rel=0.03)
    assert row["answers"] == 2 * int(WINDOW_S * 500 / TOKENS) == 78
    assert row["latency_ms_p50"] == 1024.0
    assert row["throughput_factor"] == 2.5
    assert row["latency_factor"] == 1.6


def test_a_fast_round_with_more_answers_does_not_outweigh_two_slow_ones() -> None:
    windows = [window("ours", 1, n) for n in (1, 2, 3)]
    fast = dict(windows[0].result) | {"tokens_per_s_slices": [1000.0], "latency_ms": [128.0] * 500, "requests": 500}
    found = batch_curve.build(Analysis([replace(windows[0], result=fast), *windows[1:]], ["ours"], [1], seed=1), 128)
    row = found["curves"]["ours"]["1"]
    assert row["tokens_per_s"] * row["latency_ms_p50"] == TOKENS * 1e3


def test_windows_that_others_disturbed_do_not_count_where_there_are_quiet_ones() -> None:
    slow = {"tokens_per_s_slices": [1.0], "latency_ms": [9e9]}
    calm, loud = (window("ours", 1, n) for n in (1, 2))
    loud = replace(loud, foreign_cores=0.9, result=dict(loud.result) | slow)
    row = batch_curve.build(Analysis([calm, loud], ["ours"], [1], seed=1), 128)["curves"]["ours"]["1"]
    assert (row["tokens_per_s"], row["windows"], row["windows_left_out"]) == (200.0, 1, 1)
    assert row["foreign_cores_max"] == 0.0
    alone = batch_curve.build(Analysis([loud], ["ours"], [1], seed=1), 128)["curves"]["ours"]["1"]
    assert (alone["tokens_per_s"], alone["windows_left_out"], alone["foreign_cores_max"]) == (1.0, 0, 0.9)


def test_a_p99_needs_a_hundred_answers() -> None:
    rows = built()["curves"]["ours"]
    assert rows["4"]["latency_ms_p99"] is None
    assert rows["8"]["answers"] > 100
    assert rows["8"]["latency_ms_p99"] == pytest.approx(1536.0)


def test_a_curve_without_answers_has_no_factors_and_no_knee() -> None:
    found = built(answers=0)
    assert found["curves"]["ours"]["1"]["latency_ms_p50"] is None
    assert found["curves"]["ours"]["8"]["latency_factor"] is None
    assert found["knee"]["ours"] is None
    assert "none in this range" in shown(found)


def shown(found: dict[str, Any]) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    batch_curve.print_curve(console, found)
    return console.export_text()


def test_the_knees_are_printed() -> None:
    text = shown(built()).replace("\n", " ")
    assert "knee of ours: 4; 8 gives +33% throughput for +50% latency" in text
    assert "2 of 2" in text
    assert "knee of published: 64; 128 gives +10% throughput for +80% latency; within 5% of its power: 32" in text


def test_the_plot_marks_the_knees(tmp_path: Path) -> None:
    plot(built(), tmp_path / "curve.svg")
    drawn = (tmp_path / "curve.svg").read_text()
    assert "knee: 4" in drawn
    assert "knee: 64" in drawn
    assert "published, 70B on four A100" in drawn
