"""What a router reports to Serve: by class, tokens and rates, and no name of a class without requests."""

from __future__ import annotations

import asyncio
import time

import pytest

from serve_app.core.receipts import ServiceLevel
from serve_app.names import (
    CLASS_GRANTED,
    CLASS_OLDEST_WAIT_S,
    CLASS_WAITING,
    GRANTED_PREFIX,
    TOKENS_ARRIVED_PREFIX,
    TOKENS_SERVED_PREFIX,
    TOKENS_WAITING_PREFIX,
    WAITING_PREFIX,
    class_prefix,
)
from serve_app.router import scaling_report
from serve_app.settings import AutoscaleSettings
from serve_app.types import RequestClass
from tests.fakes.engines import FakeCluster, model, run, until
from tests.fakes.router import LONG, SOON_S, Router

M = "m"
LEVELS = {level: ServiceLevel(1.0) for level in RequestClass}
PER_MODEL = 8  # names


def report(router: Router, later_s: float = 0.0) -> dict[str, float]:
    return scaling_report({M: router.model}, LEVELS, time.monotonic() + later_s)


def of_class(found: dict[str, float], level: RequestClass, number: str) -> float:
    return found.get(f"{class_prefix(level.label, number)}{M}", 0.0)


def test_a_router_reports_each_class_that_has_requests_and_no_other() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add("r1")
        router = await Router(cluster).start()
        assert len(report(router)) == PER_MODEL
        high = [router.asking(LONG, cls=RequestClass.HIGH, cost_tokens=30) for _ in range(4)]
        await until(lambda: router.model.queue.granted == 4, SOON_S, "four run")
        low = [router.asking(LONG, cls=RequestClass.LOW, cost_tokens=30) for _ in range(3)]
        await until(lambda: router.model.waiting == 3, SOON_S, "three wait")
        found = report(router, later_s=5.0)
        assert of_class(found, RequestClass.HIGH, CLASS_GRANTED) == found[f"{GRANTED_PREFIX}{M}"] == 4
        assert of_class(found, RequestClass.LOW, CLASS_WAITING) == found[f"{WAITING_PREFIX}{M}"] == 3
        assert 5.0 <= of_class(found, RequestClass.LOW, CLASS_OLDEST_WAIT_S) < 5.0 + SOON_S
        assert found[f"{TOKENS_WAITING_PREFIX}{M}"] >= 90
        assert {name.split("_")[1] for name in found if name.startswith("class_")} == {"high", "low"}
        for request in low:
            request.cancel()
        await asyncio.wait(low)
        found = report(router)
        assert {name.split("_")[1] for name in found if name.startswith("class_")} == {"high"}
        for request in high:
            request.cancel()
        await asyncio.wait(high)
        await router.settled()
        assert len(report(router)) == PER_MODEL

    run(scenario)


def test_tokens_that_come_and_are_served_have_rates_without_rows() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add("r1")
        router = await Router(cluster).start()
        began = time.monotonic()
        router.model.token_rates(began)
        await asyncio.gather(*(router.ask(20, cost_tokens=50) for _ in range(3)))
        await router.ask(20, cost_tokens=50, is_row=True)
        await router.settled()
        found = scaling_report({M: router.model}, LEVELS, began + 10.0)
        served = found[f"{TOKENS_SERVED_PREFIX}{M}"]
        assert 60 <= served * 10.0 < 3 * 50  # 20 of output each, and the prompts
        assert found[f"{TOKENS_ARRIVED_PREFIX}{M}"] == pytest.approx(served), "the estimates of 50 are over"

    run(scenario, model(replicas=AutoscaleSettings()))
