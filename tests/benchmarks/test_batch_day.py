"""The virtual day on a small trace: every row ends, rows take what people leave, a model sleeps between its uses."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest

from autoscaling.simulator import BatchPlan, SimulatedRequest
from benchmarks import batch_day
from benchmarks.batch_day import CHAT, EVEN, HOUR_S, LOOK_S, SUMMARIES, TO_ZERO_S, Day, ModelDay
from benchmarks.common.stats import lower_quantile
from serve_app.types import RequestClass

SVG = "{http://www.w3.org/2000/svg}"
ROW = (40, 100)
SPAN_S = 1800.0
SMALL = replace(EVEN, slots=8, step_s=0.02)  # an answer of a row's length takes two seconds


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_day, "SLOTS", 8)
    monkeypatch.setattr(batch_day, "REPLICAS", {CHAT: (1, 1), SUMMARIES: (0, 1)})


def steady(span_s: float = SPAN_S, every_s: float = 1.0) -> list[SimulatedRequest]:
    """One request every so often, as many as take a quarter of eight slots at 2 s."""
    asked = SimulatedRequest(0.0, "people", RequestClass.NORMAL, CHAT, *ROW)
    return [replace(asked, at_s=number * every_s) for number in range(int(span_s / every_s))]


def play(asked: list[SimulatedRequest], *plans: BatchPlan, span_s: float = SPAN_S) -> Day:
    return batch_day.play(batch_day.world(SMALL, plans), asked, span_s)


def batch(rows: int, model: str = CHAT, at_s: float = 300.0, tenant: str = "research") -> BatchPlan:
    return BatchPlan(f"b-{tenant}", at_s, tenant, model, [ROW] * rows)


def filled(model: ModelDay) -> float:
    looks = [one for one in model.looks if one.are_left]
    return sum(one.rows for one in looks) / sum(one.slots - one.people for one in looks)


def test_every_row_ends_and_rows_fill_what_people_leave() -> None:
    day = play(steady(), batch(600))
    model = day.models[CHAT]
    assert len(model.rows_ended) == 600
    assert day.done_s is not None
    assert filled(model) > 0.9
    assert all(one.people + one.rows <= one.slots for one in model.looks)


def test_people_are_granted_before_rows() -> None:
    model = play(steady(600.0), batch(3_000, at_s=0.0), span_s=600.0).models[CHAT]
    worst = lower_quantile([one.wait_s for one in model.waited], 0.99)
    assert worst is not None
    assert len(model.waited) > 550
    assert worst < 2.0  # the next end of a row, of which eight are on their way


def test_a_model_scaled_to_zero_wakes_for_rows_and_sleeps_when_they_are_done() -> None:
    day = play([], batch(300, SUMMARIES))
    assert day.done_s is not None
    (woke, up), (slept, down) = day.models[SUMMARIES].replicas
    assert (up, down) == (1, 0)
    assert 300.0 + SMALL.start_s <= woke <= 300.0 + SMALL.start_s + 2 * LOOK_S
    assert day.done_s + TO_ZERO_S - LOOK_S <= slept <= day.done_s + TO_ZERO_S + 60.0


def test_the_summary_compares_with_the_day_without_batches() -> None:
    found = batch_day.summary(play(steady(), batch(300)), play(steady()))
    assert (found["rows"], found["rows_ended"], found["rows_began"]) == (300, 300, "06:05")
    chat = found["models"][CHAT]
    assert chat["idle_fill_share"] > 0.9
    assert chat["interactive_p99_ratio"] >= 1.0
    json.dumps(found, allow_nan=False)


def test_people_and_rows_of_a_day_are_of_the_seed() -> None:
    asked = SimulatedRequest(0.0, "azure", RequestClass.NORMAL, "m", *ROW)
    trace = [replace(asked, at_s=float(at)) for at in range(0, 3_500, 10)]
    found = batch_day.people(trace, 1)
    assert found == batch_day.people(trace, 1)
    assert [one.at_s for one in found] == sorted(one.at_s for one in found)
    day, night = (sum(low <= one.at_s < low + 12 * HOUR_S for one in found) for low in (0.0, 12 * HOUR_S))
    assert day > 3 * night
    assert {one.model for one in found} == {CHAT, SUMMARIES}
    plans = batch_day.batches(trace, 1, rows=400)
    assert sum(len(plan.rows) for plan in plans) == 400
    assert {plan.model for plan in plans} == {CHAT, SUMMARIES}
    assert all(plan.at_s >= batch_day.clock_s(20.0) for plan in plans)
    assert batch_day.clock(batch_day.clock_s(20.5)) == "20:30"


def test_the_plot_has_a_panel_for_each_model(tmp_path: Path) -> None:
    file = tmp_path / "day.svg"
    batch_day.plot(play(steady(), batch(300)).models, file)
    texts = {"".join(one.itertext()).strip() for one in ET.parse(file).getroot().iter(f"{SVG}text")}
    assert {CHAT, SUMMARIES, "people", "rows of batches"} <= texts
