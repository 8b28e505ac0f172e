"""What a router may give its requests, and from when on it may not."""

from __future__ import annotations

import pytest

from serve_app.core.memory.budgets import FENCE_S, Budgets
from serve_app.core.memory.grants import OWNER_TTL_S
from serve_app.core.memory.shares import PoolTarget

POOL = "engine"


def told(target: int = 100, version: int = 1, sent_at: float = 0.0) -> Budgets:
    budgets = Budgets()
    budgets.open(POOL)
    budgets.on_epoch(1)
    budgets.on_targets((PoolTarget(POOL, version, target),), 1, sent_at)
    return budgets


def test_requests_hold_no_more_than_the_target() -> None:
    budgets = told()
    assert budgets.hold("r1", POOL, 60, 0.0)
    assert not budgets.hold("r2", POOL, 41, 0.0)
    assert budgets.held("r2") == 0
    assert budgets.hold("r3", POOL, 40, 0.0)
    assert budgets.release("r1") == 60
    assert budgets.release("r1") == 0
    assert budgets.hold("r2", POOL, 41, 0.0)


def test_a_request_grows_within_the_target_only() -> None:
    budgets = told()
    budgets.hold("r", POOL, 60, 0.0)
    assert budgets.grow("r", 40, 0.0)
    assert not budgets.grow("r", 1, 0.0)
    assert budgets.held("r") == 100
    assert not budgets.grow("unknown", 1, 0.0)
    assert budgets.release("r") == 100


def test_nothing_begins_before_the_first_target_nor_after_the_fence() -> None:
    budgets = Budgets()
    budgets.open(POOL)
    assert not budgets.hold("r", POOL, 1, 0.0)
    budgets = told(sent_at=10.0)
    assert budgets.hold("r1", POOL, 1, 10.0 + FENCE_S - 0.01)
    assert not budgets.hold("r2", POOL, 1, 10.0 + FENCE_S)
    assert FENCE_S < OWNER_TTL_S, "it stops giving before its share can be another's"


def test_the_fence_is_counted_from_when_the_word_was_sent_and_never_goes_back() -> None:
    budgets = told(sent_at=10.0)
    budgets.on_targets((), 1, 5.0)  # a late answer
    assert budgets.hold("r", POOL, 1, 13.0)


def test_an_older_target_or_epoch_changes_nothing() -> None:
    budgets = told(target=100, version=5)
    budgets.on_targets((PoolTarget(POOL, 4, 500),), 1, 0.0)
    assert not budgets.hold("r", POOL, 101, 0.0)
    assert budgets.on_epoch(2)
    assert not budgets.on_epoch(1)
    assert not budgets.on_targets((PoolTarget(POOL, 9, 500),), 1, 100.0)
    assert not budgets.hold("r", POOL, 1, 50.0)


def test_what_runs_goes_on_above_a_target_that_fell_and_is_said() -> None:
    budgets = told(target=100)
    budgets.hold("r", POOL, 80, 0.0)
    budgets.report(POOL, 0)
    budgets.on_targets((PoolTarget(POOL, 2, 30),), 1, 0.0)
    assert budgets.report(POOL, 0).limit == 80
    budgets.release("r")
    assert budgets.gives_back(POOL)
    assert budgets.report(POOL, 7) == type(budgets.report(POOL, 0))(POOL, 2, 30, 0, 7)
    assert not budgets.gives_back(POOL)


def test_a_pool_that_left_takes_what_its_requests_held() -> None:
    budgets = told()
    budgets.hold("r", POOL, 10, 0.0)
    budgets.drop(POOL)
    budgets.drop(POOL)
    assert (budgets.held("r"), budgets.pool_of("r"), budgets.pools(), budgets.release("r")) == (0, None, [], 0)


def test_a_request_has_one_budget_of_one_token_at_least() -> None:
    budgets = told()
    budgets.hold("r", POOL, 1, 0.0)
    with pytest.raises(ValueError, match="'r'"):
        budgets.hold("r", POOL, 1, 0.0)
    with pytest.raises(ValueError, match="'s'"):
        budgets.hold("s", POOL, 0, 0.0)
