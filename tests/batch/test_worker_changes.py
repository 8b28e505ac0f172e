"""Whose batches a worker brings on first, and how often it looks which ones there are."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from serve_app.batch.worker import LOOK_REST
from serve_app.core.batches import BatchStatus
from tests.batch.lane import Lane, wall
from tests.fakes.batch_store import FakeBatchStore
from tests.fakes.virtual_time import run_in_virtual_time, time_passes

BATCHES = 200
LOOK_S = 0.5  # of 3,000 batches that have not ended
BOUND_S = 86400.0  # of virtual time


def test_a_tenant_with_one_batch_does_not_wait_for_the_many_of_another() -> None:
    async def play() -> None:
        lane = Lane()
        many = [lane.submit([{}], name=f"m{number}", tenant="many") for number in range(BATCHES)]
        small = lane.submit([{}], name="one", tenant="one")
        lane.start()
        await lane.ended(small)
        waiting = [batch_id for batch_id in many if lane.batch(batch_id).status is BatchStatus.VALIDATING]
        assert len(waiting) > BATCHES / 2
        await lane.ended(*many)
        await lane.end()

    run_in_virtual_time(play(), bound_s=BOUND_S)


def test_looks_that_take_long_leave_the_store_to_the_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []

    async def slow(store: FakeBatchStore) -> Any:
        looks.append(wall())
        await time_passes(LOOK_S)
        return await store.__getattr__("work")()

    monkeypatch.setattr(FakeBatchStore, "work", slow, raising=False)

    async def play() -> None:
        lane = Lane()
        many = [lane.submit([{}], name=f"m{number}") for number in range(BATCHES)]
        lane.start()
        await lane.ended(*many)
        between = [later - before for before, later in itertools.pairwise(looks)]
        assert min(between) >= LOOK_S * (1 + LOOK_REST)
        await lane.end()

    run_in_virtual_time(play(), bound_s=BOUND_S)
