"""A replica that fails gets nothing but probes, costs few requests, and is back with its first success."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from serve_app.aim import Why as Placed
from serve_app.core import outliers
from serve_app.core.outliers import CONSECUTIVE, Why
from serve_app.engine.protocol import Piece
from serve_app.errors import EngineFailed, EngineUnreachable
from serve_app.types import Outcome
from tests.shells.asgi_client import Client, ask
from tests.shells.fake_engines import FakeCluster, FakeHandle, model, run, turns, until
from tests.shells.fake_router import LONG, SOON_S, Router, freeze, thaw

SHORT = {(outliers, "FIRST_S"): 0.05}
NEVER = {(outliers, "FIRST_S"): 60.0}


class Broken:
    """The engines of these replicas fail every request, until they are mended."""

    def __init__(self, cluster: FakeCluster, *names: str) -> None:
        self.calls = 0
        self._whole = {name: cluster[name].engine.submit for name in names}
        self._cluster = cluster
        for name in names:
            cluster[name].engine.submit = self._submit  # type: ignore[method-assign]

    async def _submit(self, *_: Any, **__: Any) -> None:
        self.calls += 1
        raise EngineFailed("no luck")

    def mend(self) -> None:
        for name, submit in self._whole.items():
            self._cluster[name].engine.submit = submit  # type: ignore[method-assign]


def slots(router: Router) -> dict[str, int]:
    return {name: use.slots for name, use in router.view.replicas.items()}


def test_a_replica_that_fails_every_call_costs_three_tries_and_no_request() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add("r1", "r2")
        router = await Router(cluster).start()
        broken = Broken(cluster, "r1")
        for _ in range(12):
            await router.ask()
        await asyncio.gather(*(router.ask() for _ in range(12)))
        assert broken.calls == CONSECUTIVE
        assert set(router.places.values()) == {"r2"}
        assert (router.line.health.out, router.line.health.ejections[Why.CONSECUTIVE]) == (1, 1)
        assert slots(router) == {"r1": 0, "r2": 4}
        await router.settled()

    run(scenario, waits=NEVER)


def test_an_ejected_replica_is_probed_by_one_request_at_a_time_until_one_succeeds() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add("r1", "r2")
        router = await Router(cluster).start()
        broken, health = Broken(cluster, "r1"), router.line.health

        async def asked_until(condition: Any) -> None:
            while not condition():
                await asyncio.gather(router.ask(), router.ask())

        await asyncio.wait_for(asked_until(lambda: health.ejections[Why.PROBE] == 2), SOON_S)
        assert broken.calls == CONSECUTIVE + 2
        broken.mend()
        await asyncio.wait_for(asked_until(lambda: not health.out), SOON_S)
        assert slots(router) == {"r1": 4, "r2": 4}
        assert Placed.PROBE in router.why.values()
        await asyncio.gather(*(router.ask() for _ in range(8)))
        assert list(router.places.values())[-8:].count("r1") == 4
        await router.settled()

    run(scenario, waits=SHORT)


def test_where_everything_fails_half_of_the_replicas_stay_in_use() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add("r1", "r2", "r3", "r4")
        router = await Router(cluster).start()
        broken = Broken(cluster, *cluster.running)
        for _ in range(6):
            told = await asyncio.gather(*(router.ask() for _ in range(4)), return_exceptions=True)
            assert {type(error) for error in told} == {EngineFailed}
            assert router.line.health.out <= 2
            assert list(slots(router).values()).count(4) >= 2
        assert router.line.health.out == 2
        assert broken.calls <= 6 * 4 * 3
        await router.settled()

    run(scenario, waits=NEVER)


def test_a_probe_is_the_only_new_request_however_many_wait_and_whatever_still_runs_there() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add("r1", "r2")
        router = await Router(cluster).start()
        running = [router.asking(LONG) for _ in range(4)]
        await until(lambda: len(router.relayed) == 4, SOON_S, "two run on each")
        assert cluster["r1"].work == 2
        health, sent = router.line.health, router.line._replicas.sent("r1")
        sent.broke(EngineUnreachable("gone"), lost=True)
        sent.over()
        assert health.out == 1
        freeze(cluster, "r1")
        await until(lambda: health.on_trial("r1"), SOON_S, "its time is over")
        requests = [router.asking() for _ in range(12)]
        await until(lambda: cluster["r1"].work == 3, SOON_S, "the probe is there")
        one = next(n for n, place in enumerate(list(router.places.values())) if place == "r1")
        running.pop(one).cancel()
        await turns(50)
        assert (router.used["r1"], slots(router)["r1"]) == (2, 2)  # the other long one, and the probe
        thaw(cluster, "r1")
        await asyncio.gather(*requests)
        assert not health.out
        for request in running:
            request.cancel()
        await router.settled()
        assert slots(router) == {"r1": 4, "r2": 4}

    run(scenario, waits=SHORT)


def test_a_probe_that_says_nothing_is_followed_by_another() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add("r1", "r2")
        router = await Router(cluster).start()
        broken, health = Broken(cluster, "r1"), router.line.health
        while not health.out:
            await router.ask()
        broken.mend()
        freeze(cluster, "r1")
        await until(lambda: health.on_trial("r1"), SOON_S, "its time is over")
        for _ in range(3):
            probe = router.asking()
            await until(lambda: cluster["r1"].work == 1, SOON_S, "it is there")
            probe.cancel()
            await until(lambda: not cluster["r1"].work, SOON_S, "its client has left")
            assert (health.on_trial("r1"), slots(router)["r1"]) == (True, 1)
        thaw(cluster, "r1")
        await router.ask()
        assert not health.out
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
        health = router.line.health
        assert health.out == 1
        await until(lambda: health.on_trial("r1"), SOON_S, "its time is over")
        assert slots(router) == {"r1": 4}
        await router.ask(slots=4)
        assert not health.out
        await router.settled()

    run(scenario, waits=SHORT)


def test_what_clients_do_says_nothing_of_a_replica() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add("r1", "r2")
        client = await Client(cluster).start()
        for _ in range(20):
            reply = await client.post(ask("p", -1))
            assert reply.status == 400
        freeze(cluster, "r1", "r2")
        for _ in range(5):
            leaving = [client.posting(ask("p", 5)) for _ in range(8)]
            await until(lambda: cluster["r1"].work + cluster["r2"].work == 8, SOON_S, "all run")
            for task in leaving:
                task.cancel()
            await asyncio.wait(leaving)
            await until(lambda: not cluster["r1"].work + cluster["r2"].work, SOON_S, "all gone")
        thaw(cluster, "r1", "r2")
        assert client.outcomes == {Outcome.BAD_REQUEST: 20, Outcome.CANCELLED_RUNNING: 40}
        assert set(client.line.health.ejections.values()) == {0}
        assert client.line.health.out == 0

    run(scenario)


def test_a_replica_that_breaks_every_answer_in_the_middle_is_ejected() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add("r1", "r2")
        router = await Router(cluster).start()

        async def breaking(submit: Any) -> AsyncIterator[Piece]:
            yield Piece(b"data: ", 200, "sse")
            raise EngineFailed("it broke")

        cluster["r1"].engine._backend.run = breaking  # type: ignore[method-assign, assignment]
        failed = 0
        for _ in range(20):
            try:
                await router.ask()
            except EngineFailed:
                failed += 1
        assert (failed, router.line.health.ejections[Why.CONSECUTIVE]) == (CONSECUTIVE, 1)
        await router.settled()

    run(scenario, waits=NEVER)


def test_where_no_more_may_be_out_a_lost_request_pauses_before_it_tries_again() -> None:
    class Cut:
        """No channel comes about."""

        def __init__(self, below: FakeHandle) -> None:
            self.below = below
            self.tries = 0

        async def attach(self, *_: Any, **__: Any) -> None:
            self.tries += 1
            raise EngineUnreachable("no connection")

        def __getattr__(self, name: str) -> Any:
            return getattr(self.below, name)

    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add("r1", "r2")
        cut: list[Cut] = []
        router = await Router(cluster, over=lambda below: cut.append(Cut(below)) or cut[0], max_wait_s=0.4).start()
        request = router.asking()
        await until(lambda: router.line.waiting == 1 and not router.waiting, SOON_S, "it pauses, and counts")
        with pytest.raises(EngineUnreachable):
            await request
        assert router.line.health.out == 1
        assert 3 <= cut[0].tries <= 8
        await router.settled()

    run(scenario, waits=NEVER)


def test_an_ejected_replica_that_leaves_is_no_longer_counted_and_is_as_new_when_it_returns() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add("r1", "r2")
        router = await Router(cluster).start()
        broken = Broken(cluster, "r1")
        while not router.line.health.out:
            await router.ask()
        broken.mend()
        cluster.remove("r1")
        await turns(5)
        assert router.line.health.out == 0
        assert slots(router) == {"r2": 4}
        await cluster.add("r1")
        await turns(5)
        assert slots(router) == {"r1": 4, "r2": 4}
        await router.settled()

    run(scenario, model(slots=4), waits=NEVER)
