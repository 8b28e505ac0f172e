"""What routers report of their classes and tokens, as the policy sees it: nothing of what has gone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ray.serve._private.metrics_utils import InMemoryMetricsStore

from autoscaling.policies import ClassSignals, Signals, merged
from autoscaling.ray_policy import ScalingPolicy
from autoscaling.readings import RouterCounts, router_counts
from autoscaling.unplaced import ReplicaCounts
from serve_app.core.shared_queue import ClassCounts
from serve_app.names import GRANTED_PREFIX, ROUTER, WAITING_PREFIX
from serve_app.router.scaling_report import class_numbers
from serve_app.types import RequestClass
from tests.autoscaling.fake_serve import ENGINE, MODEL, FakeServe
from tests.effort import examples

HIGH = RequestClass.HIGH
NORMAL = RequestClass.NORMAL
LOOK_BACK_S = 5.0


def reported(*classes: ClassCounts, **numbers: float) -> dict[str, float]:
    """A router's report."""
    counts = {
        f"{WAITING_PREFIX}{MODEL}": sum(one.waiting for one in classes),
        f"{GRANTED_PREFIX}{MODEL}": sum(one.granted for one in classes),
    }
    return counts | class_numbers(MODEL, classes) | {f"{name}_{MODEL}": value for name, value in numbers.items()}


@dataclass
class Stores:
    """Serve's own store in each router, and what reaches the controller."""

    stores: dict[str, InMemoryMetricsStore]

    def tell(self, router: str, now: float, report: dict[str, float]) -> None:
        store = self.stores.setdefault(router, InMemoryMetricsStore())
        store.add_metrics_point(report, now)  # type: ignore[arg-type]
        store.prune_keys_and_compact_data(now - LOOK_BACK_S)

    def counts(self) -> RouterCounts:
        raw: dict[str, dict[Any, Any]] = {}
        for router, store in self.stores.items():
            for name, series in store.data.items():
                raw.setdefault(str(name), {})[router] = series
        return router_counts(raw, lambda router: True)[ENGINE]


def test_classes_of_all_routers_are_added_and_the_longest_waits_count() -> None:
    stores = Stores({})
    stores.tell("a", 10.0, reported(ClassCounts(HIGH, 3, 2, 1.0, 4.0, 2.0), ClassCounts(NORMAL, 0, 5)))
    stores.tell("b", 7.0, reported(ClassCounts(HIGH, 1, 0, 1.0, 5.0, 0.5)))  # its clock is another
    found = stores.counts()
    assert found.classes == (ClassSignals("high", 4.0, 2.0, 2.0, 5.0, 2.0), ClassSignals("normal", 0.0, 5.0))


def test_a_class_that_has_gone_is_gone_with_the_next_report_though_serve_keeps_its_numbers() -> None:
    stores = Stores({})
    stores.tell("a", 10.0, reported(ClassCounts(HIGH, 3, 2, 1.0, 4.0, 2.0), ClassCounts(NORMAL, 1, 5)))
    stores.tell("a", 10.5, reported(ClassCounts(NORMAL, 0, 5)))
    kept = [name for name in stores.stores["a"].data if str(name).startswith("class_high")]
    assert len(kept) == 5
    assert stores.counts().classes == (ClassSignals("normal", 0.0, 5.0),)
    stores.tell("a", 11.0, reported(ClassCounts(HIGH, 2, 0)))
    assert stores.counts().classes == (ClassSignals("high", 2.0),), "a forecast that is not known any more is not kept"


CLASS_COUNTS = st.builds(
    lambda level, waiting, granted, share, wait_s, oldest_s: ClassCounts(
        level, waiting, granted, waiting * share, wait_s if waiting else None, oldest_s if waiting else 0.0
    ),
    *(st.sampled_from(list(RequestClass)), st.integers(0, 50), st.integers(0, 50), st.floats(0.0, 1.0)),
    *(st.none() | st.floats(0.0, 600.0), st.floats(0.0, 600.0)),
)
REPORT = st.lists(CLASS_COUNTS, unique_by=lambda counts: counts.request_class, max_size=4)


