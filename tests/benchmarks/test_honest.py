"""A real run's requests in the simulator, and the comparison of both, are what their definitions say."""

from __future__ import annotations

import json
from dataclasses import asdict, astuple, replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from autoscaling.simulator import PROFILES, EngineProfile, RequestEnd, World
from benchmarks.common.arms import ModelChoice
from benchmarks.common.traces import AZURE_FILE
from benchmarks.common.worlds import one_model
from benchmarks.overload import honest
from benchmarks.overload.answers import Answer, Window
from benchmarks.overload.comparison import GOODPUT, TOLERANCE, Compared, compared, figures_of
from benchmarks.overload.honest import (
    QUICK_SPANS_S,
    RUNS,
    SPANS_S,
    parse_arguments,
    plan_of,
    report,
    simulate,
    world_of_run,
)
from benchmarks.overload.offered_load import GROUPS, HIGH, LOW, NORMAL, Offer, endless, lengths, offers
from benchmarks.overload.open_loop_client import Ended
from benchmarks.overload.plan import Levels
from benchmarks.overload.replay import SIMULATED, answer_of, replayed, request_s, requests_of, with_clients
from serve_app.settings import parse
from serve_app.types import Outcome, RequestClass

MODEL = "m"
LEVELS = Levels(ttft_s=0.1, itl_ms=5.0, capacity_rps=10.0)
PROFILE: EngineProfile = replace(PROFILES["tiny-cpu"], slots=2)
OFFERED = [
    Offer(0, 1.0, LOW, 1, 100, 50),
    Offer(1, 1.5, HIGH, 2, 30, 20),
    Offer(2, 3.0, NORMAL, 3, 40, 10),
]


def answered(offer: Offer, outcome: Ended = Ended.FINISHED, first_s: float | None = 0.1) -> Answer:
    done = outcome is Ended.FINISHED
    used = (offer.prompt_tokens + 1, offer.output_tokens) if done else (0, 0)
    total = offer.prompt_tokens + offer.output_tokens
    return Answer(offer.number, offer.group, total, offer.at_s, outcome, "", first_s, 0.6, *used, 5.0, 0.1)


def window(answers: list[Answer], multiple: float = 2.0) -> Window:
    return Window.of(
        {
            "arm": "ours",
            "multiple": multiple,
            "warmup_s": 0.5,
            "window_s": 5.0,
            "levels": list(astuple(LEVELS)),
            "rows": [list(astuple(answer)) for answer in answers],
            "decisions": [],
        }
    )


def world() -> World:
    return one_model(PROFILE, routers=1)


def test_what_finished_is_asked_for_as_it_came_out_and_the_rest_as_offered() -> None:
    left = answered(OFFERED[1], Ended.ABANDONED, None)
    first, second = requests_of([left, answered(OFFERED[0])], OFFERED, MODEL)
    assert (first.at_s, first.prompt_tokens, first.output_tokens, first.max_tokens) == (1.0, 101, 50, 50)
    assert (first.tenant, first.request_class) == ("tenant-1", RequestClass.LOW)
    assert (second.at_s, second.prompt_tokens, second.output_tokens, second.max_tokens) == (1.5, 30, 20, 20)
    assert second.request_class is RequestClass.HIGH


def test_requests_without_a_label_are_of_the_default_class() -> None:
    found = requests_of(map(answered, OFFERED), OFFERED, MODEL, labelled=False)
    assert {request.request_class for request in found} == {RequestClass.NORMAL}


def test_clients_have_the_deadlines_and_the_patience_of_the_real_ones() -> None:
    classes = with_clients(world(), LEVELS).classes
    for group in GROUPS:
        plan = classes[RequestClass[group.upper()]]
        deadline_ms = LEVELS.deadline_ms(group)
        assert plan.patience_s == LEVELS.patience_s(group)
        assert plan.deadline_s == (None if deadline_ms is None else deadline_ms / 1e3)


