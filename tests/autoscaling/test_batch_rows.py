"""Rows of batches, as the policy in Serve's controller sees them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.autoscaling.fake_serve import GARBAGE, Controller, quick


def test_rows_of_batches_are_no_load_and_keep_one_replica() -> None:
    serve = quick(routers=("r1", "r2"))
    for router in serve.routers:
        serve.router_tells(router, waiting=20, granted=64)
        serve.router_tells_rows(router, 80)
    serve.engine_tells("e1", ongoing=8)
    assert Controller(serve).tick() == 1  # 8 requests and 160 rows
    for router in serve.routers:
        serve.router_tells(router, waiting=0, granted=80)
        serve.router_tells_rows(router, 80)
    serve.engine_tells("e1", ongoing=0)
    assert Controller(serve).tick() == 1


@pytest.mark.parametrize("wrong", GARBAGE)
def test_rows_that_are_no_number_take_nothing_from_the_load(wrong: Any) -> None:
    serve = quick()
    serve.router_tells("r1", waiting=25, granted=10)
    serve.router_tells_rows("r1", wrong)
    assert Controller(serve).tick() == 4
