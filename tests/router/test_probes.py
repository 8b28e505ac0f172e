"""After its ejection a replica gets one request at a time, until one of them has succeeded."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from serve_app.core.queue.admission import Arrival
from serve_app.core.routing import FailureKind
from serve_app.core.routing import TargetReason as Placed
from serve_app.core.routing.outliers import MAX_CONSECUTIVE_FAILURES
from serve_app.errors import EngineFailed, EngineUnreachable
from serve_app.router.replicas import ResultReporter
from serve_app.transport import channel
from tests.fakes.engines import FakeCluster, run, turns, until
from tests.fakes.failing_engines import SHORT, Broken, ejected, probe_is_due, takes
from tests.fakes.router import LONG, NORMAL, SOON_S, Router, freeze, held, thaw


def test_an_ejected_replica_is_probed_by_one_request_at_a_time_until_one_succeeds() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add("r1", "r2")
        router = await Router(cluster).start()
        broken = Broken(cluster, "r1")
        replicas = router.model.replica_set

        async def asked_until(condition: Any) -> None:
            while not condition():
                await asyncio.gather(router.ask(), router.ask())

        await asyncio.wait_for(asked_until(lambda: replicas.ejections[FailureKind.PROBE] == 2), SOON_S)
        assert broken.calls == MAX_CONSECUTIVE_FAILURES + 2
        broken.mend()
        await asyncio.wait_for(asked_until(lambda: not replicas.ejected_count), SOON_S)
        assert takes(router) == {"r1": "all", "r2": "all"}
        assert Placed.PROBE in router.why.values()
        await asyncio.gather(*(router.ask() for _ in range(8)))
        assert list(router.places.values())[-8:].count("r1") == 4
        await router.settled()

    run(scenario, waits=SHORT)


def test_a_probe_is_the_only_new_request_however_many_wait_and_whatever_still_runs_there() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add("r1", "r2")
        router = await Router(cluster).start()
        running = [router.asking(LONG) for _ in range(4)]
        await until(lambda: len(router.relayed) == 4, SOON_S, "two run on each")
        assert cluster["r1"].work == 2
        replicas = router.model.replica_set
        sent = ResultReporter(replicas, "r1", time.monotonic())
        sent.on_error(EngineUnreachable("gone"), connection_lost=True)
        sent.report()
        assert replicas.ejected_count == 1
        freeze(cluster, "r1")
        await until(lambda: replicas.is_on_probation("r1"), SOON_S, "its time is over")
        requests = [router.asking() for _ in range(12)]
        await until(lambda: cluster["r1"].work == 3, SOON_S, "the probe is there")
        number = next(n for n, place in enumerate(list(router.places.values())) if place == "r1")
        running.pop(number).cancel()
        await turns(50)
        assert (router.used["r1"], takes(router)["r1"]) == (2, "none")  # the other long one, and the probe
        thaw(cluster, "r1")
        await asyncio.gather(*requests)
        assert not replicas.ejected_count
        for request in running:
            request.cancel()
        await router.settled()
        assert takes(router) == {"r1": "all", "r2": "all"}

    run(scenario, waits=SHORT)


def test_no_request_waits_for_a_replica_that_cannot_be_reached() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add("r1", "r2")
        router = await Router(cluster).start()
        first = [router.asking(50) for _ in range(4)]
        await until(lambda: cluster["r1"].work == 2, SOON_S, "some run there")
        cluster.kill("r1", reported=False)
        await asyncio.gather(*first)
        replicas = router.model.replica_set
        moved = len(first)
        assert sum(trace.losses for trace in router.traces.values()) == 2
        while replicas.ejections[FailureKind.PROBE] < 2:
            await router.ask()
        assert len(router.traces) > moved
        later = list(router.traces)[moved:]
        assert {router.places[name] for name in later} == {"r2"}
        assert not sum(router.traces[name].losses for name in later)
        await router.settled()

    run(scenario, waits=SHORT | {(channel, "CHANNEL_ATTACH_S"): 0.05})


def test_a_model_that_is_closed_probes_no_replica_any_more() -> None:
    """The replica is dead, and Serve counts it as running: each connection to it would take `CHANNEL_ATTACH_S`."""

    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add("r1", "r2")
        router = await Router(cluster).start()
        cluster.kill("r1", reported=False)
        replicas = router.model.replica_set
        sent = ResultReporter(replicas, "r1", time.monotonic())
        sent.on_error(EngineUnreachable("gone"), connection_lost=True)
        sent.report()
        await until(lambda: replicas.is_on_probation("r1"), SOON_S, "it is probed")
        await router.model.close()
        sent = ResultReporter(replicas, "r2", time.monotonic())  # of a request that still ran
        sent.on_error(EngineUnreachable("gone"), connection_lost=True)
        sent.report()
        probes = [task for task in asyncio.all_tasks() if task.get_name().startswith("probe-")]
        await asyncio.wait_for(asyncio.gather(*probes, return_exceptions=True), SOON_S)
        assert replicas.ejections[FailureKind.LOST] == 1

    run(scenario, waits=SHORT)


def test_a_probe_that_says_nothing_is_followed_by_another() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add("r1", "r2")
        router = await Router(cluster).start()
        broken = Broken(cluster, "r1")
        replicas = router.model.replica_set
        await ejected(router, "r1")
        broken.mend()
        freeze(cluster, "r1")
        for _ in range(3):
            await probe_is_due(router, "r1")
            probe = router.asking()
            await until(lambda: cluster["r1"].work == 1, SOON_S, "it is there")
            probe.cancel()
            await until(lambda: not cluster["r1"].work, SOON_S, "its client has left")
            assert (replicas.is_on_probation("r1"), takes(router)["r1"]) == (True, "one")
        thaw(cluster, "r1")
        await probe_is_due(router, "r1")
        await router.ask()
        assert not replicas.ejected_count
        await router.settled()

    run(scenario, waits=SHORT)


def test_a_probes_place_that_nobody_used_is_for_the_next_request() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add("r1", "r2")
        router = await Router(cluster).start()
        broken = Broken(cluster, "r1")
        replicas = router.model.replica_set
        await ejected(router, "r1")
        broken.mend()
        await probe_is_due(router, "r1")
        async with held(router, Arrival("unsent", NORMAL, "tenant", affinity="r1")) as granted:
            assert (granted.replica_id, replicas.replica_to_probe()) == ("r1", None)
        await probe_is_due(router, "r1")
        await router.ask()
        assert not replicas.ejected_count
        await router.settled()

    run(scenario, waits=SHORT)


def test_a_probe_counts_by_its_first_frame() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add("r1", "r2")
        router = await Router(cluster).start()
        broken = Broken(cluster, "r1")
        replicas = router.model.replica_set
        await ejected(router, "r1")
        broken.mend()
        await probe_is_due(router, "r1")
        probe = router.asking(LONG)
        await until(lambda: not replicas.ejected_count, SOON_S, "it is back")
        assert not probe.done()
        assert takes(router) == {"r1": "all", "r2": "all"}
        probe.cancel()
        await router.settled()

    run(scenario, waits=SHORT)


def test_an_only_replica_on_probation_serves_requests_of_any_size() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add("r1")
        router = await Router(cluster).start()
        broken = Broken(cluster, "r1")
        with pytest.raises(EngineFailed):
            await router.ask()
        broken.mend()
        replicas = router.model.replica_set
        assert replicas.ejected_count == 1
        await until(lambda: replicas.is_on_probation("r1"), SOON_S, "its time is over")
        assert takes(router) == {"r1": "all"}
        await router.ask(slots=4)
        assert not replicas.ejected_count
        await router.settled()

    run(scenario, waits=SHORT)