@pytest.mark.parametrize(
    ("outcome", "ended"),
    [
        (Outcome.OK, Ended.FINISHED),
        (Outcome.REFUSED, Ended.REFUSED),
        (Outcome.CANCELLED_QUEUED, Ended.ABANDONED),
        (Outcome.CANCELLED_RUNNING, Ended.ABANDONED),
        (Outcome.ENGINE_FAILED, Ended.FAILED),
    ],
)
def test_a_simulated_end_is_what_a_client_would_see(outcome: Outcome, ended: Ended) -> None:
    end = RequestEnd(
        7, RequestClass.LOW, "t", MODEL, 12.0, 12.1, 12.5, 14.5, 100, 5, outcome, "why", "r", 1, 0, is_in_time=True
    )
    found = answer_of(end, LOW, 10.0)
    assert found.outcome is ended
    assert (found.number, found.group, found.at_s, found.code) == (7, LOW, 10.0, "why")
    assert (found.first_s, found.ended_s, found.gap_ms) == (0.5, 2.5, 500.0)
    assert answer_of(end._replace(first_s=None), LOW, 10.0).gap_ms is None


def test_a_simulated_window_has_the_requests_of_the_real_one() -> None:
    real = window([answered(one) for one in OFFERED])
    virtual = replayed(world(), real, OFFERED, MODEL)
    assert (virtual.arm, virtual.multiple, virtual.window_s, virtual.levels) == (SIMULATED, 2.0, 5.0, LEVELS)
    assert [one.group for one in virtual.everybody] == [one.group for one in OFFERED]
    assert [one.at_s for one in virtual.everybody] == [one.at_s for one in OFFERED]
    assert all(one.outcome is Ended.FINISHED for one in virtual.everybody)
    assert virtual.goodput == sum(one.output_tokens for one in OFFERED) / 5.0


def test_a_request_without_load_shows_what_it_takes_beside_queue_and_engine() -> None:
    ideal = replayed(world(), window([answered(one) for one in OFFERED]), OFFERED, MODEL)
    later = [
        replace(answer, first_s=answer.first_s + more_s)
        for answer, more_s in zip(ideal.everybody, (0.010, 0.012, 5.0), strict=True)
        if answer.first_s is not None
    ]
    assert request_s(world(), later, OFFERED, MODEL) == pytest.approx(0.012)
    sooner = [replace(answer, first_s=1e-6) for answer in later]
    assert request_s(world(), sooner, OFFERED, MODEL) == 0.0


def test_a_figure_may_differ_by_the_tolerance() -> None:
    runs = [100.0, 100.0, 101.0]
    assert Compared(runs, 3, 100.0 * (1 + TOLERANCE) - 0.1).is_right
    assert not Compared(runs, 3, 100.0 * (1 + TOLERANCE) + 0.1).is_right
    assert not Compared(runs, 3, 100.0 * (1 - TOLERANCE) - 0.1).is_right


def test_runs_that_differ_more_allow_more() -> None:
    wide = Compared([80.0, 100.0, 140.0], 3, 155.0)
    assert wide.spread == pytest.approx(0.6)
    assert wide.allowed == pytest.approx(0.6)
    assert wide.is_right
    assert not replace(wide, simulated=161.0).is_right


def test_a_figure_that_only_one_side_has_is_wrong() -> None:
    assert Compared([], 5, None).is_right
    assert not Compared([], 5, 1.0).is_right
    assert not Compared([1.0], 5, None).is_right
    assert Compared([0.0, 0.0], 2, 0.0).is_right
    assert not Compared([0.0, 0.0], 2, 3.0).is_right


def test_compared_are_the_median_of_the_simulations_and_every_real_run() -> None:
    def run(first_s: float) -> Window:
        return window([answered(OFFERED[1], first_s=first_s), answered(OFFERED[2], Ended.REFUSED, None)])

    found = compared([run(0.1), run(0.3), run(0.2)], [run(0.2), run(0.21), run(0.4)])
    high = found["high_ttft_p50_ms"]
    assert sorted(high.real) == pytest.approx([100.0, 200.0, 300.0])
    assert high.runs == 3
    assert high.simulated == pytest.approx(210.0)
    assert found["normal_ttft_p99_ms"] == Compared([], 3, None)
    assert found[GOODPUT].real == [OFFERED[1].output_tokens / 5.0] * 3
    assert set(found) == set(figures_of(run(0.1)))


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    rows = [f"2023-11-16 18:15:{second:02d},{300 + 40 * second},{100 + 9 * second}" for second in range(30)]
    (tmp_path / AZURE_FILE).write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n")
    return tmp_path


CHOICE = ModelChoice("nowhere", max_model_len=4096, max_num_seqs=8)
RATE = 8.0
SPAN_S = 6.0


