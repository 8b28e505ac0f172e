"""Long requests take more of a replica's batch, from the settings to what the engine runs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import pytest

from serve_app.core.estimate import EstimateSource, LengthRule, RequestCost
from serve_app.core.receipts import explain
from serve_app.core.routing import FailureKind
from serve_app.errors import ConfigError
from serve_app.http.measuring import slots_of
from serve_app.settings import ModelSettings, engine_version, parse
from serve_app.types import Operation
from tests.fakes.asgi_client import Client, Reply, ask
from tests.fakes.engines import FakeCluster, model, run, turns, until
from tests.fakes.failing_engines import SHORT, Broken
from tests.fakes.router import LONG, SOON_S
from tests.http.test_app_receipts import receipts

# a long sequence weighs 4
SLOTS = 8
LONG_ONES = 2
RULE = LengthRule.of_batch(SLOTS, LONG_ONES, 100)


def settings(**more: Any) -> ModelSettings:
    return model(slots=SLOTS, max_long_seqs=LONG_ONES, **more)


def check(scenario: Callable[[Client, FakeCluster], Awaitable[None]], *replicas: str, **more: Any) -> None:
    async def started(cluster: FakeCluster) -> None:
        await cluster.add(*(replicas or ("r1",)))
        await scenario(await Client(cluster).start(), cluster)

    run(started, settings(), **more)


class Asked:
    """Requests that run until they are told to go."""

    def __init__(self, client: Client, cluster: FakeCluster) -> None:
        self._client = client
        self._cluster = cluster
        self._tasks: list[asyncio.Task[Reply]] = []

    async def add(self, *bodies: dict[str, Any]) -> None:
        self._tasks += [self._client.posting(body) for body in bodies]
        await turns(50)

    async def seen(self, running: int, waiting: int) -> None:
        """So many sequences run in the engine and so many requests wait, and it stays so."""
        queue = self._client.model.queue
        await until(lambda: self._cluster["r1"].work == running, SOON_S, f"{running} sequences run")
        await turns(50)
        assert (self._cluster["r1"].work, queue.waiting) == (running, waiting)

    async def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)


def long(**more: Any) -> dict[str, Any]:
    return ask("long", LONG, **more)


def short(**more: Any) -> dict[str, Any]:
    """Short by its bound; what makes it stay is that the engine is frozen."""
    return ask("short", 5, **more)


@pytest.mark.parametrize(
    ("bodies", "running", "waiting"),
    [
        ([long()] * 3, 2, 1),
        ([short()] * 9, 8, 1),
        ([long(), *[short()] * 5], 5, 1),
        ([long(n=2), short()], 2, 1),
        ([long(n=4), short()], 4, 1),  # would weigh 16: a whole replica
        ([short(n=4), long(), short()], 5, 1),
    ],
)
def test_a_batch_takes_many_short_ones_or_few_long_ones_or_a_mixture(
    bodies: list[dict[str, Any]], running: int, waiting: int
) -> None:
    async def scenario(client: Client, cluster: FakeCluster) -> None:
        cluster["r1"].freeze()
        asked = Asked(client, cluster)
        await asked.add(*bodies)
        await asked.seen(running, waiting)
        await asked.end()
        cluster["r1"].thaw()

    check(scenario)


def test_a_receipt_tells_the_weight() -> None:
    async def scenario(client: Client, cluster: FakeCluster) -> None:
        await client.post(ask("p", 200, n=2))
        await client.post(ask("p", 5, n=2))
        heavy, light = receipts(client)
        assert (heavy.trace.measure.at_once, heavy.trace.measure.slots) == (2, 8)
        assert (light.trace.measure.at_once, light.trace.measure.slots) == (2, 2)
        assert any(", in 8 of its slots for 2 long sequences" in line for line in explain(heavy))
        assert not any("slots" in line for line in explain(light))

    check(scenario)


def test_a_replica_that_failed_comes_back_where_every_request_is_long() -> None:
    """Its probe is one of those that there are, and has to find room for its weight."""

    async def scenario(client: Client, cluster: FakeCluster) -> None:
        broken = Broken(cluster, "r1")
        while not client.model.replica_set.ejected_count:
            assert (await client.post(ask("p", 200))).status == 200
        broken.mend()
        async with asyncio.timeout(SOON_S):
            while client.model.replica_set.ejected_count:
                assert (await client.post(ask("p", 200))).status == 200
        assert client.model.replica_set.ejections[FailureKind.CONSECUTIVE] >= 1

    check(scenario, "r1", "r2", waits=SHORT)


def test_a_change_of_it_is_the_routers_and_restarts_no_engine() -> None:
    version = partial(engine_version, on_cpu=True)
    assert version(settings()) == version(settings(long_from_tokens=5)) == version(model(SLOTS))

    async def scenario(client: Client, cluster: FakeCluster) -> None:
        cluster["r1"].freeze()
        asked = Asked(client, cluster)
        await asked.add(*[long()] * 2)
        client.model.configure(model(SLOTS), client.edge.settings.admission, 1)
        await asked.add(long())
        await asked.seen(2, 1)  # what runs keeps its weight
        await asked.end()
        cluster["r1"].thaw()

    check(scenario)


def test_it_is_off_until_somebody_sets_it() -> None:
    assert ModelSettings(name="m").length_rule is None
    found = parse({"models": [{"name": "m", "max_num_seqs": 64, "max_long_seqs": 16}]}).models[0]
    assert found.length_rule == LengthRule(100, 4)
    with pytest.raises(ConfigError, match="max_long_seqs"):
        parse({"models": [{"name": "m", "max_num_seqs": 8, "max_long_seqs": 9}]})


def test_only_what_generates_is_weighed_and_each_sequence_by_itself() -> None:
    def weighed(operation: Operation, sequences: int, prompt: int, output: int, rule: LengthRule | None = RULE) -> int:
        cost = RequestCost(prompt, output, EstimateSource.PRIOR)
        return slots_of(operation, sequences, cost, rule, SLOTS)

    assert weighed(Operation.CHAT, 1, 60, 39) == 1
    assert weighed(Operation.CHAT, 1, 60, 40) == 4
    assert weighed(Operation.CHAT, 1, 60, 40, None) == 1
    assert weighed(Operation.COMPLETION, 2, 60, 78) == 2  # 60 + 39 tokens each
    assert weighed(Operation.COMPLETION, 2, 60, 80) == 8  # a prompt is shared and read by both
    assert weighed(Operation.EMBEDDING, 3, 9000, 0) == 3
    assert weighed(Operation.EMBEDDING, 300, 9000, 0) == SLOTS
    assert weighed(Operation.RERANK, 3, 9000, 0) == 3
