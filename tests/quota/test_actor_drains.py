"""Engines that drain, at the quota actor: by an operator's order, and with a node that leaves."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest

from serve_app.core.memory import DrainReport, DrainRequest
from serve_app.core.times import MOVE_S
from serve_app.errors import LeaseNotFound
from serve_app.quota.actor import GpuMemoryQuota
from tests.quota.actor_world import World, running, with_actor


def test_an_operator_drains_an_engine_and_sees_what_became_of_its_requests(world: World) -> None:
    async def scenario(actor: GpuMemoryQuota) -> None:
        reported = await running(actor)
        with pytest.raises(LeaseNotFound):
            await actor.exchange(DrainRequest("nobody"))
        await actor.exchange(DrainRequest(reported.owner, within_s=30.0))
        reply = await actor.engine(replace(reported, drain=DrainReport(30.0, running=3)))
        assert reply.drain
        assert 29.0 < reply.drain_s <= 30.0
        (shown,) = (await actor.figures())["drains"]
        assert (shown["replica"], shown["running"], shown["ended"]) == (reported.owner, 3, False)
        await actor.engine(replace(reported, gone=True, drain=DrainReport(0.0, finished=2, moved=1)))
        (shown,) = (await actor.figures())["drains"]
        assert (shown["finished"], shown["moved"], shown["ended"]) == (2, 1, True)

    with_actor(scenario)


def test_the_engines_of_a_node_that_leaves_are_notified(world: World) -> None:
    async def scenario(actor: GpuMemoryQuota) -> None:
        reported = await running(actor)
        world.leaves = {"n": time.monotonic() + MOVE_S + 20.0}
        reply = await actor.engine(replace(reported, drain_s=60.0))
        while not reply.drain:
            await asyncio.sleep(0.01)  # bound: SOON_S, for the next look at the nodes
            reply = await actor.engine(replace(reported, drain_s=60.0))
        assert reply.drain_s <= 20.0

    with_actor(scenario)
