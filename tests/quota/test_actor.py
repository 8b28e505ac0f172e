"""The actor around the quota core: what it stores before it answers, holds back, survives. Ray and its store are fakes.

Time is real: waits are bounded by SOON_S.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import pickle
import time
from dataclasses import replace
from typing import Any

import pytest

from serve_app.core.memory import (
    Device,
    EngineReply,
    EngineReport,
    Hold,
    Rank,
    SessionRequest,
    Start,
    StartsReply,
    StartsRequest,
)
from serve_app.core.shared_queue import RouterQueue
from serve_app.errors import QUOTA_AWAY, InsufficientMemory, Unavailable
from serve_app.quota import actor as quotas
from serve_app.quota.actor import GpuMemoryQuota
from serve_app.quota.kv_store import decode
from tests.quota.actor_world import ALWAYS, ENGINE, TOKENS, World, running, with_actor


async def exchanged(actor: GpuMemoryQuota, line: RouterQueue) -> None:
    """A router's beats until the actor has booked what it has."""
    for _ in range(3):
        reported = line.next_message(time.monotonic(), beat=True)
        assert reported is not None
        line.on_reply(await actor.exchange(reported), time.monotonic(), time.monotonic())
    assert not line.alone


def test_nothing_is_answered_before_the_devices_are_known(world: World) -> None:
    world.devices = None

    async def scenario(actor: GpuMemoryQuota) -> None:
        asked = asyncio.create_task(actor.engine(ENGINE))
        await asyncio.sleep(0.1)  # more than an answer takes: it waits for the devices
        assert not asked.done()
        world.devices = [Device("n", 0, 100, 0)]
        assert (await asked).may_load

    with_actor(scenario)


def test_a_grant_is_stored_before_it_is_answered_and_each_actor_has_a_higher_epoch(world: World) -> None:
    async def first(actor: GpuMemoryQuota) -> None:
        await actor.engine(ENGINE)
        assert set(world.stored) == {*ALWAYS, "engine:e"}

    async def second(actor: GpuMemoryQuota) -> None:
        figures = await actor.figures()
        assert (figures["epoch"], world.stored["epoch"]) == (2, b"2")
        await actor.devices_known.wait()
        (engine,) = (await actor.figures())["engines"]
        assert (engine["replica"], engine["granted_bytes"]) == ("e", 100)

    with_actor(first, second)


