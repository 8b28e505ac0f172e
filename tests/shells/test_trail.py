"""What is noted of a request on its way: its KV tokens, for as long as it has them."""

from __future__ import annotations

from serve_app.budget import Budget
from serve_app.core.admission import Arrival
from serve_app.trail import Trail
from serve_app.types import RequestClass


def budget(tokens: int) -> Budget:
    return Budget(Arrival("r", RequestClass.NORMAL, "t", cost_tokens=tokens), None)


def test_tokens_count_from_when_they_are_given_until_they_come_back() -> None:
    trail = Trail()
    trail.hold(budget(100), 10.0)
    trail.release(12.5)
    trail.release(99.0)
    assert trail.kv_token_s == 250.0


def test_a_lost_replica_ends_the_holding_and_the_next_one_adds_to_it() -> None:
    trail = Trail()
    trail.hold(budget(100), 10.0)
    trail.lost(11.0)
    trail.hold(budget(50), 20.0)
    trail.release(22.0)
    assert (trail.losses, trail.kv_token_s) == (1, 200.0)


def test_a_request_that_never_had_tokens_held_none() -> None:
    trail = Trail()
    trail.lost(5.0)
    assert (trail.losses, trail.kv_token_s) == (1, 0.0)
