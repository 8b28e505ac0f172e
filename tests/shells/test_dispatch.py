"""A request waits its turn, runs on one replica, and survives the loss of it as long as its client has seen nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from serve_app import channel, dispatch
from serve_app.channel import Stream
from serve_app.core.admission import Admission, Arrival, Policy
from serve_app.dispatch import Granted, ModelLine
from serve_app.engine.protocol import Frame, Submit
from serve_app.errors import EngineFailed, Overloaded, Unavailable
from serve_app.settings import AdmissionSettings
from serve_app.types import Operation, RequestClass
from tests.shells.fake_engines import FakeCluster, model, run, turns, until
from tests.shells.test_channel import LONG, SOON_S, said, text

NORMAL, HIGH = RequestClass.NORMAL, RequestClass.HIGH


class Router:
    """A model's line in one router, and what came of the requests it was given."""

    def __init__(self, cluster: FakeCluster, name: str = "router", routers: int = 1, **admission: Any) -> None:
        self.handle = cluster.handle()
        settings = AdmissionSettings(**admission)
        self.line = ModelLine(cluster.settings, self.handle, settings, name, routers)  # type: ignore[arg-type]
        self.relayed: list[str] = []
        self.places: dict[str, str] = {}
        self._given = 0

    async def start(self) -> Router:
        await self.line.start()
        await turns(10)
        return self

    async def ask(
        self, tokens: int = 5, *, then: Callable[[], Awaitable[None]] | None = None, **arrival: Any
    ) -> list[Frame]:
        """One request to its end; `then` runs once its first frames are there."""
        self._given += 1
        name = f"{self._given}"
        body = {"prompt": f"prompt {name}", "max_tokens": tokens, "stream": True}

        async def relay(stream: Stream, frames: list[Frame], granted: Granted) -> None:
            self.relayed.append(name)
            self.places[name] = granted.replica_id
            if then is not None:
                await then()
            while frames[-1].usage is None:
                frames += await stream.next()
            told.extend(frames)

        told: list[Frame] = []
        asked = Arrival(name, arrival.pop("cls", NORMAL), "tenant", **arrival)
        await self.line.serve(asked, lambda n: Submit(n, name, Operation.COMPLETION, body), relay)
        assert text(told) == said(f"prompt {name}", tokens)
        return told

    def asking(self, tokens: int = 5, **more: Any) -> asyncio.Task[list[Frame]]:
        return asyncio.create_task(self.ask(tokens, **more))

    def submits(self) -> list[str]:
        return [replica for method, replica in self.handle.calls if method == "submit"]

    @property
    def view(self) -> Any:
        return self.line.line.snapshot(time.monotonic())

    @property
    def used(self) -> dict[str, int]:
        return {name: use.used for name, use in self.view.replicas.items()}

    @property
    def waiting(self) -> int:
        return sum(self.view.waiting.values())

    async def settled(self) -> None:
        """Nothing waits and nothing is granted."""
        await until(lambda: not self.waiting and not any(self.used.values()), SOON_S, "all given back")


def freeze(cluster: FakeCluster, *names: str) -> None:
    for name in names:
        cluster[name].engine._backend.freeze()  # type: ignore[attr-defined]


def thaw(cluster: FakeCluster, *names: str) -> None:
    for name in names:
        cluster[name].engine._backend.thaw()  # type: ignore[attr-defined]


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("loss", ["kill", "break_channels"])
def test_requests_without_a_first_frame_run_elsewhere_when_their_replica_is_lost(loss: str, told: bool) -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add("r1", "r2")
        router = await Router(cluster).start()
        freeze(cluster, "r1", "r2")
        requests = [router.asking() for _ in range(8)]
        await until(lambda: cluster["r1"].work == cluster["r2"].work == 4, SOON_S, "four on each")
        if loss == "kill":
            cluster.kill("r1", told=told)
        else:
            cluster.break_channels("r1")
        thaw(cluster, "r1", "r2")
        await asyncio.gather(*requests)
        assert sorted(router.relayed) == [f"{n}" for n in range(1, 9)]  # nobody was answered twice
        assert len(router.submits()) == 12
        await router.settled()
        if loss == "kill" and told:
            assert set(router.used) == {"r2"}

    run(scenario)


def test_a_loss_after_the_first_frame_is_the_clients() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add("r1", "r2")
        router = await Router(cluster).start()

        async def lose() -> None:
            cluster.kill(router.places["1"])

        with pytest.raises(EngineFailed, match=r"failed|broke"):
            await router.ask(LONG, then=lose)
        assert (router.relayed, len(router.submits())) == (["1"], 1)
        await router.settled()

    run(scenario)


def test_a_request_gives_up_after_the_last_attempt_and_gives_its_slot_back() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add("r1")
        router = await Router(cluster).start()
        await cluster.close()  # the engine is dead, its replica is not
        with pytest.raises(EngineFailed, match="does not run"):
            await router.ask()
        assert router.submits() == ["r1"] * dispatch.MAX_ATTEMPTS
        assert router.relayed == []
        await router.settled()

    run(scenario, waits={(dispatch, "EJECT_S"): 0.02})


