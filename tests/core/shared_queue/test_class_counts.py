"""A model's requests in one router by class, against a count of all of them."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.core.queue import Arrival, Backlog
from serve_app.core.receipts import ServiceLevel
from serve_app.core.shared_queue.class_counts import ClassCounts, class_counts
from serve_app.core.shared_queue.messages import ClassQueueFigures, QueueFigures
from serve_app.core.shared_queue.router_pending import PendingRequest, PendingRequests
from serve_app.types import RequestClass
from tests.effort import examples

NOW = 1000.0
M = "m"
CLASSES = st.sampled_from(list(RequestClass))
# class, seconds since it came to the queue, seconds since it first arrived beyond these, estimated tokens
WAITING = st.lists(st.tuples(CLASSES, st.floats(0.0, 90.0), st.sampled_from([0.0, 30.0]), st.integers(1, 500)))
RATES = st.lists(st.none() | st.floats(0.1, 50.0), min_size=4, max_size=4)


def figures(rates: list[float | None], waiting: Counter[RequestClass]) -> QueueFigures:
    backlogs = [Backlog(0, waiting[level], 1.0, 0.0, rate) for level, rate in zip(RequestClass, rates, strict=True)]
    return QueueFigures(1, M, tuple(ClassQueueFigures(backlog.slots, False, backlog, None) for backlog in backlogs))


@given(waiting=WAITING, granted=st.lists(CLASSES), rates=RATES, levels=st.dictionaries(CLASSES, st.floats(0.1, 60.0)))
@settings(max_examples=examples(200))
def test_classes_add_up_and_have_what_a_count_of_all_requests_has(
    waiting: list[tuple[RequestClass, float, float, int]],
    granted: list[RequestClass],
    rates: list[float | None],
    levels: dict[RequestClass, float],
) -> None:
    pending = PendingRequests()
    for number, (level, wait_s, age_s, tokens) in enumerate(waiting):
        arrival = Arrival(f"{number}", level, "t", cost_tokens=tokens, age_s=age_s)
        pending.add(PendingRequest(M, arrival, NOW - wait_s), 600.0)
        pending.add(PendingRequest("another", Arrival(f"other-{number}", level, "t"), NOW - 99.0), 600.0)
    in_flight: Any = SimpleNamespace(count_by_class=lambda model: Counter(granted))
    by_class = Counter(level for level, *_ in waiting)
    known = figures(rates, by_class)
    slo = {level: ServiceLevel(ttft_s) for level, ttft_s in levels.items()}
    found = class_counts(M, pending, in_flight, known, slo, NOW)
    assert [one.request_class for one in found] == sorted({*by_class, *granted}, reverse=True)
    assert sum(one.waiting for one in found) == pending.count(M) == len(waiting)
    assert sum(one.granted for one in found) == len(granted)
    assert pending.tokens(M) == sum(tokens for *_, tokens in waiting)
    for counts in found:
        waits = [wait_s for level, wait_s, *_ in waiting if level is counts.request_class]
        assert counts.waiting == len(waits)
        assert 0.0 <= counts.in_time <= counts.waiting
        assert abs(counts.oldest_wait_s - max(waits, default=0.0)) < 1e-6
        rate = rates[counts.request_class]
        assert (counts.forecast_s is None) == (rate is None or not waits)
        if counts.forecast_s is None or counts.request_class not in levels:
            assert counts.in_time == 0.0


def test_a_class_that_only_runs_has_no_forecast_and_no_wait() -> None:
    in_flight: Any = SimpleNamespace(count_by_class=lambda model: Counter({RequestClass.HIGH: 3}))
    found = class_counts(M, PendingRequests(), in_flight, figures([1.0] * 4, Counter()), {}, NOW)
    assert found == (ClassCounts(RequestClass.HIGH, 0, 3),)
