"""Requests of a session or a prefix run where it is cached, whichever router they come through, while there is room."""

from __future__ import annotations

import time
from typing import Any

from serve_app.core.body_bounds import BYTES_PER_TOKEN
from serve_app.core.routing import AffinityKey, TargetReason, outliers
from serve_app.errors import EngineUnreachable
from serve_app.http.measuring import routing_key
from serve_app.router.replicas import ResultReporter
from serve_app.types import Operation
from tests.fakes.asgi_client import Client, Reply, ask
from tests.fakes.engines import FakeCluster, model, run, turns, until
from tests.fakes.router import LONG, SOON_S, Router

REPLICAS = ("r1", "r2", "r3")


def session(number: int) -> AffinityKey:
    return AffinityKey(f"tenant\0session\0{number}", TargetReason.SESSION)


async def places(router: Router, count: int = 20) -> list[str]:
    """Where one request of each session runs, one after the other, once this router has credit everywhere: before, it
    grants on what it has (a hint never makes a request wait)."""
    replicas = router.model.replica_set
    core = router.model.queue.core
    usable = list(filter(replicas.is_usable, replicas.running))
    await until(lambda: all(core.account(name)[1].slots for name in usable), SOON_S, "credit on each replica")
    for number in range(count):
        await router.ask(key=session(number))
    return list(router.places.values())[-count:]


def test_a_sessions_requests_find_the_same_replica_through_every_router() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add(*REPLICAS)
        first, second = [await Router(cluster, f"router {n}", routers=2).start() for n in range(2)]
        found = await places(first)
        assert set(found) == set(REPLICAS)
        assert await places(second) == found == await places(first)
        assert set(first.why.values()) == set(second.why.values()) == {TargetReason.SESSION}

    run(scenario)


def test_sessions_of_a_replica_that_leaves_are_spread_and_come_home_with_it() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add(*REPLICAS)
        router = await Router(cluster).start()
        found = await places(router)
        cluster.remove("r2")
        await turns(5)
        for before, now in zip(found, await places(router), strict=True):
            assert now == before if before != "r2" else now in ("r1", "r3")
        await cluster.add("r2")
        await turns(5)
        assert await places(router) == found

    run(scenario)


def test_an_ejected_replica_is_nobodys_home() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add(*REPLICAS)
        router = await Router(cluster).start()
        found = await places(router)
        sent = ResultReporter(router.model.replica_set, "r2", time.monotonic())
        sent.on_error(EngineUnreachable("gone"), connection_lost=True)
        sent.report()
        for before, now in zip(found, await places(router), strict=True):
            assert now == before if before != "r2" else now in ("r1", "r3")
        assert set(router.why.values()) == {TargetReason.SESSION}  # the next home is found by the key, too

    run(scenario, waits={(outliers, "FIRST_EJECTION_S"): 60.0})


def test_a_full_home_is_not_waited_for() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add(*REPLICAS)
        router = await Router(cluster).start()
        requests = [router.asking(LONG, key=session(0)) for _ in range(24)]
        await until(lambda: len(router.relayed) == 24, SOON_S, "all run")
        assert router.used == dict.fromkeys(REPLICAS, 8)
        assert router.places["1"] == router.places["2"]  # while little runs there is room at home
        for request in requests:
            request.cancel()

    run(scenario, model(slots=8))


def test_a_request_without_a_key_goes_where_most_is_free() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add(*REPLICAS)
        router = await Router(cluster).start()
        for _ in range(6):
            await router.ask()
        assert sorted(router.places.values()) == ["r1", "r1", "r2", "r2", "r3", "r3"]
        assert set(router.why.values()) == {TargetReason.MOST_FREE}
        assert router.model.placed == {("none", "most_free"): 6}

    run(scenario)


def test_conversations_of_one_prefix_run_where_it_is_and_the_metrics_say_so() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add(*REPLICAS)
        client = await Client(cluster).start()
        for number in range(8):
            for _ in range(3):
                before = {name: cluster[name].load.prompt_tokens for name in REPLICAS}
                reply: Reply = await client.post(ask(f"{number} and a prompt of some length", 3))
                assert reply.status == 200
                ran = [name for name in REPLICAS if cluster[name].load.prompt_tokens > before[name]]
                homes.setdefault(number, set()).update(ran)
        assert {len(found) for found in homes.values()} == {1}
        assert len(set.union(*homes.values())) > 1
        assert (await client.get("/metrics")).status == 200
        assert client.figures("serve_app_placements_total", "key", "place") == {("prefix", "home"): 24}

        sent = ResultReporter(client.model.replica_set, "r2", time.monotonic())
        sent.on_error(EngineUnreachable("gone"), connection_lost=True)
        sent.report()
        await client.get("/metrics")
        assert client.figures("serve_app_ejected") == {(): 1}
        assert client.figures("serve_app_replica_ejections_total", "reason") == {("lost",): 1}

    homes: dict[int, set[str]] = {}
    run(scenario, model(slots=8))


def test_a_key_is_the_sessions_else_the_prefixs_and_a_tenants_own() -> None:
    def key(
        body: dict[str, Any], tenant: str = "a", session_id: str | None = None, block: int = 16
    ) -> AffinityKey | None:
        tokens = -(-len(body["prompt"]) // BYTES_PER_TOKEN)
        return routing_key(Operation.COMPLETION, body, tenant, session_id, tokens, block)

    long = {"prompt": "x" * 65}
    short = {"prompt": "x" * 64}
    found = key(long)
    assert found is not None
    assert found.reason is TargetReason.PREFIX
    assert found == key({**long, "max_tokens": 7}) != key(long, "b")
    assert key(short) is None  # within one block of the cache
    named = key(short, session_id="s")
    assert named is not None
    assert named.reason is TargetReason.SESSION
    assert named == key(long, session_id="s") != key(long, "b", "s")
    assert routing_key(Operation.EMBEDDING, {"input": "x" * 65}, "a", None, 17, 16) is None
    assert len({key(long), named, key(long, session_id="t"), key({"prompt": "y" * 65})}) == 4
