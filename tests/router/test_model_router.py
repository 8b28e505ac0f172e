"""A request waits its turn, holds its slot as long as the engine works for it, and gives it back exactly once."""

from __future__ import annotations

import asyncio
import sys
import time

import pytest

from serve_app.core.queue.admission import Arrival
from serve_app.errors import Overloaded, Unavailable
from serve_app.router import RequestRuns
from serve_app.router import replicas as replica_module
from serve_app.transport import Frame, ResponseStream, Submit, channel
from serve_app.types import Operation, RequestClass
from tests.fakes.engines import FakeCluster, model, run, turns, until
from tests.fakes.router import LONG, NORMAL, SOON_S, Router, held

HIGH = RequestClass.HIGH


def test_a_cancel_while_waiting_gives_the_place_back() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add("r1")
        router = await Router(cluster, max_queued=1).start()
        running = router.asking(LONG)
        await until(lambda: len(router.relayed) == 1, SOON_S, "one runs")
        gone = router.asking()
        await turns(5)
        assert router.waiting == 1
        gone.cancel()
        await asyncio.wait({gone})
        assert router.waiting == 0
        last = router.asking()  # takes the place; a full line would refuse it
        await turns(5)
        running.cancel()
        await last
        assert (router.relayed, len(cluster.submits)) == (["1", "3"], 2)
        await router.settled()

    run(scenario, model(slots=1))


@pytest.mark.parametrize("after", range(12))
def test_a_cancel_around_the_turn_of_its_grant_gives_the_slot_back(after: int) -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add("r1")
        router = await Router(cluster).start()
        async with held(router, Arrival("holder", NORMAL, "tenant")):
            gone = router.asking()
            next_one = router.asking()
            await turns(5)
            assert router.waiting == 2
        await turns(after)
        gone.cancel()
        await next_one
        await asyncio.wait({gone})
        assert gone.cancelled()
        await router.settled()

    run(scenario, model(slots=1))


@pytest.mark.parametrize("after", range(8))
def test_a_cancel_around_the_turn_of_its_refusal_leaves_nothing(after: int) -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add("r1")
        router = await Router(cluster, max_queued=1).start()
        async with held(router, Arrival("holder", NORMAL, "tenant")):
            gone = router.asking()
            await turns(5)
            higher = router.asking(cls=HIGH)
            await turns(after)
            gone.cancel()
            await asyncio.wait({gone})
            assert gone.cancelled() or isinstance(gone.exception(), Overloaded)
            assert router.waiting == 1
        await higher
        await router.settled()

    run(scenario, model(slots=1))


@pytest.mark.parametrize("cause", ["queue_full", "deadline", "timeout"])
def test_a_refusal_says_why_and_when_to_come_back(cause: str) -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add("r1")
        bounds = {"queue_full": {"max_queued": 0}, "timeout": {"max_wait_s": 0.05}}.get(cause, {})
        router = await Router(cluster, **bounds).start()
        running = router.asking(LONG)
        await until(lambda: len(router.relayed) == 1, SOON_S, "one runs")
        more = {"deadline": time.monotonic() + 0.05} if cause == "deadline" else {}
        with pytest.raises(Overloaded) as refused:
            await asyncio.wait_for(router.ask(**more), SOON_S)
        assert (refused.value.code, refused.value.status) == (cause, 429)
        assert refused.value.retry_after_s is not None
        assert refused.value.retry_after_s > 0
        assert len(cluster.submits) == 1
        running.cancel()
        await router.settled()

    run(scenario, model(slots=1))


def test_without_a_replica_a_request_waits_a_while_and_is_refused() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        router = await Router(cluster, no_replica_wait_s=0.5).start()
        with pytest.raises(Unavailable) as refused:
            await asyncio.wait_for(router.ask(), SOON_S)
        assert (refused.value.code, refused.value.status) == ("no_replica", 503)
        assert refused.value.retry_after_s is not None
        late = router.asking()
        await cluster.add("r1")
        await late
        assert router.model.ready

    run(scenario)


def test_two_routers_never_give_the_engine_more_than_it_runs() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add("r1")
        routers = [await Router(cluster, f"router {n}", routers=2).start() for n in range(2)]
        await asyncio.gather(*(router.ask() for router in routers))  # both attached, each with its share
        requests = [router.asking(20 + n % 7) for n in range(40) for router in routers]
        most = 0
        while not all(request.done() for request in requests):
            await asyncio.sleep(0)
            most = max(most, cluster["r1"].work)
        await asyncio.gather(*requests)
        assert most == 6
        for router in routers:
            await router.settled()

    run(scenario, model(slots=6))


