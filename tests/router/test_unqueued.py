"""Work without a slot: bounded for each tenant, in turns of the tenants."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from serve_app.errors import Overloaded
from serve_app.router import RequestRuns
from serve_app.router.unqueued import MAX_WAITING, PER_REPLICA
from serve_app.transport import Frame, ResponseStream, Submit, TokenUsage
from serve_app.types import Operation
from tests.fakes.engines import FakeCluster, run, turns, until
from tests.fakes.router import SOON_S, Router


class Tokenizer:
    """An engine replica that does work without a slot only as the test says; requests have their tenant's name."""

    def __init__(self, cluster: FakeCluster) -> None:
        self.running: list[str] = []
        self._gates: list[asyncio.Event] = []
        cluster["r1"].engine.server.run = self._run

    async def _run(self, submit: Submit, put: Callable[[Frame], None]) -> None:
        gate = asyncio.Event()
        self.running.append(submit.request_id)
        self._gates.append(gate)
        await gate.wait()
        place = self._gates.index(gate)
        del self._gates[place], self.running[place]
        put(Frame(submit.number, b"{}", 200, "json", events=1, usage=TokenUsage()))

    async def finish(self) -> None:
        """End the oldest work that runs."""
        await until(lambda: bool(self._gates), SOON_S, "one runs")
        self._gates[0].set()
        await turns(2)

    async def finish_all(self, works: list[asyncio.Task[None]]) -> None:
        def done() -> bool:
            for gate in self._gates:
                gate.set()
            return all(task.done() for task in works)

        await until(done, SOON_S, "all works end")


def asking(router: Router, tenant: str, relay: Callable[[], object] = turns) -> asyncio.Task[None]:
    async def relayed(stream: ResponseStream, frames: list[Frame]) -> None:
        await relay()  # type: ignore[misc]

    def make(number: int) -> Submit:
        return Submit(number, tenant, Operation.TOKENIZE, {"prompt": "two words"})

    return asyncio.create_task(router.model.serve_unqueued(make, relayed, RequestRuns(), tenant))


async def begun(cluster: FakeCluster, **admission: float) -> tuple[Router, Tokenizer]:
    router = await Router(cluster, **admission).start()
    await cluster.add("r1")
    await turns(10)
    return router, Tokenizer(cluster)


def test_beside_a_tenant_with_many_works_another_one_s_runs_at_once() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        router, tokenizer = await begun(cluster)
        heavy = [asking(router, "heavy") for _ in range(20)]
        await until(lambda: len(tokenizer.running) == PER_REPLICA // 2, SOON_S, "the part of one tenant runs")
        light = asking(router, "light")
        await until(lambda: "light" in tokenizer.running, SOON_S, "the other tenant's work runs")
        assert tokenizer.running.count("heavy") == PER_REPLICA // 2
        await tokenizer.finish_all([*heavy, light])

    run(scenario)


def test_tenants_take_turns_whatever_each_of_them_has_waiting() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        router, tokenizer = await begun(cluster)
        works = [asking(router, "a") for _ in range(10)]
        works += [asking(router, name) for name in ("b", "c", "d", "b", "c", "d")]
        await until(lambda: len(tokenizer.running) == PER_REPLICA, SOON_S, "as many run as may")
        assert sorted(tokenizer.running) == ["a", "a", "b", "c"]
        await tokenizer.finish()
        await tokenizer.finish()  # two of the first tenant: its next one, and then another tenant's
        await until(lambda: sorted(tokenizer.running) == ["a", "b", "c", "d"], SOON_S, "the turn is another tenant's")
        await tokenizer.finish_all(works)

    run(scenario)


def test_more_than_a_tenant_may_have_waiting_is_refused_and_a_wait_has_an_end() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        router, tokenizer = await begun(cluster, max_wait_s=0.5)
        held = [asking(router, "heavy") for _ in range(PER_REPLICA // 2 + MAX_WAITING)]
        await until(lambda: len(tokenizer.running) == PER_REPLICA // 2, SOON_S, "its part runs")
        with pytest.raises(Overloaded) as refused:
            await asking(router, "heavy")
        assert refused.value.retry_after_s is not None
        light = asking(router, "light")
        await until(lambda: "light" in tokenizer.running, SOON_S, "the bound is the tenant's own")
        waited = await asyncio.gather(*held[-MAX_WAITING:], return_exceptions=True)
        assert {type(error) for error in waited} == {Overloaded}
        await tokenizer.finish_all([*held, light])
        again = asking(router, "heavy")
        await until(lambda: tokenizer.running == ["heavy"], SOON_S, "those that gave up hold no turn")
        await tokenizer.finish()
        await again

    run(scenario)


def test_a_client_that_does_not_read_holds_no_turn_and_one_that_leaves_gives_it_back() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        router, tokenizer = await begun(cluster)
        read = asyncio.Event()
        slow = [asking(router, "a", read.wait) for _ in range(PER_REPLICA // 2)]
        await until(lambda: len(tokenizer.running) == PER_REPLICA // 2, SOON_S, "they run")
        await tokenizer.finish()
        await tokenizer.finish()
        left = [asking(router, "a") for _ in range(PER_REPLICA)]
        await until(lambda: len(tokenizer.running) == PER_REPLICA // 2, SOON_S, "others of the tenant run")
        for task in left:
            task.cancel()
        await asyncio.wait(left)
        last = asking(router, "a")
        await until(lambda: bool(tokenizer.running), SOON_S, "the turns are free again")
        await tokenizer.finish_all([last])
        read.set()
        await asyncio.gather(*slow)

    run(scenario)
