"""The virtual day on a small trace: every row ends, rows take what people leave, a model sleeps between its uses."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from benchmarks.batch_day.figures import clock, hours, quantile, summary
from benchmarks.batch_day.plan import CHAT, SUMMARIES, BatchPlan, ModelPlan, Person, batches, clock_s, people
from benchmarks.batch_day.plot import plot
from benchmarks.batch_day.world import TO_ZERO_S, Model, play
from benchmarks.common.traces import Request
from serve_app.types import RequestClass

SVG = "{http://www.w3.org/2000/svg}"
HOUR_S = 3600.0
ROW = (40, 100)
MODELS = (ModelPlan(CHAT, 8, 1, 1), ModelPlan(SUMMARIES, 8, 0, 1, start_s=60.0))


def person(at_s: float, level: RequestClass = RequestClass.NORMAL, model: str = CHAT) -> Person:
    return Person(at_s, model, level, *ROW)


def steady(span_s: float, every_s: float) -> list[Person]:
    """One request every so often, as many as take about a third of eight slots at 2 s."""
    return [person(number * every_s) for number in range(int(span_s / every_s))]


def played(rows: int = 300, model: str = CHAT, begin_s: float = 600.0) -> dict[str, Model]:
    asked = steady(2 * HOUR_S, 2.0)
    return play(MODELS, asked, [BatchPlan("b", begin_s, "research", model, [ROW] * rows)], 2 * HOUR_S)


def test_every_row_ends_and_rows_fill_what_people_leave() -> None:
    model = played()[CHAT]
    (batch,) = model.batches.values()
    assert batch.ended == 300
    assert batch.ended_at is not None
    assert model.filled_s / model.idle_s > 0.9


def test_people_are_granted_before_rows() -> None:
    beside = play(MODELS, steady(HOUR_S, 2.0), [BatchPlan("b", 0.0, "t", CHAT, [ROW] * 3_000)], HOUR_S)[CHAT]
    waits = [one.wait_s for one in beside.waited]
    assert len(waits) > 1_700
    worst = quantile(waits, 0.99)
    assert worst is not None
    assert worst < 5.0  # the next end of a row, of which eight are on their way


def test_a_model_scaled_to_zero_wakes_for_rows_and_sleeps_when_they_are_done() -> None:
    model = played(model=SUMMARIES)[SUMMARIES]
    (batch,) = model.batches.values()
    assert batch.ended == 300
    assert batch.ended_at is not None
    (woke, up), (slept, down) = model.replica_changes
    assert (up, down) == (1, 0)
    assert 600.0 + 60.0 <= woke <= 600.0 + 65.0
    assert batch.ended_at + TO_ZERO_S - 1.0 <= slept <= batch.ended_at + TO_ZERO_S + 60.0


def test_tenants_share_what_is_free() -> None:
    plans = [BatchPlan(f"b{n}", 0.0, tenant, CHAT, [ROW] * 400) for n, tenant in enumerate(("research", "reports"))]
    model = play(MODELS, [], plans, 300.0)[CHAT]
    ended = [batch.ended for batch in model.batches.values()]
    assert min(ended) > 100
    assert abs(ended[0] - ended[1]) <= 8


def test_slot_seconds_add_up() -> None:
    model = played()[CHAT]
    for minute in model.minutes.values():
        assert minute.people + minute.rows <= minute.slots + 1e-6
    assert sum(one.rows_ended for one in model.minutes.values()) == 300
    by_hour = hours(model)
    assert sum(one.asked for one in by_hour) == len(model.waited)
    assert by_hour[0].hour == 6
    assert by_hour[0].slots == pytest.approx(8.0)


def test_the_summary_compares_with_the_day_without_batches() -> None:
    asked = steady(HOUR_S, 2.0)
    plans = [BatchPlan("b", 0.0, "t", CHAT, [ROW] * 300)]
    found = summary(play(MODELS, asked, plans, HOUR_S), play(MODELS, asked, [], HOUR_S))
    assert (found["rows"], found["rows_ended"], found["rows_began"]) == (300, 300, "06:00")
    chat = found["models"][CHAT]
    assert chat["idle_fill_share"] > 0.9
    assert chat["interactive_p99_ratio"] >= 1.0
    json.dumps(found, allow_nan=False)


def test_people_and_rows_of_a_day_are_of_the_seed() -> None:
    trace = [Request(float(at), "azure", 400, 100, 10 + at % 7) for at in range(0, 3_500, 10)]
    asked = people(trace, 1)
    assert asked == people(trace, 1)
    assert [one.at_s for one in asked] == sorted(one.at_s for one in asked)
    day, night = (sum(low <= one.at_s < high for one in asked) for low, high in ((0.0, 43_200.0), (43_200.0, 86_400.0)))
    assert day > 3 * night
    assert {one.model for one in asked} == {CHAT, SUMMARIES}
    plans = batches(trace, 1, rows=400)
    assert sum(len(plan.rows) for plan in plans) == 400
    assert {plan.model for plan in plans} == {CHAT, SUMMARIES}
    assert all(plan.at_s >= clock_s(20.0) for plan in plans)
    assert clock(clock_s(20.5)) == "20:30"


def test_the_plot_has_a_panel_for_each_model(tmp_path: Path) -> None:
    file = tmp_path / "day.svg"
    plot(played(), file)
    texts = {"".join(one.itertext()).strip() for one in ET.parse(file).getroot().iter(f"{SVG}text")}
    assert {CHAT, SUMMARIES, "people", "rows of batches"} <= texts
    with pytest.raises(ValueError, match="nothing"):
        plot({}, file)
