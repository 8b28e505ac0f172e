"""An engine under grant: it waits, loads in its turn, says what it has all its life, and ends when it has to.

The quota actor is a function of the test; the words come from the grant's own thread, so waits are real and bounded.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence

import pytest

from serve_app.core.memory import DrainReport, EngineReply, EngineReport, Hold, Process, Rank
from serve_app.engine.start import memory_grant
from serve_app.engine.start.memory_grant import LOAD_STALL_S, PROGRESS_BYTES, MemoryGrant, MemoryMeter
from serve_app.errors import InsufficientMemory, LeaseConflict, Unavailable
from tests.waiting import quiet_time, wait_until

SOON_S = 5.0  # for what takes milliseconds on an idle machine
ASK = EngineReport("e", "m", (Rank("n"),), 100, 50)
HOLDS = (Hold("n/0", 100),)


class Away(Exception):
    """What Ray raises while the actor is away."""


class Actor:
    """Answers with `reply`, or raises it."""

    def __init__(self, reply: EngineReply | Exception) -> None:
        self.reply = reply
        self.words: list[EngineReport] = []

    def __call__(self, report: EngineReport) -> EngineReply:
        self.words.append(report)
        if isinstance(self.reply, Exception):
            raise self.reply
        return self.reply

    @property
    def last(self) -> EngineReport:
        return self.words[-1]


class Ends:
    def __init__(self) -> None:
        self.why: list[str] = []
        self.drained = 0
        self.within_s = 0.0

    def lost(self, why: str) -> None:
        self.why.append(why)

    def drain(self, within_s: float) -> None:
        self.drained += 1
        self.within_s = within_s


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Sizes:
    """What is measured of an engine."""

    node = "n"

    def __init__(self) -> None:
        self.resident_bytes = self.device_bytes = 0
        self.processes = 1

    def measure(self, holds: Sequence[Hold]) -> tuple[tuple[Process, ...], tuple[int | None, ...]]:
        return ((7, 1),) * (1 + self.processes // PROGRESS_BYTES), (self.device_bytes, None)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_grant, "ENGINE_HEARTBEAT_S", 0.02)
    monkeypatch.setattr(memory_grant, "ENGINE_ASK_S", 0.02)


def grant_of(actor: Actor, ends: Ends | None = None) -> MemoryGrant:
    ends = ends or Ends()
    return MemoryGrant(ASK, actor, (Away,), ends.lost, ends.drain, MemoryMeter("n", gpus=False))


def until(condition: Callable[[], bool]) -> None:
    wait_until(condition, SOON_S, "the condition of this line")


def obtained(actor: Actor, ends: Ends | None = None) -> MemoryGrant:
    grant = grant_of(actor, ends)
    assert asyncio.run(grant.obtain(SOON_S)) == HOLDS
    return grant


def test_an_engine_waits_for_its_memory_and_then_for_its_turn() -> None:
    actor = Actor(EngineReply(why="n/0: at least 50 bytes needed, 3 free"))
    grant = grant_of(actor)

    async def scenario() -> None:
        task = asyncio.create_task(grant.obtain(SOON_S))
        await asyncio.sleep(0.1)  # several reports, each answered with no
        actor.reply = EngineReply(HOLDS)
        await asyncio.sleep(0.1)  # and several by which it holds the memory and may not load yet
        assert not task.done()
        assert not actor.last.loading
        actor.reply = EngineReply(HOLDS, may_load=True)
        assert await task == HOLDS

    asyncio.run(scenario())
    assert actor.words[0].holds == ()
    until(lambda: actor.last.loading and actor.last.holds == HOLDS)
    grant.engine_started(1000, 80, 4, "f")
    until(lambda: (actor.last.kv_tokens, actor.last.kv_bytes, actor.last.loading) == (1000, 80, False))
    assert actor.last.fingerprint == "f"
    grant.end()
    assert actor.last.gone


def test_what_ranks_on_other_nodes_have_taken_is_counted_like_what_is_measured_here() -> None:
    actor = Actor(EngineReply(HOLDS, may_load=True))
    sizes = Sizes()
    taken = list[int]()
    sizes.device_bytes = 40  # of one of two ranks; the other cannot be measured
    ends = Ends()
    grant = MemoryGrant(ASK, actor, (Away,), ends.lost, ends.drain, sizes, start=taken.append)  # type: ignore[arg-type]
    assert asyncio.run(grant.obtain(SOON_S)) == HOLDS
    until(lambda: bool(taken))
    grant.end()
    assert taken[0] == 80


def test_an_engine_says_that_it_loads_though_the_actor_has_forgotten_its_turn() -> None:
    actor = Actor(EngineReply(HOLDS, may_load=True))
    grant = obtained(actor)
    actor.reply = EngineReply(HOLDS)  # a new actor, that waits for all to speak
    until(lambda: len(actor.words) > 5)
    assert actor.last.loading
    grant.end()


def test_an_engine_that_gets_no_memory_in_time_says_what_was_missing_and_lets_go() -> None:
    actor = Actor(EngineReply(why="3 free"))
    with pytest.raises(Unavailable, match="blocked: memory: 3 free") as refused:
        asyncio.run(grant_of(actor).obtain(0.1))
    assert refused.value.code == "blocked_memory"
    assert actor.last.gone


def test_an_engine_that_is_asked_to_end_while_it_waits_leaves_the_queue_at_once() -> None:
    actor = Actor(EngineReply(why="3 free"))

    async def scenario() -> None:
        task = asyncio.create_task(grant_of(actor).obtain(SOON_S))
        await asyncio.sleep(0.1)  # it waits by now
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(scenario())
    assert actor.last.gone


@pytest.mark.parametrize("error", [LeaseConflict("another's"), InsufficientMemory("another's")])
def test_an_engine_whose_memory_is_anothers_ends(error: Exception) -> None:
    actor = Actor(EngineReply(HOLDS, may_load=True))
    ends = Ends()
    obtained(actor, ends)
    actor.reply = error
    until(lambda: ends.why == ["another's"])
    words = len(actor.words)
    time.sleep(0.1)  # five beats
    assert len(actor.words) == words, "and says no more"


@pytest.mark.parametrize("error", [Away("gone"), RuntimeError("a mistake")])
def test_an_engine_goes_on_while_the_actor_is_away_and_speaks_again(error: Exception) -> None:
    actor = Actor(EngineReply(HOLDS, may_load=True))
    ends = Ends()
    grant = obtained(actor, ends)
    grant.engine_started(10, 10, 1, "f")
    actor.reply = error
    words = len(actor.words)
    until(lambda: len(actor.words) > words + 3)
    assert ends.why == []
    actor.reply = EngineReply(HOLDS)
    until(lambda: actor.last.kv_tokens == 10)
    assert actor.last.holds == HOLDS, "what it was granted, as it knows"
    grant.end()


def test_an_engine_that_hangs_while_it_loads_says_so_and_ends() -> None:
    """Any progress puts that off: a process more, or some megabytes. One that runs is not looked at."""
    clock = Clock()
    ends = Ends()
    actor = Actor(EngineReply(HOLDS, may_load=True))
    sizes = Sizes()
    grant = MemoryGrant(ASK, actor, (Away,), ends.lost, ends.drain, sizes, clock=clock)
    assert asyncio.run(grant.obtain(SOON_S)) == HOLDS
    until(lambda: actor.last.loading)
    for progress in ("processes", "resident_bytes", "device_bytes"):
        clock.now += LOAD_STALL_S - 1.0
        setattr(sizes, progress, getattr(sizes, progress) + PROGRESS_BYTES)
        words = len(actor.words)
        until(lambda seen=words: len(actor.words) > seen + 2)
    clock.now += LOAD_STALL_S - 1.0
    sizes.resident_bytes += 1000
    words = len(actor.words)
    until(lambda: len(actor.words) > words + 2)
    assert (actor.last.failed, ends.why) == ("", [])
    clock.now += 2.0
    until(lambda: bool(ends.why))
    assert ends.why == [actor.last.failed] == [f"loading has made no progress for {LOAD_STALL_S + 1:.0f} s"]
    assert not actor.last.gone, "its memory is free once it is seen free"


def test_an_engine_that_runs_may_stand_still_for_as_long_as_it_likes() -> None:
    clock = Clock()
    ends = Ends()
    actor = Actor(EngineReply(HOLDS, may_load=True))
    grant = MemoryGrant(ASK, actor, (Away,), ends.lost, ends.drain, Sizes(), clock=clock)
    asyncio.run(grant.obtain(SOON_S))
    grant.engine_started(1000, 80, 4, "f")
    for _ in range(3):
        words = len(actor.words)
        until(lambda seen=words: len(actor.words) > seen + 2)
        clock.now += 10 * LOAD_STALL_S
    assert ends.why == []
    grant.end()


def test_an_engine_that_is_to_make_room_is_asked_to_drain() -> None:
    actor = Actor(EngineReply(HOLDS, may_load=True))
    ends = Ends()
    grant = obtained(actor, ends)
    assert ends.drained == 0
    actor.reply = EngineReply(HOLDS, drain=True, drain_s=7.0)
    until(lambda: ends.drained > 0)
    assert ends.within_s == 7.0
    grant.end()


def test_words_go_on_while_the_event_loop_is_held_up() -> None:
    """As loading a model does."""
    actor = Actor(EngineReply(HOLDS, may_load=True))

    async def scenario() -> None:
        grant = grant_of(actor)
        await grant.obtain(SOON_S)
        words = len(actor.words)
        until(lambda: len(actor.words) > words + 3)  # the loop stands still meanwhile
        grant.end()

    asyncio.run(scenario())


def test_the_end_is_reported_once_and_does_not_hang_on_an_actor_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory_grant, "LAST_REPORT_S", 0.1)
    hangs = threading.Event()
    actor = Actor(EngineReply(HOLDS, may_load=True))
    grant = obtained(actor)

    def stuck(report: EngineReport) -> EngineReply:
        hangs.wait(SOON_S)
        return EngineReply()

    grant.send = stuck
    began = quiet_time()
    grant.end()
    grant.end()
    assert quiet_time() - began < SOON_S / 2
    hangs.set()


def test_an_engine_that_has_died_says_why_at_once_and_not_that_its_memory_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory_grant, "ENGINE_HEARTBEAT_S", SOON_S)
    actor = Actor(EngineReply(HOLDS, may_load=True))
    ends = Ends()
    grant = obtained(actor, ends)
    grant.engine_started(10, 10, 1, "f")
    grant.fail("out of memory")
    until(lambda: actor.last.failed == "out of memory")
    assert (actor.last.gone, actor.last.holds, actor.last.kv_tokens) == (False, HOLDS, 10)
    words = len(actor.words)
    grant.end()
    assert (len(actor.words), ends.why) == (words, []), "it is its last report"


def test_a_drain_time_that_changes_and_what_became_of_a_drain_are_reported() -> None:
    actor = Actor(EngineReply(HOLDS, may_load=True))
    ends = Ends()
    drained = [None, DrainReport(5.0, running=2)]
    meter = MemoryMeter("n", gpus=False)
    grant = MemoryGrant(ASK, actor, (Away,), ends.lost, ends.drain, meter, drained=lambda: drained[-1])
    asyncio.run(grant.obtain(SOON_S))
    grant.set_drain_s(77.0)
    until(lambda: actor.last.drain_s == 77.0)
    assert actor.last.drain == DrainReport(5.0, running=2)
    drained.append(DrainReport(0.0, finished=2))
    grant.end()
    assert (actor.last.gone, actor.last.drain) == (True, DrainReport(0.0, finished=2))
