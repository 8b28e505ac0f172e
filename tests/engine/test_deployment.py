"""An engine replica serves the routers connected to it, and tells them when it can not."""

from __future__ import annotations

import asyncio
import gc
import warnings
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from serve_app.core.memory import EngineReport, Rank
from serve_app.engine import deployment
from serve_app.engine.start import grant_request
from serve_app.errors import ConfigError, EngineFailed, EngineUnreachable
from serve_app.settings import ModelSettings
from serve_app.transport import NOT_CONTINUABLE, Frame, Submit
from serve_app.transport.messages import NO_SLOTS
from serve_app.types import Operation
from tests.fakes.engines import FakeCluster, FakeReplica, model, run, until
from tests.fakes.tcp import Peer, started

REPLICA = "r1"
SOON_S = 5.0  # for what takes milliseconds on an idle machine
LONG = 5000  # tokens: 5 s at the fake's rate


def test_each_router_is_given_the_slots_of_the_engine_and_that_it_drains() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        replica = await started(cluster)
        first = await Peer.enter(replica, "first")
        second = await Peer.enter(replica, "second")
        assert [peer.batches[-1].slots for peer in (first, second)] == [7, 7]
        replica.engine.drain(30.0)
        for peer in (first, second):
            assert (await asyncio.wait_for(peer.read(), SOON_S)).slots == NO_SLOTS
        third = await Peer.enter(replica, "third")
        assert third.batches[-1].slots == NO_SLOTS
        for peer in (first, second, third):
            peer.leave()
        draining = replica.engine.draining
        assert draining is not None
        draining.cancel()  # it would end this process

    run(scenario, model(slots=7))


@pytest.mark.parametrize("fingerprint", ["its own", None, "another"])
def test_what_an_engine_of_another_model_has_begun_is_not_continued(fingerprint: str | None) -> None:
    """None: by a router, or of an engine, of a release that tells none."""

    async def scenario(cluster: FakeCluster) -> None:
        replica = await started(cluster)
        peer = await Peer.enter(replica)
        own = peer.batches[-1].fingerprint
        assert own is not None
        body = {"model": "sim", "prompt": "p", "max_tokens": 5, "stream": True}
        first = Submit(1, "r", Operation.COMPLETION, body, fingerprint="another")  # of what has not begun it is nothing
        frames = list[Frame]()
        await replica.engine.run(first, frames.append)
        groups = [group for frame in frames for group in frame.groups]
        reported = own if fingerprint == "its own" else fingerprint
        again = Submit(2, "r", Operation.COMPLETION, body, groups=groups[:1], events=1, fingerprint=reported)
        if fingerprint == "another":
            with pytest.raises(EngineFailed, match="another model") as refused:
                await replica.engine.run(again, frames.append)
            assert refused.value.code == NOT_CONTINUABLE
        else:
            await replica.engine.run(again, frames.append)
        peer.leave()

    run(scenario)


def test_a_request_that_comes_while_the_replica_drains_can_go_elsewhere() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        replica = await started(cluster)
        peer = await Peer.enter(replica)
        replica.engine.drain(30.0)
        peer.hand_in(1, 3)
        await peer.read_until(1)
        failure = peer.frames(1)[-1].failure
        assert failure is not None
        assert isinstance(failure.error(), EngineUnreachable)
        assert replica.load.steps == 0
        peer.leave()
        draining = replica.engine.draining
        assert draining is not None
        draining.cancel()  # it would end this process

    run(scenario)


def test_frames_go_to_the_router_that_asked_and_to_no_other() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        replica = await started(cluster)
        peers = [await Peer.enter(replica, f"router {n}") for n in range(3)]
        for n, peer in enumerate(peers):
            for k in range(4):
                peer.hand_in(n * 10 + k, 5 + k)
        for n, peer in enumerate(peers):
            numbers = [n * 10 + k for k in range(4)]
            await peer.read_until(*numbers)
            assert {frame.number for batch in peer.batches for frame in batch.frames} == set(numbers)
            for k, number in enumerate(numbers):
                frames = peer.frames(number)
                assert frames[0].status == 200
                assert frames[-1].usage is not None
                assert frames[-1].usage.completion_tokens == 5 + k
            peer.leave()

    run(scenario)


