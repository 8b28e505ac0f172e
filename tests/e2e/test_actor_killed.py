"""The quota actor killed under load with slots to spare: how late what was granted completes, and how soon what is new
begins. Clients in a closed loop; simulated engines, on which a request of `TOKENS` takes `SERVICE_S`. And SIGTERM.

Moments are this machine's monotonic clock: those of a request's grant are in its receipt.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

import httpx
import pytest

from serve_app.names import ENGINE_PREFIX
from tests.e2e.crashing import ACTOR, actor, kill
from tests.e2e.stack import REQUEST_TIMEOUT_S, Stack
from tests.e2e.three import ROUTER, WIDE, WIDE_STEP_S, processes
from tests.waiting import during, patient, quiet_time, wait_until

pytestmark = pytest.mark.long  # kills under load, which test_chaos has, too

CLIENTS = 30
TOKENS = 50
SERVICE_S = WIDE_STEP_S * TOKENS
BEFORE_S = 3.0  # of load before the blow
DOWN_S = 5.0  # the actor is killed again and again for so long: past the routers' fence, so they stop by themselves
AFTER_S = 30.0  # for two requests of each client after the new actor came (one may be granted before): 2 s when idle
LATE_S = 1.0  # the promise: what was granted completes no later than that
GRANTS_S = 1.0  # the promise: new grants within that of the new actor's first word
BUSY_S = 2.0  # of this test, beside others of the suite
ENDED_S = 15.0  # it is at once
UP_S = 60.0  # an actor's Python starts within some seconds
ENGINE = f"ray::ServeReplica:serve_app:{ENGINE_PREFIX}{WIDE}"
ID_HEADER = "x-serve-app-request-id"


@dataclass(frozen=True)
class Asked:
    """A streamed request: its id and status, when its first bytes came and when it ended."""

    id: str
    status: int
    first: float
    done: float


async def asks(client: httpx.AsyncClient, is_over: Callable[[], bool], reported: list[Asked]) -> None:
    body = {"model": WIDE, "prompt": "The river", "max_tokens": TOKENS, "stream": True}
    while not is_over():
        async with client.stream("POST", "/v1/completions", json=body) as response:
            came = [time.monotonic() async for _ in response.aiter_lines()]
        reported.append(Asked(response.headers.get(ID_HEADER, ""), response.status_code, came[0], came[-1]))


async def load(three: Stack) -> tuple[list[Asked], float, float]:
    """What was asked, when the actor was killed, and when the process that stayed was started."""
    reported: list[Asked] = []
    up = math.inf
    until = math.inf

    def is_over() -> bool:
        return sum(one.first >= up for one in reported) >= 2 * CLIENTS or quiet_time() >= until

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=three.base_url, headers=three.headers(), timeout=REQUEST_TIMEOUT_S, limits=limits
    ) as client:
        clients = [asyncio.create_task(asks(client, is_over, reported)) for _ in range(CLIENTS)]
        await asyncio.sleep(BEFORE_S)  # the load runs before the kill
        pid = actor(three)
        assert pid is not None
        killed = time.monotonic()
        kill(pid)
        for _ in during(DOWN_S):
            found = actor(three)
            if found not in (None, pid):
                pid = found
                kill(pid)
            await asyncio.sleep(0.02)  # between two looks
        new = lambda: actor(three) not in (None, pid)  # noqa: E731
        await asyncio.to_thread(wait_until, new, UP_S, "the actor's process")
        up = time.monotonic()  # its title is set when it begins to construct the actor
        until = quiet_time() + AFTER_S
        await asyncio.gather(*clients)
    return reported, killed, up


def test_what_was_granted_completes_in_time_and_grants_go_on_with_the_new_actors_first_word(three: Stack) -> None:
    reported, killed, up = asyncio.run(load(three))
    assert {one.status for one in reported} == {200}

    def granted(asked: Asked) -> float:
        receipt = three.get(f"/admin/requests/{asked.id}").json()
        return float(receipt["arrived"] + receipt["wait_s"])

    running = [one for one in reported if one.first <= killed < one.done]
    late_s = max(one.done - granted(one) - SERVICE_S for one in running)
    after = sorted((one for one in reported if one.first >= up), key=lambda answer: answer.first)[:CLIENTS]
    first = min((moment for one in after if (moment := granted(one)) >= up), default=math.inf)
    moments = sorted(one.first for one in reported if one.first >= killed - BUSY_S)
    gap_s, since = max((after - one, one) for one, after in itertools.pairwise(moments))
    print(f"{len(reported)} requests; {len(running)} ran at the kill, the latest completed {late_s:.2f} s late")
    print(
        f"the actor was down for {up - killed:.2f} s; no first token for {gap_s:.2f} s from {since - killed:.2f} s on"
    )
    print(f"first grant {first - up:.2f} s after the new process was there")
    assert running, "nothing ran at the kill"
    assert late_s < patient(LATE_S + BUSY_S)
    assert first - up < patient(GRANTS_S + BUSY_S)


@pytest.mark.parametrize("title", ["ray::ServeController", "ray::StoreOwner", ACTOR, ROUTER, ENGINE])
def test_sigterm_ends_an_actors_process_at_once_and_another_takes_its_place(three: Stack, title: str) -> None:
    """By Ray's own handler a controller and a router stay for minutes, and do nothing."""
    before = processes(three, title)
    os.kill(before[0], signal.SIGTERM)
    wait_until(lambda: before[0] not in processes(three, title), ENDED_S, f"{title} has ended")
    wait_until(lambda: len(processes(three, title)) == len(before), UP_S, f"a new {title}")
    body = {"model": WIDE, "prompt": "The river", "max_tokens": 4}
    wait_until(lambda: three.post("/v1/completions", body).status_code == 200, UP_S, "an answer")