def test_the_actor_freezes_its_heap_before_it_serves(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    epochs: list[list[str]] = []
    monkeypatch.setattr(quotas, "freeze_heap", lambda: epochs.append(list(world.stored)))

    async def scenario(actor: GpuMemoryQuota) -> None:
        assert epochs == [["epoch", "inventory"]], "once, after what it reads and stores at its start"

    with_actor(scenario)


def test_an_actor_that_cannot_read_its_checkpoint_at_first_comes_up_all_the_same(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.failures = 3
    world.stored["garbage:x"] = b"null"

    async def scenario(actor: GpuMemoryQuota) -> None:
        assert (await actor.figures())["epoch"] == 1

    with_actor(scenario)


def test_an_answer_that_depends_on_nothing_new_does_not_wait_for_what_others_store(world: World) -> None:
    """Nor does an engine's word that says what it said before; what is new is answered when it is stored."""

    async def scenario(actor: GpuMemoryQuota) -> None:
        reported = await running(actor)
        line = RouterQueue("r line")
        await exchanged(actor, line)
        world.writes.clear()
        other = asyncio.create_task(actor.engine(replace(ENGINE, owner="other", ranks=(Rank("n", 1),))))
        newcomer = asyncio.create_task(exchanged(actor, RouterQueue("new line")))
        await asyncio.sleep(0.05)  # both wait for the store by now
        for _ in range(3):
            await exchanged(actor, line)
            await actor.engine(reported)
        assert not other.done()
        assert not newcomer.done()
        world.writes.set()
        assert (await other).holds
        await newcomer
        assert {"engine:other", "router:new line"} <= set(world.stored)

    world.devices = [Device("n", 0, 100, 0), Device("n", 1, 100, 0)]
    with_actor(scenario)


def test_an_event_in_the_very_turn_in_which_a_write_ends_is_stored_by_the_next_one(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(actor: GpuMemoryQuota) -> None:
        await running(actor)
        core = actor.core
        looks = itertools.count()
        later = list[asyncio.Task[Any]]()
        stored = core.checkpoint.stored
        unstored = core.unstored

        def ends(changes: Any) -> None:
            stored(changes)
            if not later:  # runs before the callback of the write that ends here
                later.append(asyncio.create_task(actor.engine(replace(ENGINE, owner="b", ranks=(Rank("n", 2),)))))

        def looked(*args: Any) -> bool:
            assert next(looks) < 1_000, "it looks again and again, and lets nobody else run"
            return unstored(*args)

        monkeypatch.setattr(core.checkpoint, "stored", ends)
        monkeypatch.setattr(core, "unstored", looked)
        await actor.engine(replace(ENGINE, owner="a", ranks=(Rank("n", 1),)))
        await later[0]
        assert {"engine:a", "engine:b"} <= set(world.stored)

    world.devices = [Device("n", number, 100, 0) for number in range(3)]
    with_actor(scenario)


def test_an_actor_answers_before_it_has_seen_the_nodes_again(world: World) -> None:
    async def scenario(actor: GpuMemoryQuota) -> None:
        await running(actor)

    async def again(actor: GpuMemoryQuota) -> None:
        assert (await actor.engine(replace(ENGINE, holds=(Hold("n/0", 100),), kv_tokens=TOKENS))).holds
        assert not (await actor.figures())["recovering"]

    with_actor(scenario)
    world.devices = None
    with_actor(again)


def test_what_cannot_be_read_keeps_no_actor_from_coming_up(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """It is put aside and told of. Of an engine or a router it is known that there was one: nothing that may be its is
    granted before it has spoken."""
    world.devices = [Device("n", 0, 100, 0), Device("n", 1, 100, 0)]

    async def scenario(actor: GpuMemoryQuota) -> None:
        await running(actor)
        await exchanged(actor, RouterQueue("r line"))

    async def again(actor: GpuMemoryQuota) -> None:
        assert sorted(world.aside) == ["berth:b", "engine:e", "garbage:x", "node:m", "router:r line", "session:s"]
        figures = await actor.figures()
        assert (figures["epoch"], figures["recovering"]) == (2, True)
        other = replace(ENGINE, owner="other")
        assert await actor.engine(other) == EngineReply(why="the ledger is being rebuilt")
        reported = replace(ENGINE, holds=(Hold("n/0", 100),), kv_tokens=TOKENS)
        assert (await actor.engine(reported)).holds == reported.holds
        assert not (await actor.engine(other)).holds, "its memory is the one's that has spoken"
        await exchanged(actor, RouterQueue("r line", 1))
        assert not (await actor.figures())["recovering"]

    with_actor(scenario)
    world.stored |= {"engine:e": pickle.dumps(ENGINE), "router:r line": b"3", "berth:b": b'{"of": "another version"}'}
    world.stored |= {"session:s": b"null", "garbage:x": b"1", "node:m": b'"n"'}
    with_actor(again)
    assert sum("puts it aside" in one.getMessage() for one in caplog.records) == 6


def test_an_epoch_that_cannot_be_read_is_followed_by_a_higher_one(world: World) -> None:
    async def scenario(actor: GpuMemoryQuota) -> None:
        assert (await actor.figures())["epoch"] > 1_000_000_000

    world.stored["epoch"] = b"17"[:0]
    with_actor(scenario)


def test_what_could_not_be_stored_is_not_answered_and_stored_later(world: World) -> None:
    async def scenario(actor: GpuMemoryQuota) -> None:
        await actor.devices_known.wait()
        world.failures = 1
        with pytest.raises(Unavailable, match="to be stored, and Ray's GCS fails: the GCS is away") as refused:
            await actor.engine(ENGINE)
        assert refused.value.code == QUOTA_AWAY
        while "engine:e" not in world.stored:  # noqa: ASYNC110 - bounded by `with_actor`
            await asyncio.sleep(0.01)

    with_actor(scenario)


def test_no_call_waits_for_ever_for_a_store_that_hangs_or_for_nodes_that_nobody_lists(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the event has changed is stored and answered once the store is back, in its order."""
    monkeypatch.setattr(quotas, "GCS_S", 0.1)
    monkeypatch.setattr(quotas, "FIRST_LOOK_S", 0.1)
    world.devices = None

    async def scenario(actor: GpuMemoryQuota) -> None:
        for asked in (actor.engine(ENGINE), actor.starts(()), actor.devices(), exchanged(actor, RouterQueue("r"))):
            with pytest.raises(Unavailable, match="waits for the devices of the nodes"):
                await asked
        world.devices = [Device("n", 0, 100, 0)]
        await actor.devices_known.wait()
        world.writes.clear()
        for asked in (actor.engine(ENGINE), exchanged(actor, RouterQueue("r"))):
            with pytest.raises(Unavailable, match="waits for its state to be stored"):
                await asked
        assert "engine:e" not in world.stored
        world.writes.set()
        assert (await actor.engine(ENGINE)).may_load
        assert "engine:e" in world.stored

    with_actor(scenario)


def test_a_dead_engines_memory_is_free_soon_after_its_processes_are_gone(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serve_app.core.quota.ENGINE_SILENT_S", 0.1)

    async def scenario(actor: GpuMemoryQuota) -> None:
        await running(actor)
        await asyncio.sleep(0.3)  # three times ENGINE_SILENT_S
        assert (await actor.figures())["granted_bytes"] == 100, "silent, and there"
        world.processes.clear()
        while set(world.stored) != set(ALWAYS):  # noqa: ASYNC110 - bounded by `with_actor`
            await asyncio.sleep(0.01)
        assert (await actor.figures())["granted_bytes"] == 0

    with_actor(scenario)


def test_a_session_waits_opens_is_reported_late_and_can_be_closed_while_it_waits(world: World) -> None:
    async def scenario(actor: GpuMemoryQuota) -> None:
        await running(actor)
        session = await actor.open_session(SessionRequest("s", "m", 1000, 60.0))
        assert session.request.tokens == 1000
        assert "session:s#1.1" in world.stored
        with pytest.raises(InsufficientMemory, match=r"1000 KV tokens asked, .* its wait is over"):
            await actor.open_session(SessionRequest("late", "m", 1000, 60.0, 0.1))
        closed = asyncio.create_task(actor.open_session(SessionRequest("closed", "m", 1000, 60.0, 5.0)))
        waits = asyncio.create_task(actor.open_session(SessionRequest("waits", "m", 1000, 60.0, 5.0)))
        await asyncio.sleep(0.05)  # both wait in the actor by now
        await actor.close_session("closed")
        with pytest.raises(Unavailable):
            await closed
        await actor.close_session("s")
        assert (await waits).request.session_id == "waits"
        assert actor.session_waiters == {}

    with_actor(scenario)


def test_a_session_that_opens_while_another_is_stored_is_reported(world: World) -> None:
    async def scenario(actor: GpuMemoryQuota) -> None:
        await running(actor)
        await actor.open_session(SessionRequest("s", "m", 1000, 60.0))
        world.writes.clear()
        closing = asyncio.create_task(actor.close_session("s"))
        stored = asyncio.create_task(actor.open_session(SessionRequest("stored", "m", 1000, 60.0)))
        waits = asyncio.create_task(actor.open_session(SessionRequest("waits", "m", 1000, 60.0, 5.0)))
        await asyncio.sleep(0.05)  # the answer that it waits is kept, for the other one's sake
        closing_too = asyncio.create_task(actor.close_session("stored"))
        await asyncio.sleep(0)
        world.writes.set()
        assert (await waits).request.session_id == "waits"
        await asyncio.gather(closing, stored, closing_too)

    with_actor(scenario)


def test_no_router_hears_of_a_session_that_is_not_stored(world: World) -> None:
    async def scenario(actor: GpuMemoryQuota) -> None:
        await running(actor)
        line = RouterQueue("r line")
        await exchanged(actor, line)
        world.writes.clear()
        opening = asyncio.create_task(actor.open_session(SessionRequest("s", "m", 1000, 60.0)))
        await asyncio.sleep(0.01)  # the opening waits for the store by now
        beat = asyncio.create_task(exchanged(actor, line))
        await asyncio.sleep(0.05)  # the store takes its time; nothing else would keep the beat
        assert (beat.done(), line.sessions) == (False, {})
        world.writes.set()
        await beat
        assert list(line.sessions) == ["s"]
        await opening

    with_actor(scenario)


def test_an_alarm_is_logged_once_with_its_figures(world: World, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(actor: GpuMemoryQuota) -> None:
        reported = await running(actor)
        for measured in (101, 102, 100, 103):
            await actor.engine(replace(reported, measured_bytes=(measured,)))
            await asyncio.sleep(0.1)  # five ticks

    with_actor(scenario)
    alarms = [one.getMessage() for one in caplog.records if "were granted" in one.getMessage()]
    assert alarms == [
        "Engine e of model m uses 101 bytes of device n/0, but 100 were granted. Raise memory_gb of the model",
        "Engine e of model m uses 103 bytes of device n/0, but 100 were granted. Raise memory_gb of the model",
    ]


def test_a_node_is_reported_as_fragmented_once_each_time_it_becomes_so(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "ray.serve")

    async def scenario(actor: GpuMemoryQuota) -> None:
        for _ in range(2):
            await actor.engine(EngineReport("e", "m", (Rank("n", 0),), 60, 60))
            await asyncio.sleep(0.1)  # five looks
            assert (await actor.figures())["fragmentation_by_node"] == {"n": 1.0}
            await actor.engine(EngineReport("e", "m", (Rank("n", 0),), 60, 60, gone=True))
            await asyncio.sleep(0.1)  # the same
            assert (await actor.figures())["fragmentation_by_node"] == {"n": 0.0}

    with_actor(scenario)
    assert [one.getMessage() for one in caplog.records if "fragmented" in one.getMessage()] == [
        "Node n has fragmented GPU memory: no engine of a model here fits into 100% of what is free"
    ] * 2


def test_an_engine_that_ends_reports_it_and_is_listed_no_more(world: World) -> None:
    async def scenario(actor: GpuMemoryQuota) -> None:
        reported = await running(actor)
        assert await actor.engine(replace(reported, gone=True)) == EngineReply(why="ended")
        assert set(world.stored) == set(ALWAYS)
        assert (await actor.figures())["free_bytes"] == 100

    with_actor(scenario)


def test_a_start_is_given_its_place_which_outlives_the_actor(world: World) -> None:
    ask = (StartsRequest("m", (Start("r", ("n",)),), requested_bytes=40),)
    place = (StartsReply({"r": "n"}),)

    async def first(actor: GpuMemoryQuota) -> None:
        assert await actor.starts(ask) == place
        assert await actor.devices() == {"n/0": (100, 100)}
        assert [name for name in world.stored if name.startswith("berth")] == ["berth:berth:m:0"]

    async def second(actor: GpuMemoryQuota) -> None:
        assert await actor.starts(ask) == place
        assert (await actor.figures())["granted_bytes"] == 40

    with_actor(first, second)


def test_the_next_actor_knows_the_devices_of_a_node_that_does_not_answer(world: World) -> None:
    async def stored(actor: GpuMemoryQuota) -> None:
        await running(actor)
        assert decode("node:n", world.stored["node:n"]) == [Device("n", 0, 100, 0)]

    async def handed_on(actor: GpuMemoryQuota) -> None:
        assert world.stored_before == {"n": [Device("n", 0, 100, 0)]}
        while [one["replica"] for one in (await actor.figures())["engines"]] != ["e"]:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.01)

    with_actor(stored, handed_on)


def test_a_node_that_is_gone_is_not_handed_on(world: World) -> None:
    async def leaves(actor: GpuMemoryQuota) -> None:
        await actor.figures()
        world.devices = []
        while "node:n" in world.stored:  # noqa: ASYNC110 - bounded by `with_actor`
            await asyncio.sleep(0)

    with_actor(leaves)


def test_a_machine_that_does_not_answer_keeps_nobody_elses_memory(world: World) -> None:
    world.devices = [Device("n", 0, 100, 0), Device("m", 0, 100, 0)]
    other = replace(ENGINE, owner="other", ranks=(Rank("m", 0),), processes=(("m", ((8, 1),)),))
    world.silent = {7}

    async def both_die(actor: GpuMemoryQuota) -> None:
        for engine in (ENGINE, other):
            await actor.engine(engine)
        world.processes.clear()
        while len((await actor.figures())["engines"]) > 1:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.01)
        assert [one["replica"] for one in (await actor.figures())["engines"]] == ["e"]

    with_actor(both_die)
