"""What the records of a name say of each of its models, and how sure that is."""

from __future__ import annotations

import random
from typing import Any

import pytest

from serve_app.core.names import compared
from serve_app.core.names.comparison import median, share
from serve_app.types import Outcome


def record(model: str = "old", outcome: Outcome = Outcome.OK, **more: Any) -> dict[str, Any]:
    kept = {"asked_model": "chat", "model": model, "outcome": outcome.value, "hops": [], "refused": None}
    return kept | {"first_token_s": 0.5, "itl_s": 0.02, "output_tokens": 100} | more


def test_each_model_has_the_medians_of_its_answers_and_none_of_others() -> None:
    other_name = record(asked_model="other", first_token_s=9.0)
    own = record(asked_model=None, first_token_s=9.0)
    found = [record(first_token_s=0.25), record(), record("new", output_tokens=7, itl_s=None), other_name, own]
    old, new, spare = compared("chat", ["old", "new", "spare"], found)
    assert (old.requests, old.first_token_s, old.output_tokens) == (2, (0.375, 0.25, 0.5), (100, 100, 100))
    assert (new.requests, new.output_tokens, new.token_s) == (1, (7, 7, 7), None)
    assert (spare.requests, spare.errors, spare.first_token_s) == (0, None, None)


def test_what_left_a_model_is_its_error_and_what_a_client_did_is_nobody_s() -> None:
    found = [
        record("old", hops=[["new", "engine_failed"]]),
        record("new", Outcome.ENGINE_FAILED),
        record("new", Outcome.REFUSED, refused="queue_full"),
        record("new"),
        record("new", Outcome.REFUSED, refused="rate_limit"),
        record("new", Outcome.BAD_REQUEST),
        record("new", Outcome.CANCELLED_RUNNING),
    ]
    old, new = compared("chat", ["old", "new"], found)
    assert old.errors is not None
    assert new.errors is not None
    assert (old.requests, old.errors.value) == (1, 0.0)
    assert (new.requests, new.errors.value) == (4, 0.75)


@pytest.mark.parametrize(("count", "total", "low", "high"), [(0, 10, 0.0, 0.2775), (10, 100, 0.0552, 0.1744)])
def test_the_interval_of_a_share_is_wilson_s(count: int, total: int, low: float, high: float) -> None:
    found = share(count, total)
    assert found is not None
    assert found == pytest.approx((count / total, low, high), abs=1e-4)


@pytest.mark.parametrize("size", [20, 101])
def test_the_interval_of_a_median_holds_the_true_one_as_often_as_it_says(size: int) -> None:
    rng = random.Random(size)
    runs = 2000
    held = 0
    for _ in range(runs):
        found = median([rng.expovariate(1.0) for _ in range(size)])
        assert found is not None
        held += found.low <= 0.6931 <= found.high
    assert held / runs >= 0.94
    assert median([None]) is None
    assert median([3.0]) == (3.0, 3.0, 3.0)