def measured_by(profile: EngineProfile, folder: Path, request_s: float) -> dict[str, Any]:
    """What would be measured of an engine that is just this profile."""
    drawn_from = lengths(folder, CHOICE.max_model_len)
    plan = replace(world_of_run(profile, CHOICE), request_s=request_s)
    offered = offers(drawn_from, RATE, SPAN_S, 7)
    real = replayed(plan, window([answered(one) for one in offered]), offered, CHOICE.name)
    alone = [replace(one, at_s=5.0 * one.number) for one in islice(endless(drawn_from, 1), 5)]
    unloaded = replayed(plan, window([answered(one) for one in alone]), alone, CHOICE.name)
    raw = dict(real.raw) | {"arm": "ours", "rate": RATE, "seed": 7}
    return {
        "seed": 1,
        "levels": list(astuple(LEVELS)),
        "profile": asdict(profile),
        "unloaded": [list(astuple(one)) for one in unloaded.everybody],
        "windows": [raw] * 2,
        "conditions": {},
    }


def reported(measured: dict[str, Any], folder: Path, capfd: pytest.CaptureFixture[str]) -> tuple[bool, dict[str, Any]]:
    world_of_all, played = simulate(measured, CHOICE, folder)
    passed = report(Console(stderr=True), measured, world_of_all, played)
    return passed, json.loads(capfd.readouterr().out)


def test_an_engine_that_is_its_profile_is_simulated_as_it_is(trace: Path, capfd: pytest.CaptureFixture[str]) -> None:
    passed, result = reported(measured_by(PROFILES["tiny-cpu"], trace, 0.02), trace, capfd)
    assert passed
    assert result["pass"]
    assert result["request_s"] == pytest.approx(0.02, abs=1e-3)
    assert result["figures"]["2x"]["low_ttft_p50_ms"]["difference"] == pytest.approx(0.0, abs=0.02)


def test_an_engine_slower_than_its_profile_fails(trace: Path, capfd: pytest.CaptureFixture[str]) -> None:
    slow = replace(PROFILES["tiny-cpu"], step_s=8e-3, prefill_tokens_per_s=5e3)
    measured = measured_by(slow, trace, 0.0) | {"profile": asdict(PROFILES["tiny-cpu"])}
    passed, result = reported(measured, trace, capfd)
    assert not passed
    assert not result["pass"]


def test_the_world_is_that_of_the_configuration() -> None:
    plan = world_of_run(PROFILES["tiny-cpu"], CHOICE)
    assert plan.routers == 1
    assert plan.model(CHOICE.name).profile.slots == CHOICE.max_num_seqs
    assert plan.model(CHOICE.name).queue == parse({}).admission.queue_policy()


def test_every_run_of_a_load_has_its_requests_and_a_full_measurement_its_five() -> None:
    full = plan_of(parse_arguments([]))
    assert full.rounds == RUNS == 5
    assert set(full.window_s) == set(SPANS_S)
    quick = plan_of(parse_arguments(["--quick", "--runs", "3", "--scale", "0.5"]))
    assert quick.rounds == 3
    assert all(quick.window_s[multiple] == 0.5 * QUICK_SPANS_S[multiple] for multiple in quick.window_s)


class StubTheatre:
    """A server whose loops and windows are those that it was made with; notes the seeds of the texts."""

    def __init__(self, closed: dict[str, Any], raw: dict[str, Any]) -> None:
        self.model = CHOICE
        self.folder = Path("unused")
        self.texts: list[int] = []
        self._closed = closed
        self._raw = raw

    def get(self, _name: str) -> Any:
        return SimpleNamespace(arm=None)

    def closed(self, *_: Any) -> dict[str, Any]:
        return self._closed

    def window(self, _name: str, multiple: float, *_: Any, texts: int) -> dict[str, Any]:
        self.texts.append(texts)
        return self._raw | {"multiple": multiple}


def test_every_run_asks_the_same_with_other_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(honest, "calibrated", lambda *_: PROFILES["tiny-cpu"])
    monkeypatch.setattr(honest, "progress_line", lambda _: "")
    rows = [list(astuple(answered(one))) for one in OFFERED]
    raw = dict(window([answered(one) for one in OFFERED]).raw)
    theatre: Any = StubTheatre({"rows": rows, "warmup_s": 0.5, "window_s": 5.0}, raw)
    found = honest.measure(theatre, plan_of(parse_arguments(["--quick", "--runs", "3"])), Console(stderr=True))
    assert len(found["windows"]) == len(set(theatre.texts)) == 3
    assert found["unloaded"] == rows
    assert found["profile"]["name"] == "tiny-cpu"
    json.dumps(found)
