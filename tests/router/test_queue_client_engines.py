"""Routers over one line in the quota actor, with engines behind it: which of them is used, and by how many at once."""

from __future__ import annotations

import asyncio

from tests.fakes import quota
from tests.fakes.engines import FakeCluster, model, run, turns, until
from tests.fakes.failing_engines import SHORT, Broken, ejected
from tests.fakes.quota import SOON_S
from tests.fakes.router import LONG, Router, freeze

SLOTS = 2
ENGINES = ("r1", "r2")


class Stack:
    """Routers of one cluster."""

    def __init__(self, cluster: FakeCluster, routers: list[Router]) -> None:
        self.actor = cluster.quota
        self.routers = routers
        self.lines = [router.client for router in routers]

    async def at_rest(self) -> None:
        """Nothing waits or runs, and the ledger holds credit and nothing else."""

        def rest() -> bool:
            if self.actor.requests:
                return False
            if any(one.model.queue.granted + one.model.waiting for one in self.routers):
                return False
            for engine in self.actor.slots:
                free = list(self.actor.free(engine))
                for number, line in enumerate(self.lines):
                    credit = line.core.accounts.credit(engine)
                    if credit != self.actor.held(f"router {number}", engine):
                        return False
                    free = [one + other for one, other in zip(free, credit, strict=True)]
                if tuple(free) != self.actor.whole(engine):
                    return False
            return True

        await until(rest, SOON_S, "nothing is held but credit")


async def stack(cluster: FakeCluster, count: int = 3, *engines: str) -> Stack:
    """Routers that the actor knows, over engines that all of them reach."""
    await cluster.add(*(engines or ENGINES))
    return Stack(cluster, [await Router(cluster, f"router {number}", count).start() for number in range(count)])


def test_engines_run_what_they_have_room_for_and_no_more_however_many_routers_ask() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        setup = await stack(cluster)
        asked = [router.asking(5 + n % 7) for n in range(20) for router in setup.routers]
        most = dict.fromkeys(ENGINES, 0)
        while not all(one.done() for one in asked):
            await asyncio.sleep(0)
            for name in ENGINES:
                most[name] = max(most[name], cluster[name].work)
        await asyncio.gather(*asked)
        assert most == dict.fromkeys(ENGINES, SLOTS)
        await setup.at_rest()

    run(scenario, model(slots=SLOTS), waits=quota.WAITS)


def test_an_engine_that_dies_costs_no_request_of_any_router_and_no_slot() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        setup = await stack(cluster)
        freeze(cluster, "r1")
        asked = [router.asking(20) for _ in range(4) for router in setup.routers]
        await until(lambda: cluster["r1"].work == SLOTS, SOON_S, "it is in use, and nobody has seen anything")
        cluster.kill("r1")
        await asyncio.gather(*asked)
        await setup.at_rest()
        assert all(list(line.core.accounts.by_engine) == ["r2"] for line in setup.lines)

    run(scenario, model(slots=SLOTS), waits=quota.WAITS)


def test_an_engine_that_drains_finishes_what_it_runs_and_gets_nothing_new() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        setup = await stack(cluster)
        (first, *_) = setup.routers
        running = [first.asking(LONG) for _ in range(2 * SLOTS)]
        await until(lambda: len(first.places) == 2 * SLOTS, SOON_S, "all slots are in use")
        cluster.remove("r1")
        await turns(10)
        after = [router.asking() for router in setup.routers]
        on_r2 = [task for number, task in enumerate(running, 1) if first.places[f"{number}"] == "r2"]
        assert len(on_r2) == SLOTS
        on_r2[0].cancel()
        await asyncio.gather(*after)
        assert cluster["r1"].work == SLOTS
        assert {router.places[max(router.places, key=int)] for router in setup.routers} == {"r2"}
        for task in running:
            task.cancel()
        await asyncio.wait(running)
        await until(lambda: "r1" not in setup.lines[0].core.accounts.by_engine, SOON_S, "the first is done with it")
        setup.actor.engine_ends("r1")
        await setup.at_rest()

    run(scenario, model(slots=SLOTS), waits=quota.WAITS)


def test_an_ejected_engine_gets_one_probe_and_is_used_again_by_all() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        setup = await stack(cluster)
        first = setup.routers[0]
        broken = Broken(cluster, "r1")
        await asyncio.wait_for(ejected(first, "r1"), SOON_S)
        calls = broken.calls
        await until(lambda: first.model.replica_set.replica_to_probe() == "r1", SOON_S, "its time is over")
        await until(lambda: credit(setup, 0, "r1") > 0, SOON_S, "it may be used again")
        broken.mend()
        sent = cluster.submits.count("r1")
        await asyncio.wait_for(first.ask(), SOON_S)
        assert cluster.submits.count("r1") == sent + 1, "the probe"
        assert broken.calls == calls
        assert not first.model.replica_set.ejected_count
        full = [setup.routers[n % 3].asking(LONG) for n in range(2 * SLOTS)]
        await until(lambda: cluster["r1"].work + cluster["r2"].work == 2 * SLOTS, SOON_S, "every slot is in use")
        for task in full:
            task.cancel()
        await asyncio.wait(full)
        await setup.at_rest()

    run(scenario, model(slots=SLOTS), waits=quota.WAITS | SHORT)


def credit(setup: Stack, router: int, engine: str) -> int:
    return setup.lines[router].core.accounts.credit(engine)[0]


def test_while_an_engine_is_on_probation_no_more_than_its_probe_is_sent_there() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        setup = await stack(cluster, 2)
        first = setup.routers[0]
        broken = Broken(cluster, "r1")
        await asyncio.wait_for(ejected(first, "r1"), SOON_S)
        full = [first.asking(LONG) for _ in range(SLOTS)]
        await until(lambda: cluster["r2"].work == SLOTS, SOON_S, "the engine that is well is full")
        calls = broken.calls
        asked = [first.asking() for _ in range(6)]
        await until(lambda: broken.calls > calls, SOON_S, "the probe")
        await turns(20)
        assert broken.calls == calls + 1, "the others wait for the engine that is well"
        broken.mend()
        for task in full:
            task.cancel()
        await asyncio.gather(*asked)
        await setup.at_rest()

    run(scenario, model(slots=SLOTS), waits=quota.WAITS | SHORT)
