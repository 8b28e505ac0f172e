"""The clock that tests of routers and engines run by (`tests/fakes/virtual_time.py`)."""

from __future__ import annotations

import asyncio
import multiprocessing
import socket
import threading
import time

import pytest

from tests.fakes.virtual_time import EARLY_S, TURN_S, now, run_in_virtual_time, virtual_runner

HOUR_S = 3600.0


def test_hours_pass_at_once_and_every_clock_tells_them() -> None:
    async def scenario() -> float:
        began = time.monotonic()
        await asyncio.sleep(HOUR_S)  # virtual
        return time.monotonic() - began

    began_s = time.perf_counter()
    with virtual_runner(TURN_S) as runner:
        assert runner.run(scenario()) == pytest.approx(HOUR_S, abs=0.01)
    assert time.perf_counter() - began_s < HOUR_S / 60


def test_what_was_sent_within_the_process_comes_before_a_timer() -> None:
    async def scenario() -> list[str]:
        order: list[str] = []
        near, far = socket.socketpair()
        reader, _ = await asyncio.open_connection(sock=far)
        asyncio.get_running_loop().call_later(0.05, order.append, "timer")
        near.send(b"message\n")
        order.append((await reader.readline()).decode().strip())
        await asyncio.sleep(1.0)  # virtual
        near.close()
        return order

    with virtual_runner(TURN_S) as runner:
        assert runner.run(scenario()) == ["message", "timer"]


def test_another_thread_is_waited_for_in_real_time() -> None:
    free = threading.Event()

    async def scenario() -> bool:
        asyncio.get_running_loop().call_later(0.01, free.set)
        async with asyncio.timeout(HOUR_S):
            return await asyncio.to_thread(free.wait, HOUR_S)

    assert run_in_virtual_time(scenario())


def test_a_scenario_that_only_turns_sees_its_timers() -> None:
    async def scenario() -> float:
        due = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_later(0.01, due.set_result, None)
        for _ in range(round(HOUR_S)):
            await asyncio.sleep(0)
            if due.done():
                break
        return now()

    with virtual_runner(TURN_S) as runner:
        assert runner.run(scenario()) == pytest.approx(0.01, abs=2 * TURN_S)


def test_a_timer_that_fires_early_and_is_set_again_for_its_moment_comes_to_it() -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        came = asyncio.Event()
        due = HOUR_S + EARLY_S / 2

        def look() -> None:
            if loop.time() >= due:
                came.set()
            else:
                loop.call_at(due, look)
                loop.call_soon(int)  # and something else has to run

        await asyncio.sleep(HOUR_S)  # virtual
        loop.call_at(due, look)
        async with asyncio.timeout(1.0):
            await came.wait()

    run_in_virtual_time(scenario())


def test_a_scenario_that_waits_for_nothing_is_reported() -> None:
    async def scenario() -> None:
        await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match="never happens"):
        run_in_virtual_time(scenario())


@pytest.mark.parametrize("kind", ["asyncio", "multiprocessing"])
def test_a_scenario_with_another_process_is_informed_that_the_clock_would_not_wait_for_it(kind: str) -> None:
    async def scenario() -> None:
        if kind == "asyncio":
            await asyncio.create_subprocess_exec("true")
        else:
            multiprocessing.get_context("spawn").Process(target=int).start()

    with pytest.raises(RuntimeError, match="real time"):
        run_in_virtual_time(scenario())