@given(reports=st.lists(st.tuples(st.sampled_from("abc"), REPORT), min_size=1, max_size=12))
@settings(max_examples=examples(100))
def test_classes_add_up_to_what_waits_and_runs_whatever_was_reported_before(
    reports: list[tuple[str, list[ClassCounts]]],
) -> None:
    stores = Stores({})
    newest: dict[str, list[ClassCounts]] = {}
    for number, (router, classes) in enumerate(reports):
        stores.tell(router, 0.5 * number, reported(*classes))
        newest[router] = classes
    found = stores.counts()
    assert sum(one.waiting for one in found.classes) == found.waiting
    assert sum(one.granted for one in found.classes) == found.granted
    for counts in found.classes:
        parts = [
            each for classes in newest.values() for each in classes if each.request_class.label == counts.request_class
        ]
        assert counts.waiting == sum(part.waiting for part in parts)
        assert counts.in_time <= counts.waiting
        assert counts.in_time == pytest.approx(sum(part.in_time for part in parts))
        assert counts.late == pytest.approx(counts.waiting - counts.in_time)
        assert counts.oldest_wait_s == max(part.oldest_wait_s for part in parts)
        forecasts = [part.forecast_s for part in parts if part.forecast_s is not None]
        assert counts.forecast_s == max(forecasts, default=None)


@pytest.mark.parametrize("value", [None, "many", float("nan"), -1.0])
def test_a_number_that_is_none_is_missing(value: Any) -> None:
    stores = Stores({})
    stores.tell("a", 1.0, reported(ClassCounts(HIGH, 3, 2, 1.0, 4.0, 2.0)) | {f"class_high_waiting_{MODEL}": value})
    assert stores.counts().classes == (ClassSignals("high", 0.0, 2.0, 0.0, 4.0, 2.0),)


def test_merging_no_part_gives_no_class() -> None:
    assert merged([]) == ()


def seen(serve: FakeServe, policy: ScalingPolicy) -> Signals:
    """What the policy sees at its next look."""
    policy(serve.contexts())
    found = policy.deployments[ENGINE].signals
    assert found is not None
    return found


def test_tokens_and_shares_reach_the_policy() -> None:
    serve = FakeServe(target=2, engines=("e1", "e2"), routers=("r1", "r2"))
    policy = ScalingPolicy(clock=serve.clock)
    for router in serve.routers:
        report = reported(
            ClassCounts(HIGH, 2, 3, 0.0, None, 7.0), tokens_waiting=80, tokens_arrived=40, tokens_served=30
        )
        serve.tell(ROUTER, router, **report)
    serve.tell(ENGINE, "e1", ongoing=5, kv_use=0.5, slot_use=1.0)
    serve.tell(ENGINE, "e2", ongoing=5, kv_use=0.25, slot_use=7.0)
    found = seen(serve, policy)
    assert (found.waiting_tokens, found.arrived_tokens_s, found.served_tokens_s) == (160.0, 80.0, 60.0)
    assert (found.kv_use, found.slot_use) == (0.375, 1.0)
    assert found.classes == (ClassSignals("high", 4.0, 6.0, 0.0, None, 7.0),)
    assert found.oldest_wait_s == 7.0
    serve.now += 1.0
    serve.router_tells("r1", waiting=0, granted=0)
    found = seen(serve, policy)
    assert (found.waiting_tokens, found.waiting) == (80.0, 2.0)


def test_routers_and_engines_of_the_release_before_leave_it_unknown() -> None:
    serve = FakeServe()
    serve.router_tells("r1", waiting=2, granted=3)
    serve.engine_tells("e1", 3)
    found = seen(serve, ScalingPolicy(clock=serve.clock))
    assert found.waiting == 2.0
    assert (found.classes, found.arrived_tokens_s, found.kv_use, found.oldest_wait_s, found.room) == ((), 0, 0, 0, None)


class Counts:
    """In the place of `UnplacedReplicas`."""

    def __init__(self) -> None:
        self.starting: frozenset[str] = frozenset()

    def tick(self, applications: Any) -> dict[str, ReplicaCounts]:
        return {ENGINE: ReplicaCounts(starting=self.starting, target=3)}


def test_the_oldest_start_counts_from_when_it_was_first_seen() -> None:
    serve = FakeServe(target=3)
    serve.router_tells("r1", waiting=2, granted=3)
    counts = Counts()
    policy = ScalingPolicy(clock=serve.clock, unplaced=counts)  # type: ignore[arg-type]
    ages = []
    for starting in ("", "ab", "ab", "b", "bc", "c", ""):
        serve.now += 10.0
        counts.starting = frozenset(starting)
        ages.append(seen(serve, policy).starting_s)
    assert ages == [0.0, 0.0, 10.0, 20.0, 30.0, 10.0, 0.0]
