"""Health events are log lines of their own, with a fixed form that other programs read."""

from __future__ import annotations

import asyncio
import logging

import pytest

from tests.fakes.engines import FakeCluster, run, until
from tests.fakes.failing_engines import NEVER, Broken
from tests.fakes.quota import FakeQuota, at_rest, fleet, spoken
from tests.fakes.quota import run as run_with_actor
from tests.fakes.router import SOON_S, Router


def lines(caplog: pytest.LogCaptureFixture, part: str) -> list[tuple[str, str]]:
    return [(one.levelname, one.getMessage()) for one in caplog.records if part in one.getMessage()]


def test_a_replica_s_start_ejection_and_end_are_lines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ray.serve")

    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add("r1", "r2")
        router = await Router(cluster).start()
        Broken(cluster, "r1")
        for _ in range(12):
            await router.ask()
        await asyncio.gather(*(router.ask() for _ in range(12)))
        router.model.replica_set.set_running(frozenset({"r2"}))
        await router.settled()

    run(scenario, waits=NEVER)
    started = lines(caplog, "started to take requests")
    assert [(level, text.split()[1]) for level, text in started] == [("INFO", "r1"), ("INFO", "r2")]
    (ejected,) = lines(caplog, "gets no requests for")
    assert (ejected[0], ejected[1].startswith("Replica r1 "), "(reason: consecutive" in ejected[1]) == (
        "WARNING",
        True,
        True,
    ), ejected
    (left,) = lines(caplog, " left and still runs ")
    assert (left[0], left[1].startswith("Replica r1 of model ")) == ("INFO", True)


def test_an_actor_that_is_away_and_back_as_another_one_is_one_line_each(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ray.serve")

    async def scenario() -> None:
        actor = FakeQuota({"r1": 1})
        async with fleet(actor, 1) as (caller,):
            await spoken(caller)
            actor.die()
            await until(lambda: caller.is_alone, SOON_S, "it knows")
            actor.start()
            await spoken(caller)
            await at_rest(actor, caller)

    run_with_actor(scenario)
    ((level, away),) = lines(caplog, "does not answer router")
    assert (level, away.startswith("Quota actor does not answer router ")) == ("WARNING", True)
    ((level, back),) = lines(caplog, "was restarted")
    assert (level, back.startswith("Quota actor was restarted with epoch ")) == ("WARNING", True)


def test_an_actor_that_was_only_slow_is_back_without_a_restart(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ray.serve")

    async def scenario() -> None:
        actor = FakeQuota({"r1": 1})
        async with fleet(actor, 1) as (caller,):
            await spoken(caller)
            with actor.standing_still():
                await until(lambda: bool(lines(caplog, "does not answer router")), SOON_S, "a call that lasts too long")
            await spoken(caller)
            await at_rest(actor, caller)

    run_with_actor(scenario)
    assert [level for level, _ in lines(caplog, "answers router")] == ["INFO"]
    assert lines(caplog, "was restarted") == []
