"""Whatever dies or stands still, and when: the ledger is what is really there again, and nothing fails that need not.

Simulated engines, real processes and signals, on the cluster that other modules change, too; the load on the model
`steady` runs through the whole module where a test says so.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest

from serve_app.names import ROUTER, deployment_of
from tests.e2e.changing import CHANGED_S, OTHER, STEADY, Load, Place, configured, model
from tests.e2e.crashing import CLIENT_PAIRS, actor, failed, kill, known, load, settled, unless_gone
from tests.waiting import during, wait_until

pytestmark = pytest.mark.long  # kills of a cluster; test_chaos kills the same under load

ROUTERS = 2
EQUAL_S = 10.0  # the promise: after a crash the ledger equals reality
ENGINE_BACK_S = 5.0  # the promise: a dead engine's memory is free
ROUTER_BACK_S = 5.0  # the promise: a dead router's shares are free
LOOKS_S = 2.0  # of this test, beside others of the suite: a look asks Serve, which answers within a second
STILL_S = 6.0  # longer than any owner may be silent
STORM_S = 20.0
STORM_GAP_S = (0.2, 2.0)  # between blows
CLIENTS = 16
WARM_REQUESTS = 1000
REQUESTS = 20_000
GROWN_BYTES = 8e6  # 400 bytes a request would be a leak; pages that Python keeps are not
BASE = configured(model(OTHER), router={"replicas": ROUTERS})
BASE["models"][0]["replicas"] = {"min_replicas": 2, "max_replicas": 2}
GB = 1e9

Figures = Mapping[str, Any]


@pytest.fixture(scope="module")
def place(changing: Place) -> Place:
    changing.begin(BASE)
    settled(changing)
    return changing


def whole(place: Place) -> None:
    """All replicas of the base configuration run, its routers, too, and the ledger says so."""
    place.wait_running(BASE)
    settled(place)


def test_every_engine_has_one_grant_and_every_router_a_share_of_it(place: Place) -> None:
    settled(place)
    figures = place.quota()
    assert figures is not None
    assert len(figures["engines"]) == 3
    assert figures["waiting"] == figures["alarms"] == []
    assert figures["overdrawn_tokens"] == 0
    assert all(one["measured_bytes"] > 0 for one in figures["engines"])


def test_a_killed_engines_memory_is_free_within_five_seconds_and_it_is_replaced(place: Place) -> None:
    (before,) = place.replicas(OTHER)[OTHER]
    with load(place) as running:
        kill(place.process(deployment_of(OTHER)))
        took_s = wait_until(lambda: before not in known(place), ENGINE_BACK_S + LOOKS_S, "the grant is back").wall_s
        whole_s = settled(place, CHANGED_S, idle=False)
    print(f"a killed engine's memory was free after {took_s:.1f} s, and another had it after {whole_s:.1f} s more")
    assert failed(running) == []
    whole(place)


def test_an_engine_that_stands_still_keeps_its_memory_until_its_process_is_gone(place: Place) -> None:
    (before,) = place.replicas(OTHER)[OTHER]
    process = place.process(deployment_of(OTHER))

    def state() -> str:
        figures = place.quota() or {"engines": []}
        return next((one["state"] for one in figures["engines"] if one["replica"] == before), "none")

    os.kill(process, signal.SIGSTOP)
    try:
        wait_until(lambda: state() == "ending", STILL_S + LOOKS_S, "it counts as gone")
    finally:
        kill(process)
    took_s = wait_until(lambda: state() == "none", ENGINE_BACK_S + LOOKS_S, "its memory is free").wall_s
    print(f"free {took_s:.1f} s after the process was gone")
    whole(place)


def test_an_engine_that_stood_still_has_its_grant_again_and_no_request_fails(place: Place) -> None:
    before = place.replicas(STEADY)[STEADY]
    with load(place) as running, place.paused(STEADY):
        time.sleep(STILL_S)  # the span under test
    assert failed(running) == []
    settled(place, EQUAL_S + LOOKS_S)
    assert place.replicas(STEADY)[STEADY] == before


def test_requests_go_on_when_the_quota_actor_is_killed(place: Place) -> None:
    before = place.quota()
    assert before is not None
    with load(place) as running:
        pid = actor(place)
        assert pid is not None
        kill(pid)
        took_s = settled(place, EQUAL_S + LOOKS_S, idle=False)
    after = place.quota()
    assert after is not None
    print(f"a new quota actor had the figures after {took_s:.1f} s; {sum(one.answered for one in running)} requests")
    assert failed(running) == []
    assert after["epoch"] == before["epoch"] + 1
    assert after["overdrawn_tokens"] == 0
    settled(place)


def test_requests_wait_and_do_not_fail_while_the_quota_actor_stands_still(place: Place) -> None:
    before = place.quota()
    assert before is not None
    with load(place) as running:
        pid = actor(place)
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        try:
            time.sleep(STILL_S)  # the span under test
        finally:
            os.kill(pid, signal.SIGCONT)
        settled(place, EQUAL_S + LOOKS_S, idle=False)
    after = place.quota()
    assert after is not None
    assert failed(running) == []
    assert after["epoch"] == before["epoch"], "it was not replaced"
    assert after["overdrawn_tokens"] == before["overdrawn_tokens"], "nobody lost a share for the actor's own silence"


def test_a_killed_routers_shares_are_back_within_five_seconds(place: Place) -> None:
    victim = place.processes(ROUTER)[0]
    before = set(place.replicas(ROUTER)[ROUTER])
    kill(victim)

    def one_is_gone() -> bool:
        figures = place.quota() or {"engines": []}
        shares = [set(one["kv_tokens_by_router"]) & before for one in figures["engines"]]
        return bool(shares) and all(len(one) == ROUTERS - 1 for one in shares)

    took_s = wait_until(one_is_gone, ROUTER_BACK_S + LOOKS_S, "its shares are back").wall_s
    print(f"a killed router's shares were free after {took_s:.1f} s")
    whole(place)


def test_after_a_storm_of_kills_and_standstills_the_ledger_is_what_there_is(place: Place) -> None:
    chance = random.Random(4)
    stopped: list[int] = []
    blows: list[str] = []
    running = [Load(place.endpoint) for _ in range(CLIENT_PAIRS)]
    for _ in during(STORM_S):
        victim = chance.choice(["actor", ROUTER, deployment_of(OTHER), deployment_of(STEADY)])
        found = [actor(place)] if victim == "actor" else place.processes(victim)
        alive = [pid for pid in found if pid is not None]
        if alive:
            pid = chance.choice(alive)
            how = chance.choice([signal.SIGKILL, signal.SIGSTOP])
            with unless_gone():
                os.kill(pid, how)
            stopped += [pid] if how is signal.SIGSTOP else []
            blows.append(f"{how.name} {victim}")
        time.sleep(chance.uniform(*STORM_GAP_S))  # bound: STORM_S in all
        if len(stopped) > 1:
            with unless_gone():
                os.kill(stopped.pop(0), signal.SIGCONT)
    for pid in stopped:
        with unless_gone():
            os.kill(pid, signal.SIGCONT)
    for thread in running:
        thread.stop()
    place.wait_running(BASE)
    took_s = settled(place, EQUAL_S + LOOKS_S)
    print(f"{len(blows)} blows: {', '.join(blows)}; equal {took_s:.1f} s after all replicas ran")
    assert place.endpoint.ask(STEADY).status == place.endpoint.ask(OTHER).status == 200


def leaves_while_blocked(place: Place, *models: dict[str, Any]) -> float:
    """A further model that waits for memory is taken out again: its replica does not stay in the line."""
    third = model("third", memory_gb=models[-1]["memory_gb"])
    place.declare(configured(*models, third, router={"replicas": ROUTERS}))

    def waits() -> bool:
        return any(one["model"] == "third" for one in (place.quota() or {"waiting": []})["waiting"])

    wait_until(waits, CHANGED_S, "the third waits")
    place.declare(configured(*models, router={"replicas": ROUTERS}))
    return wait_until(lambda: place.quota() is not None and not waits(), EQUAL_S, "the third is gone").wall_s


def test_a_replica_too_many_is_blocked_where_all_can_see_and_starts_when_there_is_room(place: Place) -> None:
    figures = place.quota()
    assert figures is not None
    most_gb = round(0.6 * figures["total_bytes"] / 1e9, 2)
    first, second = (model(name, memory_gb=most_gb) for name in ("first", "second"))
    place.become(configured(model(OTHER), first, router={"replicas": ROUTERS}))
    place.declare(configured(model(OTHER), first, second, router={"replicas": ROUTERS}))

    def blocked() -> dict[str, Any] | None:
        (found,) = [one for one in place.status()["models"] if one["name"] == "second"] or [{"state": ""}]
        return found if found["state"] == "blocked: memory" else None

    wait_until(blocked, CHANGED_S, "the second is blocked")
    seen = blocked()
    assert seen is not None
    assert "1 replica waits for" in seen["message"]
    assert "GB needed" in seen["message"]
    assert place.endpoint.ask("first").status == 200
    wait_until(
        lambda: place.endpoint.figure("serve_app_blocked", model="second") == ROUTERS, CHANGED_S, "by each router"
    )
    assert place.endpoint.figure("serve_app_blocked", model="first") == 0
    waiting = (place.quota() or {})["waiting"]
    assert [(one["model"], one["state"]) for one in waiting] == [("second", "blocked: memory")]
    replica = waiting[0]["replica"]
    time.sleep(STILL_S)  # the span in which it must not be restarted
    assert [one["replica"] for one in (place.quota() or {})["waiting"]] == [replica]
    took_s = leaves_while_blocked(place, model(OTHER), first, second)
    print(f"a replica that waited for memory was gone {took_s:.1f} s after its model was taken out")
    place.declare(configured(model(OTHER), second, router={"replicas": ROUTERS}))
    wait_until(lambda: place.endpoint.serves("second"), CHANGED_S, "it starts by itself")
    assert place.replicas("second") == {"second": [replica]}, "the very one that waited"
    settled(place)
    place.become(BASE)
    settled(place)


def test_the_actors_memory_does_not_grow_with_requests(place: Place) -> None:
    fast = model("fast", max_num_seqs=64, simulated={"decode_step_s": 0.0, "kv_cache_tokens": 65_536})
    place.become(configured(model(OTHER), fast, router={"replicas": ROUTERS}))
    pid = actor(place)
    assert pid is not None
    process = psutil.Process(pid)

    def serve(requests: int) -> None:
        with ThreadPoolExecutor(CLIENTS) as clients:
            answers = clients.map(lambda _: place.endpoint.ask("fast", 1).status, range(requests))
            assert set(answers) == {200}

    serve(WARM_REQUESTS)
    before = process.memory_info().rss
    serve(REQUESTS)
    grown = process.memory_info().rss - before
    print(f"{before / 1e6:.1f} MB after {WARM_REQUESTS} requests, {grown / 1e6:+.1f} MB after {REQUESTS} more")
    assert actor(place) == pid
    assert grown < GROWN_BYTES
    place.become(BASE)
