"""A grant needs slots and KV tokens on one replica."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from benchmarks.common.own_pools import set_replica
from serve_app.core.pools import Holder, RequestPool, TokenSpace
from serve_app.core.queue import Admission
from serve_app.core.queue.capacity import Capacity
from serve_app.core.queue.tenant_queue import QueuedRequest
from tests.core.queue.events import HIGH, NORMAL, of, state, where
from tests.core.queue.simulated_engines import patient


def make_queue(**replicas: tuple[int, int | None]) -> Admission:
    queue = Admission(patient(min_share=0.0))
    for name, (slots, kv_tokens) in replicas.items():
        set_replica(queue, name, slots, 0.0, kv_tokens)
    return queue


def asks(name: str, tokens: int, slots: int = 1, **more: str) -> object:
    return dataclasses.replace(of("t", name, NORMAL, 1, tokens - 1), slots=slots, **more)


def come(queue: Admission, *arrivals: object) -> dict[str, str]:
    return where([action for one in arrivals for action in queue.on_arrive(one, 0.0)])  # type: ignore[arg-type]


def test_a_request_runs_only_where_both_are_free() -> None:
    queue = make_queue(a=(1, 1000), b=(8, 100))
    assert come(queue, asks("p", 60), asks("q", 60)) == {"p": "a", "q": "b"}
    assert come(queue, asks("r", 60)) == {}  # b has slots, a has tokens
    assert state(queue)[-1] == {"a": (1, 0, 1000, 940, ["p"]), "b": (8, 7, 100, 40, ["q"])}
    assert where(queue.on_done("q", 1.0)) == {"r": "b"}


def test_where_most_tokens_are_free_is_taken_and_affinity_where_it_fits() -> None:
    queue = make_queue(a=(8, 500), b=(2, 900))
    assert come(queue, asks("p", 100), asks("q", 700)) == {"p": "b", "q": "b"}
    assert come(queue, asks("r", 100, affinity="b"), asks("s", 100, affinity="a")) == {"r": "a", "s": "a"}


def test_several_slots_are_found_where_tokens_are_fewer() -> None:
    queue = make_queue(a=(2, 900), b=(8, 500), c=(6, 600))
    assert come(queue, asks("p", 400, slots=4), asks("q", 450, slots=4)) == {"p": "c", "q": "b"}


def test_more_tokens_than_any_replica_has_with_its_slots_is_refused_at_once() -> None:
    queue = make_queue(a=(1, 1000), b=(8, 100))
    assert come(queue, asks("p", 1001), asks("q", 101, slots=2)) == {"p": "too_large", "q": "too_large"}
    assert come(queue, asks("r", 1000)) == {"r": "a"}


def test_small_requests_do_not_starve_one_with_many_tokens() -> None:
    queue = make_queue(a=(8, 100))
    come(queue, *(asks(f"r{number}", 25) for number in range(4)))
    assert come(queue, asks("large", 90)) == {}
    for number in range(3):
        assert come(queue, asks(f"small{number}", 10)) == {}
        assert queue.on_done(f"r{number}", 1.0) == []
    assert where(queue.on_done("r3", 1.0)) == {"large": "a", "small0": "a"}


def test_a_request_with_many_tokens_holds_back_one_replica_only() -> None:
    queue = make_queue(a=(8, 100), b=(8, 100))
    come(queue, asks("p", 40), asks("q", 50))
    assert come(queue, asks("large", 90)) == {}
    assert come(queue, asks("s0", 45), asks("s1", 10)) == {"s0": "b"}  # "a" has more free, so it is kept
    assert where(queue.on_done("p", 1.0)) == {"large": "a", "s1": "a"}


def test_among_requests_of_one_size_nobody_passes() -> None:
    queue = make_queue(a=(8, 100))
    come(queue, asks("p", 64))
    assert come(queue, asks("first", 40), asks("second", 36), asks("other size", 30)) == {}
    assert where(set_replica(queue, "b", 8, 1.0, 38)) == {"other size": "b"}


def test_a_higher_class_passes_what_does_not_fit() -> None:
    queue = make_queue(a=(8, 100))
    come(queue, asks("p", 64), asks("large", 90))
    assert where(queue.on_arrive(of("t", "urgent", HIGH, 1, 29), 0.0)) == {"urgent": "a"}


def test_a_replica_that_shrank_gets_nothing_until_it_is_below() -> None:
    queue = make_queue(a=(8, 100))
    come(queue, asks("p", 40), asks("q", 40))
    set_replica(queue, "a", 8, 1.0, 50)
    assert come(queue, asks("r", 5)) == {}
    assert where(queue.on_done("p", 2.0)) == {"r": "a"}


def test_where_tokens_are_short_the_forecast_does_not_count_slots_that_cannot_be_used() -> None:
    queue = make_queue(a=(100, 100))
    free = make_queue(a=(2, None))
    for admission in (queue, free):
        for number in range(8):
            admission.on_arrive(asks(f"r{number}", 50), 0.0)  # type: ignore[arg-type]
        admission.on_done("r0", 4.0)
        admission.on_done("r1", 4.0)
    assert queue.snapshot(4.0).drain_slots_per_s == pytest.approx(free.snapshot(4.0).drain_slots_per_s or 0.0)
    assert queue.forecast.arrival_wait_s(NORMAL, 1, "t") == pytest.approx(
        free.forecast.arrival_wait_s(NORMAL, 1, "t") or 0.0
    )


def test_wrong_tokens_change_nothing() -> None:
    queue = make_queue(a=(1, 10))
    before = state(queue)
    with pytest.raises(ValueError, match="tokens"):
        queue.on_progress("p", -1, 0.0)
    with pytest.raises(ValueError, match="tokens"):
        queue.on_done("p", 0.0, 1, -1)
    with pytest.raises(ValueError, match="prompt_tokens"):
        of("t", "p", prompt=-1)
    assert state(queue) == before


def test_a_take_that_does_not_fit_changes_nothing() -> None:
    capacity = Capacity()
    capacity.set_pool("a", RequestPool("a", TokenSpace(100, 100), 2))
    capacity.take(QueuedRequest(of("t", "p", NORMAL, 10, 50), 0.0, 1, Holder("")))
    pool = capacity.replicas["a"].pool
    wrong: list[dict[str, Any]] = [{"slots": 2}, {"cost_tokens": 41}, {"only_replica": "b"}, {"avoid_replicas": {"a"}}]
    for more in wrong:
        with pytest.raises(ValueError, match="cannot take"):
            capacity.take(QueuedRequest(dataclasses.replace(of("t", "q", NORMAL, 1, 0), **more), 0.0, 2, Holder("")))
    assert (pool.used_slots, pool.used_tokens, list(capacity.replicas["a"].running)) == (1, 60, ["p"])
    assert (capacity.used, capacity.free, capacity.kv_used) == (1, 1, 60)
    assert capacity.drop_replica("a") == ["p"]
    assert (capacity.slots, capacity.used, capacity.free, capacity.kv_used, capacity.kv_tokens) == (0, 0, 0, 0, 0)
