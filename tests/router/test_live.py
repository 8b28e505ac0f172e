"""What a router says to those with consoles: who waits there, what ends, which replicas it uses."""

from __future__ import annotations

import asyncio

from serve_app.core.live import RouterPart
from serve_app.ray_adapter import CALL_ERRORS
from serve_app.router import Throughput, all_parts, router_part
from tests.fakes.engines import MODEL, FakeCluster, model, run, until
from tests.fakes.failing_engines import SHORT, Broken, ejected, probe_is_due
from tests.fakes.router import LONG, SOON_S, Router


def part_of(router: Router, throughput: Throughput, *tenants: str, now: float = 1.0) -> RouterPart:
    core = router.model.queue.core
    return router_part("router", core, {MODEL: router.model}, throughput, tenants, now)


def test_slots_and_waiting_requests_are_those_of_this_router() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add("r1")
        router = await Router(cluster).start()
        running = router.asking(LONG, slots=4)
        await until(lambda: bool(router.relayed), SOON_S, "it runs")
        waiting = router.asking(5)
        await until(lambda: router.waiting == 1, SOON_S, "it waits")
        part = part_of(router, Throughput())
        assert part.slots == {"r1": (4, 4)}
        assert (part.waiting, part.running, part.ejected) == ({MODEL: 1}, {MODEL: 1}, ())
        assert part.rows == (), "the quota actor has them"
        for task in (running, waiting):
            task.cancel()
        await asyncio.wait({running, waiting})
        await router.settled()

    run(scenario, model(slots=4))


def test_tokens_of_a_stream_count_while_it_runs() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add("r1")
        router = await Router(cluster).start()
        throughput = Throughput()
        task = router.asking(LONG)
        key = (MODEL, "tenant")

        def tokens() -> int:
            return part_of(router, throughput, "tenant").counts[key][1]

        await until(lambda: tokens() > 10, SOON_S, "tokens")
        counts = part_of(router, throughput, "tenant").counts
        assert counts[key] == counts[MODEL, None]
        assert counts[key][0] == 0, "it has not ended"
        task.cancel()
        await asyncio.wait({task})
        throughput.count_ended(MODEL, "tenant", 100)
        throughput.count_ended(MODEL, "another", 7)
        await router.settled()
        counts = part_of(router, throughput, "tenant").counts
        assert counts == {(MODEL, None): (2, 107), (MODEL, "tenant"): (1, 100)}, "no tenant that nobody asks for"

    run(scenario, model())


def test_a_replica_is_ejected_for_those_who_watch_until_it_takes_all_requests_again() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add("r1", "r2")
        router = await Router(cluster).start()
        broken = Broken(cluster, "r1")
        await ejected(router, "r1")
        assert part_of(router, Throughput()).ejected == ("r1",)
        await probe_is_due(router, "r1")
        assert part_of(router, Throughput()).ejected == ("r1",), "it takes one request at a time"
        broken.mend()
        await router.ask()
        assert part_of(router, Throughput()).ejected == ()
        await router.settled()

    run(scenario, waits=SHORT)


def test_routers_that_do_not_answer_are_left_out() -> None:
    async def fails() -> RouterPart:
        raise CALL_ERRORS[-1]

    async def answers(name: str) -> RouterPart:
        return RouterPart(name, 1.0)

    async def ask(tenants: tuple[str, ...]) -> list[object]:
        assert tenants == ("acme",)
        return [answers("a"), fails(), answers("b")]

    found = asyncio.run(all_parts(ask, ("acme",)))  # type: ignore[arg-type]
    assert sorted(found) == ["a", "b"]
