"""Minutes add up in any parts and in any order, and have the quantiles of all their requests."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.core.receipts import Receipt, RequestTrace
from serve_app.core.records import MINUTE_S, Group, Grouping, HistoryQuestion, HistorySum, MinuteBook
from serve_app.system import DurationSketch
from serve_app.system.sketch import ACCURACY, SMALLEST_S
from serve_app.types import Outcome, RequestClass

Ended = tuple[str, RequestClass, str, float, float]  # model, class, tenant, moment of the end, first token


def receipt(model: str, request_class: RequestClass, tenant: str, first_s: float, outcome: Outcome) -> Receipt:
    return Receipt(
        *("r", request_class, tenant, model, outcome),
        arrived=0.0,
        wait_s=0.1,
        total_s=2 * first_s,
        granted=True,
        first_token_s=first_s,
        prompt_tokens=3,
        output_tokens=2,
    )


def lines_of(ended: Sequence[Ended], named: int = 20, cuts: Sequence[int] = ()) -> list[dict[str, Any]]:
    """What one router writes: a line at the end of each minute, and behind each request of `cuts`."""
    book = MinuteBook(DurationSketch, named)
    lines = []
    for number, (model, request_class, tenant, at, first_s) in enumerate(ended):
        if book.is_over(at):
            lines.append(book.take(at))
        book.arrived(model, request_class.label, tenant, at)
        book.ended(replace(receipt(model, request_class, tenant, first_s, Outcome.OK), waits={"slots": 0.5}), at)
        if number in cuts:
            lines.append(book.take(at))
    lines.append(book.take(1e9))
    return [json.loads(json.dumps(line)) for line in lines]


def rows_of(lines: Sequence[dict[str, Any]], router: str = "a", **question: Any) -> list[dict[str, Any]]:
    total = HistorySum(HistoryQuestion(0.0, **question), DurationSketch)
    for line in lines:
        total.add_minute(line, router)
    return list(total.rows())


def exact(values: Sequence[float], part: float) -> float:
    return sorted(values)[math.floor(part * (len(values) - 1))]


DURATIONS = st.floats(SMALLEST_S, 3600.0)
ENDED = st.lists(
    st.tuples(
        st.sampled_from("mn"), st.sampled_from(RequestClass), st.sampled_from("tu"), st.integers(0, 400), DURATIONS
    ),
    min_size=1,
    max_size=60,
)


@given(ENDED, st.sets(st.integers(0, 59)), st.sampled_from(Grouping), st.sampled_from((60, 120, 600)))
def test_minutes_in_any_parts_have_the_counts_and_quantiles_of_all_requests(
    ended: list[Ended], cuts: set[int], by: Grouping, step_s: int
) -> None:
    ended = sorted(ended, key=lambda request: request[3])
    lines = lines_of(ended, cuts=sorted(cuts))
    random.Random(len(lines)).shuffle(lines)
    rows = rows_of(lines, by=by, step_s=step_s)
    assert rows == rows_of(lines_of(ended), by=by, step_s=step_s)
    expected: dict[tuple[float, str], list[float]] = {}
    for model, request_class, tenant, at, first_s in ended:
        name = {"total": "total", "class": request_class.label, "model": model, "tenant": tenant, "name": model}[
            by.value
        ]
        expected.setdefault((at // step_s * step_s, name), []).append(first_s)
    assert [(row["time"], row["name"]) for row in rows] == sorted(expected)
    for row in rows:
        values = expected[row["time"], row["name"]]
        assert (row["arrivals"], row["ok"], row["output_tokens"]) == (len(values), len(values), 2 * len(values))
        assert row["waits"] == {"slots": 0.5 * len(values)}
        for part, name in ((0.5, "first_token_p50_s"), (0.95, "first_token_p95_s")):
            assert row[name] == pytest.approx(exact(values, part), rel=1.001 * ACCURACY)


@given(st.lists(st.lists(DURATIONS, max_size=50), min_size=1, max_size=8))
def test_a_merged_sketch_is_the_sketch_of_all(parts: list[list[float]]) -> None:
    merged = DurationSketch()
    whole = DurationSketch()
    for part in parts:
        sketch = DurationSketch()
        for value in part:
            sketch.add(value)
            whole.add(value)
        merged.merge(json.loads(json.dumps(sketch.plain())))
    assert merged.plain() == whole.plain()
    assert merged.quantile(0.95) == whole.quantile(0.95)


def test_an_empty_sketch_has_no_quantile_and_short_durations_count_as_none() -> None:
    sketch = DurationSketch()
    assert (sketch.plain(), sketch.quantile(0.5)) == ([], None)
    sketch.add(SMALLEST_S / 2)
    assert (sketch.plain(), sketch.quantile(0.95)) == ([1], 0.0)


def test_rows_of_several_nodes_add_up() -> None:
    question = HistoryQuestion(0.0, by=Grouping.CLASS)
    high = ("m", RequestClass.HIGH, "t")
    total = HistorySum(question, DurationSketch)
    for router, first_s in (("a", 1.0), ("b", 3.0)):
        node = HistorySum(question, DurationSketch)
        for line in lines_of([(*high, 5.0, first_s)]):
            node.add_minute(line, router)
        total.add_rows(json.loads(json.dumps(node.plain())))
    (row,) = total.rows()
    assert (row["name"], row["arrivals"], row["request_p95_s"]) == ("high", 2, pytest.approx(2.0, rel=ACCURACY))


def test_what_waits_counts_with_its_largest_number_of_each_router() -> None:
    waiting = [Group("m", "high", "t"), Group("m", "low", "u", "chat")]
    lines = []
    for counts in ((2, 1), (0, 0)):
        book = MinuteBook(DurationSketch, 20)
        for number in counts:
            book.waiting(waiting[:number], 61.0)
        if book.has_counts:
            lines.append(json.loads(json.dumps(book.take(70.0))))
    assert [row["waiting_max"] for row in rows_of(lines)] == [2]
    assert [row["waiting_max"] for row in rows_of([*lines, *lines])] == [2], "parts of one router's minute"
    both = HistorySum(HistoryQuestion(0.0), DurationSketch)
    for router in "ab":
        both.add_minute(lines[0], router)
    assert [row["waiting_max"] for row in both.rows()] == [4]
    assert {row["name"]: row["waiting_max"] for row in rows_of(lines, by=Grouping.CLASS)} == {"high": 1, "low": 1}
    assert {row["name"]: row["waiting_max"] for row in rows_of(lines, by=Grouping.NAME)} == {"m": 1, "chat": 1}
    own = rows_of(lines, by=Grouping.NAME, tenant="u")
    assert [(row["name"], row["waiting_max"]) for row in own] == [("chat", 1)]


def test_requests_to_a_name_count_by_it_and_by_the_models_that_ran_or_were_left() -> None:
    book = MinuteBook(DurationSketch, 20)
    hops = (("m", "no_replica"), ("n", "queue_full"))
    traces = [
        ("m", RequestTrace()),
        ("m", RequestTrace(asked_model="chat")),
        ("o", RequestTrace(asked_model="chat", hops=hops)),
        ("n", RequestTrace(asked_model="chat", is_shadow=True)),
    ]
    for model, trace in traces:
        book.arrived("m", "high", "t", 61.0)
        book.ended(replace(receipt(model, RequestClass.HIGH, "t", 1.0, Outcome.OK), trace=trace), 62.0)
    line = json.loads(json.dumps(book.take(70.0)))

    def counts(**question: Any) -> dict[str, tuple[int, int, int]]:
        rows = rows_of([line], **question)
        return {row["name"]: (row["arrivals"], row["ok"], row["left"]) for row in rows}

    assert counts() == {"total": (4, 4, 2)}
    assert counts(by=Grouping.NAME) == {"m": (1, 1, 0), "chat": (2, 2, 2), "n": (1, 1, 0)}
    assert counts(by=Grouping.MODEL, asked_model="chat") == {"m": (1, 1, 1), "n": (0, 0, 1), "o": (1, 1, 0)}
    assert counts(asked_model="m") == {"total": (1, 1, 0)}
    assert counts(asked_model="unknown") == {}
    assert sorted(len(group) for group in line["groups"]) == [4, 4, 5, 5, 5], "a name stands only where there is one"
    book.arrived("p", "high", "t", 61.0)
    line = json.loads(json.dumps(book.take(70.0)))
    assert counts(by=Grouping.NAME) == {}, "it may have asked for another name"


@pytest.mark.parametrize("by", Grouping)
def test_a_tenant_s_history_has_nothing_of_others(by: Grouping) -> None:
    book = MinuteBook(DurationSketch, 20)
    for model, request_class, tenant in (("m", RequestClass.HIGH, "t"), ("n", RequestClass.LOW, "u")):
        book.ended(receipt(model, request_class, tenant, 1.0, Outcome.OK), 5.0)
    book.waiting([Group("m", "high", "t"), Group("n", "low", "u"), Group("n", "low", "u")], 5.0)
    rows = rows_of([json.loads(json.dumps(book.take(5.0)))], by=by, tenant="t")
    name = {"total": "total", "class": "high", "model": "m", "tenant": "t", "name": "m"}[by.value]
    assert [(row["name"], row["ok"], row["waiting_max"]) for row in rows] == [(name, 1, 1)]


def test_tenants_beyond_the_named_ones_are_counted_as_other_and_an_answer_knows() -> None:
    ended = [("m", RequestClass.HIGH, name, 1.0, 1.0) for name in "abc"]
    lines = lines_of(ended, named=0)
    assert [(row["name"], row["ok"]) for row in rows_of(lines, by=Grouping.TENANT)] == [("other", 3)]
    total = HistorySum(HistoryQuestion(0.0, tenant="a"), DurationSketch)
    total.add_minute(lines[0], "a")
    assert (list(total.rows()), total.has_others) == ([], True)


def test_minutes_outside_the_question_are_left_out_and_absent_minutes_stay_so() -> None:
    lines = lines_of([("m", RequestClass.HIGH, "t", at, 1.0) for at in (10.0, 70.0, 310.0)])
    total = HistorySum(HistoryQuestion(60.0, 300.0), DurationSketch)
    for line in lines:
        total.add_minute(line, "a")
    assert [row["time"] for row in total.rows()] == [MINUTE_S]


@pytest.mark.parametrize(
    ("outcome", "count"),
    [
        (Outcome.OK, "ok"),
        (Outcome.REFUSED, "refused"),
        (Outcome.ENGINE_FAILED, "failed"),
        (Outcome.INTERNAL_ERROR, "failed"),
        (Outcome.CANCELLED_QUEUED, "cancelled"),
        (Outcome.CANCELLED_RUNNING, "cancelled"),
        (Outcome.BAD_REQUEST, "bad_request"),
        (Outcome.UNAUTHORIZED, "bad_request"),
    ],
)
def test_every_outcome_has_one_count(outcome: Outcome, count: str) -> None:
    book = MinuteBook(DurationSketch, 20)
    book.ended(receipt("m", RequestClass.HIGH, "t", 1.0, outcome), 5.0)
    (row,) = rows_of([json.loads(json.dumps(book.take(5.0)))])
    names = ("ok", "refused", "failed", "cancelled", "bad_request")
    assert {name: row[name] for name in names if row[name]} == {count: 1}
