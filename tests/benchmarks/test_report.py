"""The result object: its keys, its ratios, whose CPU it counts; and that it leaves the process whole."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from rich.console import Console

from benchmarks.common import output, report
from benchmarks.common.report import Analysis, Window

ARMS = ("vllm", "ours")
CLIENTS = (1, 32)
ENGINE_S = 2.0
OUTSIDE_S = 0.5
WINDOW_S = 5.0


def window(arm: str, clients: int, number: int, tokens_per_s: float, ttft_ms: float) -> Window:
    tokens = tokens_per_s * WINDOW_S
    result: dict[str, Any] = {
        "window_s": WINDOW_S,
        "tokens": tokens,
        "tokens_per_s_slices": [tokens_per_s * (1 + wiggle) for wiggle in (-0.01, 0.0, 0.01)],
        "requests": 4,
        "ttft_ms": [ttft_ms, ttft_ms + 1, ttft_ms + 2],
        "latency_ms": [100.0 * clients**0.5] * 4,
        "gaps_us": [[1000] * 127] * 4,
        "cpu_s": 0.1,
        "errors": 0,
    }
    cpu_s = {"EngineCore": ENGINE_S, "vLLM API server": OUTSIDE_S}
    if arm == "ours":
        parts = {"router replica": OUTSIDE_S * 0.15, "HAProxy": OUTSIDE_S * 0.05, "engine replica": OUTSIDE_S * 0.8}
        cpu_s = {"EngineCore": ENGINE_S, **parts}
    return Window(arm, clients, number, result, cpu_s, foreign_cores=0.1)


def result(rounds: int, arms: tuple[str, ...] = ARMS) -> dict[str, Any]:
    speeds = {"vllm": 1000.0, "ours": 900.0}
    windows = [
        window(arm, c, n, speeds[arm] * c**0.5 * (1 + n / 10), 10.0 if arm == "vllm" else 13.0)
        for arm in arms
        for c in CLIENTS
        for n in range(1, rounds + 1)
    ]
    return report.build(
        Analysis(windows, arms, CLIENTS, seed=1, resamples=100),
        {"seconds": 1, "idle_cores": {"ours": {"raylet": 0.1, "GCS": 0.02}}},
    )


def keys(value: Any) -> Any:
    return {k: keys(v) for k, v in value.items()} if isinstance(value, dict) else None


def test_the_promised_keys_are_there_and_short_runs_have_the_same() -> None:
    full = result(5)
    quick = result(1)
    assert list(full)[:3] == ["ratio", "ttft_added_ms", "cpu_us_per_token_outside_engine"]
    assert full["idle_cores"] == {"ours": 0.12}
    assert set(full["ratio"]) == {"1", "32"}
    assert keys(full) == keys(quick)


def test_ratio_is_ours_over_vllm_and_added_ttft_ours_minus_vllm() -> None:
    found = result(3)
    assert found["ratio"] == {"1": pytest.approx(0.9), "32": pytest.approx(0.9)}
    assert found["ttft_added_ms"] == {"1": 3.0, "32": 3.0}
    low, high = found["intervals"]["ratio_paired"]["1"]["interval"]
    assert 0.88 < low <= 0.9 <= high < 0.92


def test_cpu_outside_the_engine_leaves_out_enginecore_and_nothing_else() -> None:
    found = result(1, ("vllm",))
    expected = [OUTSIDE_S / (1000 * c**0.5 * 1.1 * WINDOW_S) * 1e6 for c in CLIENTS]
    assert found["cpu_us_per_token_outside_engine"]["vllm"] == pytest.approx(sum(expected) / 2, rel=1e-3)
    roles = found["arms"]["vllm"]["1"]["cpu_us_per_token"]
    assert roles["EngineCore"] == pytest.approx(expected[0] * ENGINE_S / OUTSIDE_S, rel=1e-3)


def test_cpu_ratios_are_a_token_and_over_vllms_api_server() -> None:
    found = result(3)  # ours does 0.9 of the tokens with the same CPU
    assert found["cpu_ratio_engine_replica"] == {
        "1": pytest.approx(0.8 / 0.9, rel=1e-3),
        "32": pytest.approx(0.8 / 0.9, rel=1e-3),
    }
    assert found["cpu_ratio_router_haproxy"]["32"] == pytest.approx(0.2 / 0.9, rel=1e-3)


def test_a_p99_needs_a_thousand_gaps() -> None:
    # 508 and 1,016 gaps
    few = result(1)
    many = result(2)
    assert few["arms"]["ours"]["1"]["itl_ms"]["p99"] == {"value": None, "interval": None, "samples": 508, "rounds": 1}
    assert many["arms"]["ours"]["1"]["itl_ms"]["p99"]["value"] == 1.0


def test_one_arm_alone_has_no_ratio() -> None:
    found = result(2, ("vllm",))
    assert found["ratio"] == found["ttft_added_ms"] == {}


def test_tables_show_the_bar_beside_the_figure() -> None:
    console = Console(width=200, record=True, file=io.StringIO())
    found = result(3)
    report.print_tables(console, found)
    text = console.export_text()
    assert "0.95" in text
    assert "router replica" in text


def test_a_long_line_is_written_whole_when_the_pipe_takes_it_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = bytearray()

    def write_some(_fd: int, data: memoryview) -> int:
        taken.extend(data[:7])
        return min(7, len(data))

    monkeypatch.setattr(output.os, "write", write_some)
    value = {"numbers": list(range(100))}
    output.write_json(value)
    assert taken.endswith(b"}\n")
    assert json.loads(taken) == value


def test_what_is_not_json_is_refused() -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        output.write_json({"ratio": float("nan")})
