"""A request waits its turn, holds its slot as long as the engine works for it, and gives it back exactly once."""

from __future__ import annotations

import asyncio
import time

import pytest

from serve_app import asking, channel
from serve_app.channel import Stream
from serve_app.core.admission import Arrival
from serve_app.dispatch import Granted
from serve_app.engine.protocol import Frame, Submit
from serve_app.errors import Overloaded, Unavailable
from serve_app.types import Operation, RequestClass
from tests.shells.fake_engines import FakeCluster, model, run, turns, until
from tests.shells.fake_router import LONG, NORMAL, SOON_S, Router

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
        assert (router.waiting, router.view.cancelled_waiting) == (0, 1)
        last = router.asking()  # takes the place; a full line would refuse it
        await turns(5)
        running.cancel()
        await last
        assert (router.relayed, len(router.submits())) == (["1", "3"], 2)
        await router.settled()

    run(scenario, model(slots=1))


def test_a_cancel_in_the_turn_of_its_grant_gives_the_slot_back() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add("r1")
        router = await Router(cluster).start()
        async with router.line.slot(Arrival("holder", NORMAL, "tenant")):
            gone, after = router.asking(), router.asking()
            await turns(5)
            assert router.waiting == 2
        assert router.waiting == 1  # `gone` is granted and does not know it yet
        gone.cancel()
        await after
        assert gone.cancelled()
        assert (router.view.cancelled_running, router.view.done) == (1, 2)
        assert (router.relayed, len(router.submits())) == (["2"], 1)
        await router.settled()

    run(scenario, model(slots=1))


def test_a_cancel_in_the_turn_of_its_refusal_is_a_refusal_nobody_hears() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add("r1")
        router = await Router(cluster, max_queued=1).start()
        async with router.line.slot(Arrival("holder", NORMAL, "tenant")):
            gone = router.asking()
            await turns(5)
            higher = router.asking(cls=HIGH)
            await turns(1)
            assert router.view.refused["shed"] == 1
            gone.cancel()
            await asyncio.wait({gone})
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
        assert len(router.submits()) == 1
        running.cancel()
        await router.settled()

    run(scenario, model(slots=1))


def test_without_a_replica_a_request_waits_a_while_and_is_refused() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        router = await Router(cluster, no_replica_wait_s=0.05).start()
        with pytest.raises(Unavailable) as refused:
            await asyncio.wait_for(router.ask(), SOON_S)
        assert (refused.value.code, refused.value.status) == ("no_replica", 503)
        assert refused.value.retry_after_s is not None
        late = router.asking()
        await cluster.add("r1")
        await late
        assert router.line.ready

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
            if all(router.waiting for router in routers):  # later one may be alone, and have it all
                assert [router.used["r1"] for router in routers] == [3, 3]  # never more, and nothing idles
            most = max(most, cluster["r1"].work)
        await asyncio.gather(*requests)
        assert most == 6
        for router in routers:
            await router.settled()

    run(scenario, model(slots=6))


def test_a_router_alone_has_the_whole_batch_and_an_absent_one_assumes_no_more_than_its_part() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add("r1")
        first, second = [await Router(cluster, f"router {n}", routers=2).start() for n in range(2)]
        requests = [first.asking(LONG) for _ in range(6)]
        await until(lambda: first.used["r1"] == 6, SOON_S, "alone: all slots")
        for request in requests:
            request.cancel()
        await until(lambda: not cluster["r1"].attachments, SOON_S, "the first one detached")
        requests = [second.asking(LONG) for _ in range(6)]
        await until(lambda: second.used["r1"] == 6, SOON_S, "alone: all slots")
        requests += [first.asking(LONG) for _ in range(6)]
        await turns(1)
        assert first.used["r1"] == 3  # not the six of the time when it was alone
        await turns(30)
        assert first.used["r1"] == 3
        for request in requests:
            request.cancel()

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
        assert router.view.done == 2
        unread.set()
        await slow
        await router.settled()

    run(scenario, model(slots=1))


def test_work_without_a_slot_runs_at_once_and_elsewhere_when_a_replica_fails() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        router = await Router(cluster, no_replica_wait_s=0.05).start()
        told: list[bytes] = []

        async def relay(stream: Stream, frames: list[Frame], granted: Granted) -> None:
            assert frames[-1].usage is not None
            told.append(frames[0].body)

        def make(number: int) -> Submit:
            return Submit(number, "id", Operation.TOKENIZE, {"prompt": "two words"})

        with pytest.raises(Unavailable) as refused:
            await router.line.serve_aside(make, relay)
        assert refused.value.code == "no_replica"
        await cluster.add("r1", "r2")
        await turns(10)
        busy = [router.asking(LONG) for _ in range(8)]
        await until(lambda: len(router.relayed) == 8, SOON_S, "every slot taken")
        await router.line.serve_aside(make, relay)
        for request in busy:
            request.cancel()
        await asyncio.wait(busy)
        cluster["r1"].mute = cluster["r2"].mute = True
        await until(lambda: not cluster["r1"].attachments and not cluster["r2"].attachments, SOON_S, "detached")
        cluster["r2"].mute = False
        await asyncio.gather(*(router.line.serve_aside(make, relay) for _ in range(4)))
        assert len(told) == 5
        assert {b'"count": 2' in body for body in told} == {True}
        await router.settled()

    run(scenario, waits={(channel, "ATTACH_TIMEOUT_S"): 0.2})


def test_what_engines_say_of_themselves_is_asked_for_with_a_bound() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        router = await Router(cluster).start()
        assert await router.line.info() is None
        await cluster.add("r1")
        await turns(20)
        info = await router.line.info()
        assert info is not None
        assert (info.slots, router.line.max_model_len, router.line.largest) == (4, info.max_model_len, 4)
        load = await router.line.load("r1")
        assert load is not None
        assert load.running == 0
        cluster.kill("r1", told=False)
        assert await router.line.load("r1") is None

    run(scenario, waits={(asking, "ASK_TIMEOUT_S"): 0.1})


def test_the_line_is_told_what_a_request_has_really_made() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add("r1")
        router = await Router(cluster).start()
        await router.ask(7, cost_tokens=300)
        assert router.view.done_tokens == 2 + 7  # the prompt's, which its estimate had as none
        stopped = router.asking(LONG, cost_tokens=300)
        await until(lambda: len(router.relayed) == 2, SOON_S, "it runs")
        stopped.cancel()
        await asyncio.wait({stopped})
        await router.settled()
        assert 2 + 7 < router.view.done_tokens < LONG

    run(scenario, model(slots=1))