def test_a_client_error_is_an_answer_and_not_a_failure() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        replica = await started(cluster)
        peer = await Peer.enter(replica)
        peer.hand_in(1, 3, prompt="")
        await peer.read_until(1)
        (frame,) = peer.frames(1)
        assert (frame.status, frame.media) == (400, "json")
        assert frame.usage is not None
        assert b'"param": "prompt"' in frame.body
        peer.leave()

    run(scenario)


def test_shutting_down_ends_the_connections_and_fails_the_health_check() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        replica = await started(cluster)
        peer = await Peer.enter(replica)
        peer.hand_in(1, LONG)
        await until(lambda: replica.work == 1, SOON_S, "it runs")
        await replica.engine.check_health()
        await cluster.close()
        await peer.cut()
        with pytest.raises(EngineFailed):
            await replica.engine.check_health()

    run(scenario)


def test_any_caller_learns_what_the_engine_can_do_and_how_busy_it_is() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        replica = await started(cluster)
        handle = cluster.handle()
        info = await handle.call("info", replica_id=REPLICA)
        assert (info.model, info.slots, info.tasks) == ("sim", 4, ["generate"])
        peer = await Peer.enter(replica)
        peer.hand_in(1, LONG)
        await until(lambda: replica.work == 1, SOON_S, "it runs")
        await asyncio.wait_for(peer.read(), SOON_S)
        load = await handle.call("load", replica_id=REPLICA)
        assert (load.running, load.waiting) == (1, 0)
        assert load.kv_cache_usage > 0
        peer.leave()

    run(scenario)


def test_serve_ends_a_replica_by_del_and_the_garbage_collector_does_not_call_it_again() -> None:
    async def scenario() -> None:
        replica: Any = object.__new__(deployment.EngineReplica)
        await replica.__init__({"name": "m", "engine": "simulated"})
        backend = replica.backend
        await replica.__del__()
        with pytest.raises(EngineFailed):
            await backend.check_health()
        with warnings.catch_warnings(record=True) as reported:
            warnings.simplefilter("always")
            del replica
            gc.collect()
        assert not [one for one in reported if "never awaited" in str(one.message)]

    asyncio.run(scenario())


def test_an_error_of_ours_ends_a_start_as_it_is_and_is_not_its_own_cause() -> None:
    async def scenario() -> None:
        replica: Any = object.__new__(deployment.EngineReplica)
        settings = {"name": "m", "engine": "simulated", "max_model_len": 4096, "simulated": {"kv_cache_tokens": 1024}}
        with pytest.raises(ConfigError) as caught:
            await replica.__init__(settings)
        assert caught.value.__cause__ is None
        await replica.shutdown()

    asyncio.run(scenario())


def test_a_replica_that_has_to_drain_while_its_engine_starts_takes_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        replica: Any = object.__new__(deployment.EngineReplica)
        backend = deployment.make_backend(ModelSettings(name="m", engine="simulated"))
        start = backend.start

        async def draining_start() -> Any:
            replica.drain(30.0)
            return await start()

        monkeypatch.setattr(backend, "start", draining_start)
        monkeypatch.setattr(deployment, "make_backend", lambda settings: backend)
        await replica.__init__({"name": "m", "engine": "simulated"})
        assert replica.server.slots == NO_SLOTS
        replica.draining.cancel()  # it would end this process
        replica.watching.cancel()
        await backend.shutdown()

    asyncio.run(scenario())


