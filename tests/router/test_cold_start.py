"""While requests wait for a model's first replica, one call waits in Serve for all of them; never otherwise."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from serve_app.errors import NotFound, Unavailable
from serve_app.router import RequestRuns, cold_start
from serve_app.router.cold_start import ColdStartTrigger
from serve_app.settings import AdmissionSettings, AutoscaleSettings, ModelSettings
from serve_app.transport import Frame, ResponseStream, Submit
from serve_app.types import Operation
from tests.fakes.engines import FakeCluster, model, run, turns, until
from tests.fakes.router import SOON_S, Router

FROM_ZERO = AutoscaleSettings(min_replicas=0, max_replicas=2)


def scaled(**changes: Any) -> ModelSettings:
    return model(replicas=FROM_ZERO, **changes)


async def aside(router: Router) -> bytes:
    """Tokenize two words; returns the answer."""
    reported: list[bytes] = []

    async def relay(stream: ResponseStream, frames: list[Frame]) -> None:
        reported.append(frames[0].body)

    def make(number: int) -> Submit:
        return Submit(number, "id", Operation.TOKENIZE, {"prompt": "two words"})

    await router.model.serve_unqueued(make, relay, RequestRuns(), "people")
    return reported[0]


def test_one_call_waits_for_all_who_wait_and_ends_with_the_first_replica() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        router = await Router(cluster).start()
        assert router.handle.ringing == 0
        asked = [router.asking() for _ in range(5)]
        await until(lambda: router.handle.ringing == 1, SOON_S, "the bell rings")
        await turns(20)
        assert (router.handle.rings, router.model.waiting) == (1, 5)
        await cluster.add("r1")
        await asyncio.gather(*asked)
        await until(lambda: router.handle.ringing == 0, SOON_S, "the bell is silent")
        assert router.model.cold_start.call is None
        await router.settled()

    run(scenario, scaled())


def test_the_bell_is_silent_once_nobody_waits_any_more() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        router = await Router(cluster).start()
        asked = [router.asking() for _ in range(2)]
        await until(lambda: router.handle.ringing == 1, SOON_S, "the bell rings")
        asked[0].cancel()
        await turns(20)
        assert router.handle.ringing == 1
        asked[1].cancel()
        await asyncio.wait(asked)
        await until(lambda: router.handle.ringing == 0, SOON_S, "the bell is silent")
        asked.append(router.asking())
        await until(lambda: router.handle.rings == 2, SOON_S, "and rings again for the next")
        asked[2].cancel()
        await asyncio.wait(asked)
        await router.settled()

    run(scenario, scaled())


def test_a_refusal_for_want_of_a_replica_ends_the_ringing_and_says_when_to_come_back() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        router = await Router(cluster, no_replica_wait_s=0.05).start()
        with pytest.raises(Unavailable) as refused:
            await asyncio.wait_for(router.ask(), SOON_S)
        assert refused.value.retry_after_s is not None
        await until(lambda: router.handle.ringing == 0, SOON_S, "the bell is silent")
        assert router.handle.rings == 1

    run(scenario, scaled())


def test_a_model_that_keeps_a_replica_never_rings() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        router = await Router(cluster).start()
        asked = router.asking()
        await until(lambda: router.waiting == 1, SOON_S, "it waits")
        await turns(20)
        assert router.handle.rings == 0
        await cluster.add("r1")
        await asked
        await router.settled()

    run(scenario)


def test_work_without_a_slot_waits_for_the_first_replica_too() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        router = await Router(cluster).start()
        asked = asyncio.create_task(aside(router))
        await until(lambda: router.handle.ringing == 1, SOON_S, "the bell rings")
        assert router.model.waiting == 1
        await cluster.add("r1")
        assert b'"count": 2' in await asked
        assert router.model.waiting == 0
        await until(lambda: router.handle.ringing == 0, SOON_S, "the bell is silent")

    run(scenario, scaled())


def test_no_more_work_without_a_slot_waits_than_may_wait_in_the_queue() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        router = await Router(cluster, max_queued=2).start()
        asked = [asyncio.create_task(aside(router)) for _ in range(2)]
        await until(lambda: router.model.waiting == 2, SOON_S, "two wait")
        with pytest.raises(Unavailable) as refused:
            await aside(router)
        assert refused.value.retry_after_s is not None
        for task in asked:
            task.cancel()
        await asyncio.wait(asked)
        assert router.model.waiting == 0
        await until(lambda: router.handle.ringing == 0, SOON_S, "the bell is silent")

    run(scenario, scaled())


def test_a_model_that_is_taken_out_rings_no_more_and_holds_nobody() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        router = await Router(cluster).start()
        waiting_in_queue = router.asking()
        beside = asyncio.create_task(aside(router))
        await until(lambda: router.model.waiting == 2, SOON_S, "two wait")
        router.handle.close = turns  # type: ignore[attr-defined]
        await asyncio.wait_for(router.model.close(), SOON_S)
        ends = await asyncio.gather(waiting_in_queue, beside, return_exceptions=True)
        assert [type(end) for end in ends] == [NotFound, NotFound]
        assert router.handle.ringing == 0

    run(scenario, scaled())


def test_settings_that_keep_a_replica_silence_the_bell() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        router = await Router(cluster).start()
        asked = router.asking()
        await until(lambda: router.handle.ringing == 1, SOON_S, "the bell rings")
        router.model.configure(model(), AdmissionSettings(), 1)
        await until(lambda: router.handle.ringing == 0, SOON_S, "the bell is silent")
        await cluster.add("r1")
        await asked
        await router.settled()

    run(scenario, scaled())


def test_a_call_that_fails_is_made_again_while_somebody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> int:
        rung: list[str] = []
        answered = asyncio.Event()

        async def ring() -> None:
            rung.append("ring")
            if len(rung) == 1:
                raise ConnectionError("the replica died as it answered")
            answered.set()
            await asyncio.Event().wait()

        bell = ColdStartTrigger("m", ring)
        bell.update(scales_from_zero=True, running=False)
        with bell.count_waiting():
            await asyncio.wait_for(answered.wait(), SOON_S)
            await bell.close()
            bell.update(scales_from_zero=True, running=False)
            assert bell.call is None
        assert len(rung) == 2
        return len(asyncio.all_tasks())

    monkeypatch.setattr(cold_start, "COLD_START_RETRY_S", 0.01)
    assert asyncio.run(scenario()) == 1
