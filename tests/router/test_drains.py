"""Requests on a replica that drains: they finish, or are moved at the deadline, and each answer is the undisturbed one.

`Router.ask` compares each text with what the engine has to say.
"""

from __future__ import annotations

import asyncio

import pytest

from serve_app.router import drain_timers
from tests.fakes.engines import FakeCluster, model, run, until
from tests.fakes.router import SOON_S, Router

LONG = 600  # tokens: 0.6 s at the fake's rate, several times the drains below
WITHIN_S = 0.1


async def begun(cluster: FakeCluster, router: Router, count: int = 4) -> list[asyncio.Task[object]]:
    """Streams that run, half of them on each of two replicas."""
    asked = [router.asking(LONG, preemptible=True) for _ in range(count)]
    await until(lambda: len(router.relayed) == count, SOON_S, "all run")
    assert {cluster[name].work for name in ("r1", "r2")} == {count // 2}
    return asked  # type: ignore[return-value]


def end_drain(cluster: FakeCluster) -> None:
    draining = cluster["r1"].engine.draining
    assert draining is not None
    draining.cancel()  # it would end this process


def test_streams_on_a_replica_that_drains_are_moved_at_its_deadline_without_a_loss() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add("r1", "r2")
        router = await Router(cluster).start()
        asked = await begun(cluster, router)
        cluster["r1"].engine.drain(WITHIN_S)
        await until(lambda: not cluster["r1"].work, SOON_S, "the replica is empty")
        assert not any(one.done() for one in asked)
        state = cluster["r1"].engine.drain_state
        assert state is not None
        assert (state.moved, state.finished) == (2, 0)
        await asyncio.gather(*asked)
        assert cluster.submits.count("r2") == 4
        assert not sum(router.model.replica_set.ejections.values())
        traces = router.traces.values()
        assert sorted(trace.moved for trace in traces) == [0, 0, 1, 1]
        assert {(trace.preempted, trace.losses) for trace in traces} == {(0, 0)}
        end_drain(cluster)

    run(scenario, model(slots=8))


def test_streams_that_end_before_the_deadline_finish_where_they_are() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add("r1", "r2")
        router = await Router(cluster).start()
        asked = await begun(cluster, router)
        cluster["r1"].engine.drain(60.0)
        await asyncio.gather(*asked)
        state = cluster["r1"].engine.drain_state
        assert state is not None
        assert (state.moved, state.finished) == (0, 2)
        assert len(cluster.submits) == 4
        end_drain(cluster)

    run(scenario, model(slots=8))


@pytest.mark.parametrize("returns", [False, True])
def test_streams_on_a_replica_that_leaves_serves_set_are_moved_after_its_drain_s(returns: bool) -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add("r1", "r2")
        router = await Router(cluster).start()
        asked = await begun(cluster, router)
        cluster.remove("r1")
        if returns:
            await asyncio.sleep(WITHIN_S / 4)  # before the deadline
            await cluster.add("r1")
        await asyncio.gather(*asked)
        assert cluster.submits.count("r2") == (2 if returns else 4)

    run(scenario, model(slots=8, drain_s=WITHIN_S))


@pytest.mark.parametrize("preemptible", [True, False])
def test_a_stream_on_a_replica_that_stands_still_and_should_have_ended_continues_elsewhere(
    monkeypatch: pytest.MonkeyPatch, preemptible: bool
) -> None:
    """Serve has taken it out of its set, and its process cannot be killed: its connections stay open."""
    monkeypatch.setattr(drain_timers, "OVERDUE_S", WITHIN_S)

    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add("r1")
        router = await Router(cluster).start()
        asked = router.asking(LONG, preemptible=preemptible)
        await until(lambda: len(router.relayed) == 1, SOON_S, "it runs")
        cluster["r1"].stand_still()
        await cluster.add("r2")
        cluster.remove("r1")
        await asked
        assert cluster.submits == ["r1", "r2"]
        cluster["r1"].thaw()

    run(scenario, model(slots=8, drain_s=WITHIN_S))


def test_a_stream_on_the_only_replica_waits_for_the_next_one() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add("r1")
        router = await Router(cluster).start()
        asked = router.asking(LONG, preemptible=True)
        await until(lambda: len(router.relayed) == 1, SOON_S, "it runs")
        cluster["r1"].engine.drain(WITHIN_S)
        await until(lambda: router.model.queue.waiting == 1, SOON_S, "it waits")
        await cluster.add("r2")
        await asked
        assert cluster.submits == ["r1", "r2"]
        end_drain(cluster)

    run(scenario, model(slots=8))
