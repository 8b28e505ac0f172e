"""An engine replica serves the routers attached to it, and runs nothing for one that is gone."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from serve_app.engine import deployment
from serve_app.errors import EngineFailed
from serve_app.transport import NO_SLOTS, Frame, Submit
from serve_app.transport.messages import Batch, batch_decoder
from serve_app.types import Operation
from tests.fakes.engines import FakeCluster, FakeReplica, model, run, until

REPLICA = "r1"
SOON_S = 5.0  # for what takes milliseconds on an idle machine
LONG = 5000  # tokens: 5 s at the fake's rate


class Router:
    """A router without a `Channel`: it attaches, hands requests in and writes down what it is sent."""

    def __init__(self, cluster: FakeCluster, name: str) -> None:
        self._handle = cluster.handle()
        self._name = name
        self.batches: list[Batch] = []
        self._reader: asyncio.Task[None] | None = None

    @property
    def slots(self) -> int:
        """The slots told last; 0 before."""
        return next((batch.slots for batch in reversed(self.batches) if batch.slots), 0)

    def frames(self, number: int) -> list[Frame]:
        return [frame for batch in self.batches for frame in batch.frames if frame.number == number]

    def numbers(self) -> set[int]:
        return {frame.number for batch in self.batches for frame in batch.frames}

    async def attach(self) -> Router:
        before = len(self.batches)
        self._reader = asyncio.create_task(self._read())
        await until(lambda: len(self.batches) > before, SOON_S, "the slots told")
        return self

    async def _read(self) -> None:
        stream = self._handle.stream("attach", self._name, replica_id=REPLICA)
        async with contextlib.aclosing(stream) as messages:  # type: ignore[type-var]
            async for message in messages:
                self.batches.append(batch_decoder.decode(message))

    async def detach(self) -> None:
        assert self._reader is not None
        self._reader.cancel()
        await asyncio.wait({self._reader})

    @property
    def attached(self) -> bool:
        return self._reader is not None and not self._reader.done()

    def submit(self, number: int, tokens: int, **body: Any) -> asyncio.Task[None]:
        asked = {"prompt": f"prompt {number}", "max_tokens": tokens, "stream": True} | body
        submit = Submit(number, f"id-{number}", Operation.COMPLETION, asked)
        return asyncio.create_task(self._handle.call("submit", self._name, submit, replica_id=REPLICA))


async def started(cluster: FakeCluster) -> FakeReplica:
    await cluster.add(REPLICA)
    return cluster[REPLICA]


def test_each_router_is_told_the_slots_of_the_engine_and_0_once_it_drains() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        replica = await started(cluster)
        first = await Router(cluster, "first").attach()
        second = await Router(cluster, "second").attach()
        assert (first.slots, second.slots) == (7, 7)
        replica.engine.drain()
        await until(lambda: (first.slots, second.slots) == (NO_SLOTS, NO_SLOTS), SOON_S, "both know that it drains")
        third = await Router(cluster, "third").attach()
        assert third.slots == NO_SLOTS
        for router in (first, second, third):
            await router.detach()
        await until(lambda: not replica.attachments, SOON_S, "all gone")
        draining = replica.engine.draining
        assert draining is not None
        draining.cancel()  # it would end this process

    run(scenario, model(slots=7))


def test_frames_go_to_the_router_that_asked_and_to_no_other() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await started(cluster)
        routers = [await Router(cluster, f"router {n}").attach() for n in range(3)]
        calls = [router.submit(n * 10 + k, 5 + k) for n, router in enumerate(routers) for k in range(4)]
        await asyncio.gather(*calls)
        for n, router in enumerate(routers):
            await until(lambda n=n, r=router: r.numbers() == {n * 10 + k for k in range(4)}, SOON_S, "its own")
            for k in range(4):
                await until(lambda r=router, i=n * 10 + k: r.frames(i)[-1].usage is not None, SOON_S, "the last one")
                frames = router.frames(n * 10 + k)
                assert frames[0].status == 200
                assert frames[-1].usage is not None
                assert frames[-1].usage.completion_tokens == 5 + k
            await router.detach()

    run(scenario)


def test_requests_of_a_broken_channel_are_aborted_within_a_second_and_no_others() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        replica = await started(cluster)
        broken = await Router(cluster, "broken").attach()
        whole = await Router(cluster, "whole").attach()
        lost = [broken.submit(number, LONG) for number in range(3)]
        kept = whole.submit(9, 600)
        await until(lambda: replica.work == 4, SOON_S, "all run")
        await broken.detach()  # and does not cancel its calls: a router that was killed cannot
        assert await until(lambda: replica.work == 1, SOON_S, "the three aborted") < 1.0
        ended = await asyncio.wait_for(asyncio.gather(*lost, return_exceptions=True), SOON_S)
        assert [type(error) for error in ended] == [asyncio.CancelledError] * 3
        await kept
        await until(lambda: bool(whole.frames(9)) and whole.frames(9)[-1].usage is not None, SOON_S, "the last frame")
        await whole.detach()

    run(scenario)


def test_with_the_bound_of_production_the_abort_still_takes_less_than_a_second() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        replica = await started(cluster)
        router = await Router(cluster, "broken").attach()
        lost = router.submit(1, LONG)
        await until(lambda: replica.work == 1, SOON_S, "it runs")
        await router.detach()
        assert await until(lambda: not replica.work, SOON_S, "it is aborted") < 1.0
        await asyncio.wait({lost})

    run(scenario, waits={(deployment, "BREAK_GRACE_S"): deployment.BREAK_GRACE_S})


def test_a_router_that_is_back_in_time_keeps_its_requests() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        replica = await started(cluster)
        router = await Router(cluster, "router").attach()
        call = router.submit(1, 400)
        await until(lambda: bool(router.frames(1)), SOON_S, "first frames")
        await router.detach()
        await until(lambda: not replica.count("attach"), SOON_S, "the break seen")
        await router.attach()
        replica.engine.detach("router")  # what the timer of the break does when it comes
        await call
        await until(lambda: router.frames(1)[-1].usage is not None, SOON_S, "the last frame")
        deployment.BREAK_GRACE_S = 0.05  # of the next break; `run` puts the constant back
        await router.detach()

    run(scenario, waits={(deployment, "BREAK_GRACE_S"): 60.0})


def test_the_latest_attach_of_a_router_gets_everything_and_the_one_before_ends() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        replica = await started(cluster)
        before, after = Router(cluster, "router"), Router(cluster, "router")
        await before.attach()
        await after.attach()
        await until(lambda: not before.attached, SOON_S, "the first ended")
        call = after.submit(1, 20)
        await call
        await until(lambda: bool(after.frames(1)) and after.frames(1)[-1].usage is not None, SOON_S, "all frames")
        assert sum(len(group) - 1 for frame in after.frames(1) for group in frame.groups) == 20
        assert before.numbers() == set()
        assert replica.attachments == 1
        await after.detach()

    run(scenario)


def test_cancelling_the_call_aborts_the_request_and_leaves_the_others() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        replica = await started(cluster)
        router = await Router(cluster, "router").attach()
        cancelled, kept = router.submit(1, LONG), router.submit(2, 300)
        await until(lambda: replica.work == 2, SOON_S, "both run")
        cancelled.cancel()
        assert await until(lambda: replica.work == 1, SOON_S, "one aborted") < 1.0
        await kept
        await router.detach()

    run(scenario)


def test_a_request_that_comes_before_its_channel_waits_for_it() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        replica = await started(cluster)
        router = Router(cluster, "router")
        call = router.submit(1, 3)
        await until(lambda: replica.count("submit") == 1, SOON_S, "handed in")
        assert replica.work == 0
        await router.attach()
        await call
        await router.detach()

    run(scenario)


def test_a_request_without_a_channel_fails_as_one_that_can_go_elsewhere() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        replica = await started(cluster)
        with pytest.raises(EngineFailed) as failed:
            await Router(cluster, "router").submit(1, 3)
        assert failed.value.code == "engine_unreachable"
        assert (replica.load.steps, replica.attachments) == (0, 0)

    run(scenario, waits={(deployment, "CHANNEL_WAIT_S"): 0.05})


def test_a_client_error_is_an_answer_and_not_a_failure() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await started(cluster)
        router = await Router(cluster, "router").attach()
        await router.submit(1, 3, prompt="")
        await until(lambda: bool(router.frames(1)), SOON_S, "the answer")
        (frame,) = router.frames(1)
        assert (frame.status, frame.media) == (400, "json")
        assert frame.usage is not None
        assert b'"param": "prompt"' in frame.body
        await router.detach()

    run(scenario)


def test_shutting_down_fails_what_runs_and_the_health_check() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        replica = await started(cluster)
        router = await Router(cluster, "router").attach()
        call = router.submit(1, LONG)
        await until(lambda: replica.work == 1, SOON_S, "it runs")
        await replica.engine.check_health()
        await cluster.close()
        with pytest.raises(EngineFailed, match="shut down"):
            await call
        with pytest.raises(EngineFailed):
            await replica.engine.check_health()
        await router.detach()

    run(scenario)


def test_any_caller_learns_what_the_engine_can_do_and_how_busy_it_is() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await started(cluster)
        handle = cluster.handle()
        info = await handle.call("info", replica_id=REPLICA)
        assert (info.model, info.slots, info.tasks) == ("sim", 4, ["generate"])
        router = await Router(cluster, "router").attach()
        call = router.submit(1, LONG)
        await until(lambda: bool(router.frames(1)), SOON_S, "it runs")
        load = await handle.call("load", replica_id=REPLICA)
        assert (load.running, load.waiting) == (1, 0)
        assert load.kv_cache_usage > 0
        call.cancel()
        await router.detach()

    run(scenario)


def test_a_frozen_engine_ends_its_replica_by_itself(monkeypatch: pytest.MonkeyPatch, ended: list[int]) -> None:
    monkeypatch.setattr(deployment, "LAST_FRAMES_S", 0.01)

    async def sees_it_frozen(replica: Any) -> bool:
        try:
            await replica.check_health()
        except EngineFailed:
            return True
        return False

    async def scenario() -> None:
        replica: Any = object.__new__(deployment.EngineReplica)
        rates = {"decode_step_s": 0.001}
        await replica.__init__({"name": "m", "engine": "simulated", "health_stall_s": 0.05, "simulated": rates})
        assert not await sees_it_frozen(replica)
        body = {"model": "m", "prompt": "a b c", "max_tokens": 5000, "stream": True}
        pieces = replica.backend.run(Submit(1, "r", Operation.COMPLETION, body))
        await anext(pieces)
        thawed = asyncio.Event()
        replica.backend.sleep = lambda delay_s: thawed.wait()
        async with asyncio.timeout(SOON_S):
            while not await sees_it_frozen(replica):  # noqa: ASYNC110 - there is no event of it
                await asyncio.sleep(0.01)
            while not ended:  # noqa: ASYNC110 - nor of this
                await asyncio.sleep(0.01)
        thawed.set()
        await pieces.aclose()
        await replica.backend.shutdown()

    asyncio.run(scenario())
    assert ended == [deployment.EXIT_ENGINE_DEAD]


def test_a_client_is_told_of_an_engines_death_in_a_plain_sentence(
    monkeypatch: pytest.MonkeyPatch, ended: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    said = "the engine died: EngineCore encountered an issue. See stack trace (above) for the root cause."

    async def scenario() -> None:
        replica: Any = object.__new__(deployment.EngineReplica)
        await replica.__init__({"name": "m", "engine": "simulated"})
        backend = replica.backend

        async def dies(submit: Submit) -> Any:
            monkeypatch.setattr(type(backend), "alive", property(lambda self: False))
            raise EngineFailed(said)
            yield

        monkeypatch.setattr(backend, "run", dies)
        channel = replica.attach("router", "")
        await anext(channel)
        with pytest.raises(EngineFailed) as caught:
            await replica.submit("router", Submit(1, "r", Operation.COMPLETION, {}), "")
        assert "trace" not in caught.value.message
        assert caught.value.__cause__ is None
        await channel.aclose()
        replica.watching.cancel()
        await backend.shutdown()

    asyncio.run(scenario())
    assert said in caplog.text  # the operator's log has it


def test_an_engine_that_died_while_nobody_asked_it_ends_its_replica(
    monkeypatch: pytest.MonkeyPatch, ended: list[int]
) -> None:
    monkeypatch.setattr(deployment, "LAST_FRAMES_S", 0.01)
    monkeypatch.setattr(deployment, "ALIVE_S", 0.01)

    async def scenario() -> None:
        replica: Any = object.__new__(deployment.EngineReplica)
        await replica.__init__({"name": "m", "engine": "simulated"})
        await asyncio.sleep(0.1)  # ten looks
        assert ended == []
        alive = replica.backend
        monkeypatch.setattr(type(alive), "alive", property(lambda self: False))
        async with asyncio.timeout(SOON_S):
            while not ended:  # noqa: ASYNC110 - there is no event of it
                await asyncio.sleep(0.01)
        await alive.shutdown()

    asyncio.run(scenario())
    assert ended == [deployment.EXIT_ENGINE_DEAD]
