"""When requests are moved off a replica that drains."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from serve_app.core.times import OVERDUE_S
from serve_app.router.drain_timers import DrainTimers
from tests.fakes.virtual_time import now, run_in_virtual_time


def moves(play: Callable[[DrainTimers], None], *, overdue: bool = False) -> list[tuple[str, float]]:
    """Which replicas are moved off, and when; or given up."""

    async def scenario() -> list[tuple[str, float]]:
        moved: list[tuple[str, float]] = []

        def note(replica_id: str) -> None:
            moved.append((replica_id, round(now(), 3)))

        play(DrainTimers(str, note) if overdue else DrainTimers(note, str))
        await asyncio.sleep(100.0)  # of virtual time
        return moved

    return run_in_virtual_time(scenario())


def test_each_replica_is_moved_off_once_at_its_deadline() -> None:
    def play(timers: DrainTimers) -> None:
        timers.begin("a", 30.0)
        timers.begin("b", 10.0)

    assert moves(play) == [("b", 10.0), ("a", 30.0)]


def test_only_a_nearer_deadline_counts() -> None:
    def play(timers: DrainTimers) -> None:
        for within_s in (30.0, 5.0, 60.0):
            timers.begin("a", within_s)

    assert moves(play) == [("a", 5.0)]


def test_what_is_still_there_when_a_replica_should_have_ended_is_given_up() -> None:
    def play(timers: DrainTimers) -> None:
        for within_s in (30.0, 5.0, 60.0):
            timers.begin("a", within_s)
        timers.begin("b", 1.0)
        asyncio.get_running_loop().call_later(2.0, timers.end, "b")
        asyncio.get_running_loop().call_later(6.0, timers.begin, "a", 1.0)

    assert moves(play, overdue=True) == [("a", 5.0 + OVERDUE_S)]


def test_nothing_is_moved_off_a_replica_that_is_back() -> None:
    def play(timers: DrainTimers) -> None:
        timers.begin("a", 5.0)
        timers.end("a")
        timers.end("b")

    assert moves(play) == []