def test_a_frozen_engine_ends_its_replica_by_itself_whether_serve_asks_or_not(
    monkeypatch: pytest.MonkeyPatch, ended: list[int]
) -> None:
    monkeypatch.setattr(deployment, "LAST_FRAMES_S", 0.01)
    monkeypatch.setattr(deployment, "ENGINE_LOOK_S", 0.01)

    async def scenario() -> None:
        replica: Any = object.__new__(deployment.EngineReplica)
        rates = {"decode_step_s": 0.001}
        await replica.__init__({"name": "m", "engine": "simulated", "health_stall_s": 0.05, "simulated": rates})
        await replica.check_health()
        body = {"model": "m", "prompt": "a b c", "max_tokens": 5000, "stream": True}
        pieces = replica.backend.run(Submit(1, "r", Operation.COMPLETION, body))
        await anext(pieces)
        thawed = asyncio.Event()
        replica.backend.sleep = lambda delay_s: thawed.wait()
        async with asyncio.timeout(SOON_S):
            while not ended:  # noqa: ASYNC110 - there is no event of it
                await asyncio.sleep(0.01)
        with pytest.raises(EngineFailed, match="frozen"):
            await replica.check_health()
        thawed.set()
        await pieces.aclose()
        await replica.backend.shutdown()

    asyncio.run(scenario())
    assert ended == [deployment.EXIT_ENGINE_DEAD]