def test_whichever_router_has_requests_may_use_the_whole_engine() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add("r1")
        routers = [await Router(cluster, f"router {n}", routers=2).start() for n in range(2)]
        for router in (*routers, routers[0]):
            requests = [router.asking(LONG) for _ in range(6)]
            await until(lambda: router.used["r1"] == 6, SOON_S, "all slots are its")  # noqa: B023
            for request in requests:
                request.cancel()
            await asyncio.wait(requests)

    run(scenario, model(slots=6))


def test_a_slot_is_free_when_the_engine_is_done_and_not_when_the_client_has_read() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add("r1")
        router = await Router(cluster).start()
        unread = asyncio.Event()

        async def wait() -> None:
            await unread.wait()

        slow = router.asking(30, then=wait)
        await until(lambda: router.relayed == ["1"], SOON_S, "the slow client has its first frames")
        await asyncio.wait_for(router.ask(), SOON_S)
        cluster.remove("r1")
        assert await until(lambda: not cluster["r1"].calls, SOON_S, "the replica drained") < 1.0
        assert router.model.queue.granted == 0
        unread.set()
        await slow
        await router.settled()

    run(scenario, model(slots=1))


def test_work_without_a_slot_runs_at_once_and_elsewhere_when_a_replica_fails() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        router = await Router(cluster, no_replica_wait_s=0.05).start()
        reported: list[bytes] = []

        async def relay(stream: ResponseStream, frames: list[Frame]) -> None:
            assert frames[-1].usage is not None
            reported.append(frames[0].body)

        def make(number: int) -> Submit:
            return Submit(number, "id", Operation.TOKENIZE, {"prompt": "two words"})

        with pytest.raises(Unavailable) as refused:
            await router.model.serve_unqueued(make, relay, RequestRuns(), "people")
        assert refused.value.code == "no_replica"
        await cluster.add("r1", "r2")
        await turns(10)
        busy = [router.asking(LONG) for _ in range(8)]
        await until(lambda: len(router.relayed) == 8, SOON_S, "every slot taken")
        await router.model.serve_unqueued(make, relay, RequestRuns(), "people")
        for request in busy:
            request.cancel()
        await asyncio.wait(busy)
        cluster["r1"].mute = cluster["r2"].mute = True
        await until(lambda: not cluster["r1"].connections and not cluster["r2"].connections, SOON_S, "detached")
        cluster["r2"].mute = False
        await asyncio.gather(*(router.model.serve_unqueued(make, relay, RequestRuns(), "people") for _ in range(4)))
        assert len(reported) == 5
        assert {b'"count": 2' in body for body in reported} == {True}
        await router.settled()

    run(scenario, waits={(channel, "CHANNEL_ATTACH_S"): 0.2})


def test_what_engines_say_of_themselves_is_asked_for_with_a_bound() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        router = await Router(cluster).start()
        assert await router.model.info() is None
        limits = router.model.limits
        model = router.model.settings
        assert (limits.slots, limits.kv_block_tokens) == (model.max_num_seqs, 1)
        assert limits.max_model_len == (model.max_model_len or sys.maxsize)
        await cluster.add("r1")
        await turns(20)
        info = await router.model.info()
        assert info is not None
        assert router.model.limits is info
        assert info.slots == 4
        load = await router.model.replica_set.fetch_load("r1")
        assert load is not None
        assert load.running == 0
        cluster.kill("r1", reported=False)
        assert await router.model.replica_set.fetch_load("r1") is None

    run(scenario, waits={(replica_module, "ANSWER_TIMEOUT_S"): 0.1})


def test_the_queue_learns_what_a_request_has_really_made(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add("r1")
        router = await Router(cluster).start()
        reported: list[tuple[int | None, int | None]] = []
        done = router.model.queue.release

        def noting(request_id: str, output_tokens: int | None = None, prompt_tokens: int | None = None) -> None:
            reported.append((prompt_tokens, output_tokens))
            done(request_id, output_tokens, prompt_tokens)

        monkeypatch.setattr(router.model.queue, "release", noting)
        await router.ask(7, cost_tokens=300)
        assert reported == [(2, 7)]
        stopped = router.asking(LONG, cost_tokens=300)
        await until(lambda: len(router.relayed) == 2, SOON_S, "it runs")
        stopped.cancel()
        await asyncio.wait({stopped})
        await router.settled()
        ((prompt, output),) = reported[1:]
        assert prompt is None
        assert output is not None
        assert 0 < output < LONG

    run(scenario, model(slots=1))
