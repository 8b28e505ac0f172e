"""What a sequence takes of a batch by its length."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.common.own_pools import set_replica
from serve_app.core.estimate.length import LengthRule
from serve_app.core.queue import Admission, Arrival, Grant, QueuePolicy
from serve_app.types import RequestClass

FIELD = LengthRule.of_batch(64, 16, 100)


def test_under_100_tokens_64_else_16() -> None:
    assert [FIELD.slots(1, tokens, 64) for tokens in (1, 99.9, 100, 5000)] == [1, 1, 4, 4]
    assert 64 // FIELD.slots(1, 99, 64) == 64
    assert 64 // FIELD.slots(1, 100, 64) == 16


@pytest.mark.parametrize(
    ("batch", "long_ones", "weight"), [(64, 64, 1), (64, 24, 3), (64, 1, 64), (8, 3, 3), (1, 1, 1)]
)
def test_never_more_long_ones_than_given(batch: int, long_ones: int, weight: int) -> None:
    rule = LengthRule.of_batch(batch, long_ones, 100)
    assert rule.long_weight == weight
    assert batch // rule.slots(1, 100, batch) <= long_ones


@given(st.integers(1, 64), st.floats(0, 1e6), st.integers(1, 64), st.integers(1, 64), st.integers(1, 200))
def test_a_request_weighs_its_sequences_at_least_and_no_more_than_a_replica(
    sequences: int, tokens_each: float, largest: int, long_ones: int, long_from: int
) -> None:
    slots = LengthRule.of_batch(64, long_ones, long_from).slots(sequences, tokens_each, largest)
    assert sequences <= slots <= max(sequences, largest)
    assert slots == sequences or tokens_each >= long_from


@given(st.lists(st.tuples(st.integers(1, 8), st.booleans()), max_size=60), st.integers(1, 64))
def test_what_is_granted_is_within_the_batch_by_sequences_and_by_weight(
    asked: list[tuple[int, bool]], batch: int
) -> None:
    rule = LengthRule.of_batch(batch, max(1, batch // 4), 100)
    line = Admission(QueuePolicy(max_queued=1000, max_wait_s=60.0))
    set_replica(line, "r", batch, 0.0)
    running: set[str] = set()
    for number, (sequences, long) in enumerate(asked):
        slots = rule.slots(sequences, 100 if long else 1, batch)
        actions = line.on_arrive(Arrival(str(number), RequestClass.NORMAL, "t", slots), 0.0)
        running |= {one.request_id for one in actions if isinstance(one, Grant)}
    granted = [asked[int(name)] for name in running]
    assert sum(sequences for sequences, _ in granted) <= batch
    assert sum(rule.slots(sequences, 100 if long else 1, batch) for sequences, long in granted) <= batch
    if any(sequences <= batch for sequences, _ in asked):
        assert running  # one that weighs more than the replica has runs alone