@pytest.mark.parametrize("kind", [EngineFailed, RuntimeError])
def test_a_client_is_informed_of_an_engines_death_in_a_plain_sentence(
    kind: type[Exception], monkeypatch: pytest.MonkeyPatch, ended: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    reported = "the engine died: EngineCore encountered an issue. See stack trace (above) for the root cause."

    async def scenario() -> None:
        replica: Any = object.__new__(deployment.EngineReplica)
        await replica.__init__({"name": "m", "engine": "simulated"})
        backend = replica.backend

        async def dies(submit: Submit) -> Any:
            monkeypatch.setattr(type(backend), "alive", property(lambda self: False))
            raise kind(reported)
            yield

        monkeypatch.setattr(backend, "run", dies)
        with pytest.raises(EngineFailed) as caught:
            await replica.run(Submit(1, "r", Operation.COMPLETION, {}), lambda frame: None)
        assert "trace" not in caught.value.message
        assert caught.value.__cause__ is None
        replica.watching.cancel()
        await backend.shutdown()

    asyncio.run(scenario())
    assert reported in caplog.text  # the operator's log has it


@pytest.mark.parametrize("is_asked", [True, False])
def test_an_engine_that_died_ends_its_replica_and_operators_are_informed_why(
    is_asked: bool, monkeypatch: pytest.MonkeyPatch, ended: list[int]
) -> None:
    monkeypatch.setattr(deployment, "LAST_FRAMES_S", 0.01)
    monkeypatch.setattr(deployment, "ENGINE_LOOK_S", SOON_S if is_asked else 0.01)
    grant = Mock()
    monkeypatch.setattr(grant_request, "GrantRequest", lambda *given: _request_of(grant, *given))

    async def crash(delay_s: float) -> None:
        raise RuntimeError("out of memory")

    async def scenario() -> None:
        replica: Any = object.__new__(deployment.EngineReplica)
        await replica.__init__({"name": "m", "engine": "simulated"}, {})
        await asyncio.sleep(0.1)  # ten looks
        assert ended == []
        replica.backend.sleep = crash
        submit = Submit(1, "r", Operation.COMPLETION, {"model": "m", "prompt": "a", "max_tokens": 5})
        if is_asked:
            with pytest.raises(EngineFailed) as reported:
                await replica.run(submit, lambda frame: None)
            assert reported.value.message == deployment.DIED, "which is all that a tenant is told"
        else:
            with pytest.raises(EngineFailed):
                await anext(replica.backend.run(submit))
        async with asyncio.timeout(SOON_S):
            while not ended:  # noqa: ASYNC110 - there is no event of it
                await asyncio.sleep(0.01)
        replica.watching.cancel()
        await replica.backend.shutdown()

    asyncio.run(scenario())
    assert ended == [deployment.EXIT_ENGINE_DEAD]
    (why,) = grant.fail.call_args.args
    assert why.startswith("the simulated engine stopped: out of memory")


def _request_of(grant: Mock, settings: ModelSettings, *others: Any) -> Mock:
    """A request for memory that is granted at once."""
    grant.obtain = AsyncMock(return_value=[None])
    grant.report = EngineReport("e", "m", (Rank("n"),), 1, 1)
    return Mock(
        ranks=lambda nodes: (None,),
        grant=lambda *given: grant,
        granted_settings=lambda hold, ranks: settings,
    )


def waiting_for_a_batch(replica: FakeReplica) -> int:
    batched = replica.engine.batched
    assert batched is not None
    return batched.waiting


async def with_two_waiting(cluster: FakeCluster) -> tuple[FakeReplica, Peer]:
    """A replica whose batches are of three, and a router whose requests 1 and 2 of four tokens wait there."""
    replica = await started(cluster)
    peer = await Peer.enter(replica)
    for number in (1, 2):
        peer.hand_in(number, 4)
    await until(lambda: waiting_for_a_batch(replica) == 2, SOON_S, "both wait for a third")
    return replica, peer


def test_a_replica_batches_as_its_model_says_and_takes_over_another_way_while_it_runs() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        replica, peer = await with_two_waiting(cluster)
        assert replica.load.steps == 0
        peer.hand_in(3, 4)
        await peer.read_until(1, 2, 3)
        load = await cluster.handle().call("load", replica_id=REPLICA)
        assert (load.steps, load.sequence_steps) == (4, 12)  # of the simulated engine: all three in each step
        assert (load.batches, load.batch_size, load.padding_ratio) == (1, 3.0, 0.0)
        assert load.batch_wait_s > 0.0
        await replica.engine.reconfigure({"batching": {"preset": "dynamic-128"}})
        peer.hand_in(4, 4)
        await peer.read_until(4)
        await replica.engine.reconfigure({"batching": None})
        peer.hand_in(5, 4)
        await peer.read_until(5)
        assert (await cluster.handle().call("load", replica_id=REPLICA)).batched_requests == 4
        assert all(peer.frames(number)[-1].usage is not None for number in range(1, 6))
        peer.leave()

    run(scenario, model(batching={"max_size": 3}))


def test_without_batching_a_request_goes_to_the_engine_and_the_load_has_its_steps() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        replica = await started(cluster)
        peer = await Peer.enter(replica)
        peer.hand_in(1, 4)
        await peer.read_until(1)
        assert replica.engine.batched is None
        load = await cluster.handle().call("load", replica_id=REPLICA)
        assert (load.batch_size, load.batches, load.waiting) == (1.0, 0, 0)
        await replica.engine.reconfigure({"batching": {"max_size": 2}})
        for number in (2, 3):
            peer.hand_in(number, 4)
        await peer.read_until(2, 3)
        assert (await cluster.handle().call("load", replica_id=REPLICA)).batched_requests == 2
        peer.leave()

    run(scenario)


def test_a_draining_replica_waits_for_no_batch_to_be_filled() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        replica, peer = await with_two_waiting(cluster)
        replica.engine.drain(30.0)
        await peer.read_until(1, 2)
        assert all(peer.frames(number)[-1].usage is not None for number in (1, 2))
        peer.leave()
        draining = replica.engine.draining
        assert draining is not None
        draining.cancel()  # it would end this process

    run(scenario, model(batching={"max_size": 3}))


def test_requests_that_wait_for_a_batch_of_a_dead_engine_can_go_elsewhere(
    monkeypatch: pytest.MonkeyPatch, ended: list[int]
) -> None:
    monkeypatch.setattr(deployment, "ENGINE_LOOK_S", 0.01)

    async def scenario() -> None:
        replica: Any = object.__new__(deployment.EngineReplica)
        await replica.__init__({"name": "m", "engine": "simulated", "batching": {"max_size": 3}})
        asked = Submit(1, "r", Operation.COMPLETION, {"prompt": "a", "max_tokens": 3})
        waiting = asyncio.create_task(replica.run(asked, lambda frame: None))
        await asyncio.sleep(0)
        monkeypatch.setattr(type(replica.backend), "alive", property(lambda self: False))
        with pytest.raises(EngineUnreachable):
            await asyncio.wait_for(waiting, SOON_S)
        await replica.shutdown()

    asyncio.run(scenario())
