"""The figures of the estimates' benchmark, on workloads small enough to do by hand."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from benchmarks.common import traces
from benchmarks.common.traces import Request, TraceMissingError
from benchmarks.estimate import ITL_S, compare, constant, judge, replay, workloads

AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
)
MOONCAKE = '{"timestamp": 0, "input_length": 10, "output_length": 5, "hash_ids": []}\n' * 2


def asked(at_s: float = 0.0, output: int = 100, prompt: int = 100) -> Request:
    return Request(at_s, "t", 4 * prompt, prompt, output)


def test_idle_and_missing_tokens_are_distinguished() -> None:
    found = judge([asked(output=100), asked(output=400)], [100, 100], [200, 200], 1.0)
    assert (found.covered, found.idle, found.missing) == (0.5, 50.0, 100.0)
    assert (found.idle_share, found.missing_share) == (round(100 / 600, 4), round(200 / 600, 4))
    assert found.prompt_error == 0.0


def test_the_worst_tenth_is_reported() -> None:
    requests = [asked(output=300 if number < 10 else 100) for number in range(100)]
    found = judge(requests, [100] * 100, [200] * 100, 1.0)
    assert (found.covered, found.least_covered) == (0.9, 0.0)


def test_an_answer_is_learned_from_when_it_has_ended() -> None:
    seen: list[tuple[float, float]] = []
    requests = [asked(at_s, output) for at_s, output in ((0.0, 1000), (1.0, 10), (2.0, 10), (1000 * ITL_S + 1, 10))]
    known: list[int] = []

    def guess(request: Request) -> tuple[int, int]:
        known.append(len(seen))
        return 1, 1

    replay(requests, guess, lambda request: seen.append((request.at_s, request.output_tokens)))
    assert known == [0, 0, 1, 3]
    assert [output for _, output in seen] == [10, 10, 1000]


def test_learned_estimates_beat_the_fixed_one_on_short_answers() -> None:
    draw = random.Random(1)
    requests = [asked(float(number), output=round(draw.lognormvariate(4.0, 0.5))) for number in range(2000)]
    results = compare(requests)
    assert results["learned"].covered == pytest.approx(0.8, abs=0.05)
    assert results["learned"].idle < 0.5 * results["fixed_256"].idle


def test_the_constant_is_todays_ratio_and_its_own_answer() -> None:
    assert constant(256)(asked(prompt=100)) == (100, 256)


def test_traces_become_workloads_in_order_of_arrival(tmp_path: Path) -> None:
    (tmp_path / traces.AZURE_FILE).write_text(AZURE)
    (tmp_path / traces.MOONCAKE_FILE).write_text(MOONCAKE)
    found = workloads(tmp_path, 1, 2)
    assert [(one.prompt_tokens, one.output_tokens) for one in found["azure"]] == [(374, 44), (396, 109)]
    assert found["azure"][1].at_s == pytest.approx(4.31458)
    assert [one.tenant for one in found["both"]] == ["azure", "mooncake", "mooncake", "azure"]


def test_a_missing_trace_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceMissingError, match=traces.AZURE_FILE):
        workloads(tmp_path, 1, None)