def test_a_replica_that_failed_is_used_again_after_a_while() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add("r1")
        router = await Router(cluster).start()
        await router.ask()
        freeze(cluster, "r1")
        request = router.asking()
        await until(lambda: cluster["r1"].work == 1, SOON_S, "it runs")
        cluster.break_channels("r1")
        await until(lambda: router.waiting == 1, SOON_S, "it waits again")
        thaw(cluster, "r1")
        started = time.monotonic()
        await request
        assert time.monotonic() - started > 0.5 * dispatch.EJECT_S
        assert router.submits() == ["r1"] * 3

    run(scenario)


def test_a_replica_that_never_answers_costs_the_attach_timeout_and_no_more() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add("r1", "r2")
        cluster["r1"].mute = True
        router = await Router(cluster).start()
        await asyncio.gather(*(router.ask() for _ in range(8)))
        assert set(router.places.values()) == {"r2"}
        assert router.submits() == ["r2"] * 8
        cluster.remove("r1")
        await turns(10)
        await router.settled()
        assert set(router.used) == {"r2"}

    run(scenario, waits={(dispatch, "EJECT_S"): 10.0})


@pytest.mark.parametrize("first", ["leaves", "granted"])
def test_a_replica_that_leaves_in_the_turn_of_a_grant_does_not_hold_the_request(first: str) -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add("r1")
        router = await Router(cluster).start()
        async with router.line.slot(Arrival("holder", NORMAL, "tenant", slots=4)):
            request = router.asking()
            await turns(10)
            assert router.waiting == 1
            if first == "leaves":
                cluster.remove("r1")  # the router hears of it in the next turn, before the request hears of its grant
        if first == "granted":
            cluster.remove("r1")
        await turns(10)
        assert not request.done()
        await cluster.add("r2")
        await asyncio.wait_for(request, SOON_S)
        assert router.places == {"1": "r2"}
        await router.settled()
        assert set(router.used) == {"r2"}

    run(scenario, waits={(channel, "ATTACH_TIMEOUT_S"): 60.0})


def test_nothing_is_remembered_of_a_replica_that_left_and_died() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add("r1")
        router = await Router(cluster).start()
        seen = router.asking(LONG)
        await until(lambda: router.relayed == ["1"], SOON_S, "one is seen by its client")
        freeze(cluster, "r1")
        unseen = router.asking()
        await until(lambda: cluster["r1"].work == 2, SOON_S, "the other one is not")
        await asyncio.sleep(1.5 * channel.HANDOVER_S)  # it is beyond doubt on the replica
        await cluster.add("r2")
        cluster.remove("r1")
        await turns(5)
        cluster.kill("r1")
        with pytest.raises(EngineFailed):
            await seen
        await unseen
        assert router.places["2"] == "r2"
        assert set(router.used) == {"r2"}

    run(scenario, waits={(channel, "HANDOVER_S"): 0.05})


def test_requests_on_a_replica_that_leaves_finish_and_new_ones_go_elsewhere() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add("r1")
        router = await Router(cluster).start()
        running = [router.asking(300) for _ in range(4)]
        await until(lambda: len(router.relayed) == 4, SOON_S, "all run")
        cluster.remove("r1")
        await cluster.add("r2")
        await router.ask()
        assert router.places["5"] == "r2"
        assert router.used["r1"] == 4
        await asyncio.gather(*running)
        assert await until(lambda: not cluster["r1"].calls, SOON_S, "r1 drained") < 1.0
        assert router.used == {"r2": 0}

    run(scenario, waits={(channel, "IDLE_CLOSE_S"): 0.5})


def test_a_replica_that_returns_keeps_its_channel_open_between_requests() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add("r1")
        router = await Router(cluster).start()
        running = router.asking(300)
        await until(lambda: len(router.relayed) == 1, SOON_S, "it runs")
        cluster.remove("r1")
        await turns(5)
        await cluster.add("r1")
        await running
        for _ in range(3):
            await router.ask()
        assert [method for method, _ in router.handle.calls].count("attach") == 1

    run(scenario)


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
        router = Router(cluster)
        router.line.line = Admission(Policy(10, 60.0, no_replica_wait_s=0.05))
        await router.start()
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
        router = await Router(cluster).start()
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

    run(scenario)


def test_a_session_goes_to_one_replica_while_it_has_room() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add("r1", "r2", "r3")
        router = await Router(cluster).start()
        chosen = {name: router.line.preferred(name) for name in (f"session {n}" for n in range(30))}
        assert set(chosen.values()) == {"r1", "r2", "r3"}
        assert router.line.preferred(None) is None
        for name, replica in list(chosen.items())[:6]:
            await router.ask(affinity=replica)
            assert router.line.preferred(name) == replica
        assert list(router.places.values()) == list(chosen.values())[:6]
        cluster.remove("r2")
        await turns(5)
        for name, replica in chosen.items():
            now = router.line.preferred(name)
            assert now == replica if replica != "r2" else now in ("r1", "r3")

    run(scenario)


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

    run(scenario, waits={(dispatch, "ASK_TIMEOUT_S"): 0.1})
