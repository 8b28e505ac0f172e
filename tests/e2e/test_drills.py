"""Eight faults on a real stack: what the console, the events and the alerts show, and that it ends with the fault.

The tests run in this order on one stack, and each leaves its part whole; two faults come at once where neither hides
the other. The alerts with a window end in the last one. What an operator does about a fault is in the how-to page.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.common.processes import titled
from serve_app.names import ROUTER, deployment_of
from tests.e2e.changing import CHANGED_S, KEY
from tests.e2e.crashing import failed, kill, load, unless_gone
from tests.e2e.drills import (
    BULK,
    BULK_KEY,
    CHAT,
    CHAT_GB,
    CHAT_REPLICAS,
    CLASS_FLOODS,
    DISK_FULL,
    DRILLS,
    ENGINE_FROZEN,
    ENGINE_KILLED,
    HOG,
    LARGE,
    MAX_QUEUED,
    MEMORY_REFUSED,
    OVER_S,
    QUIET,
    QUIET_KEY,
    ROUTER_LOST,
    ROUTERS,
    SHOWN_S,
    SLOTS,
    SMALL,
    STEP_S,
    STORE_DEAD,
    TENANT_HOGS,
    TRY_S,
    Drill,
    Fault,
    Stage,
    any_of,
    configured,
    filled,
    is_whole,
    model,
    now,
    staged,
    waiting_of,
)
from tests.e2e.half_closed import read_until, reading, send
from tests.requires import requires
from tests.waiting import patient, wait_until

PAGE = Path(__file__).parents[2] / "docs/how-to/troubleshooting.md"
CHAPTER = "Eight faults and how they look"
COMPLETIONS = "/v1/completions"
HOGS = 2 * SLOTS  # requests: they take all slots twice
HOG_S = 8.0  # of a quiet machine, for each: the quiet tenant's first token comes later than the alert's five
LONGEST_HOG_S = 80.0  # the quiet tenant waits for one of them
ENDLESS = 130_000  # tokens
FLOOD = round(0.9 * MAX_QUEUED)
GB = 1e9


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    for needed in ("linux", "prometheus", "chromium", "mounts"):
        requires(needed)
    with staged(tmp_path_factory.mktemp("drills")) as running:
        yield running


def chat_engine(stage: Stage) -> int:
    """The process of its oldest replica, once all of them run."""
    name = deployment_of(CHAT)
    wait_until(lambda: len(stage.place.processes(name)), CHANGED_S, "engines", wanted=CHAT_REPLICAS, poll_s=TRY_S)
    return min(stage.place.processes(name), key=lambda pid: psutil.Process(pid).create_time())


@contextlib.contextmanager
def standing_still(pid: int) -> Iterator[None]:
    """A process that does nothing for the block, with all its connections open."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with unless_gone():
            os.kill(pid, signal.SIGCONT)


def body(tokens: int, **more: Any) -> dict[str, Any]:
    return {"model": SMALL, "prompt": "The river", "max_tokens": tokens, "stream": True, "ignore_eos": True} | more


def events_of_small(fault: Fault) -> list[str]:
    return [one["message"] for one in fault.stage.events(fault.begun) if one["subject"] == SMALL]


def test_a_killed_engine_is_shown_as_missing_until_another_one_runs(stage: Stage) -> None:
    with load(stage.place, CHAT) as running:
        victim = chat_engine(stage)
        fault = Fault(stage, ENGINE_KILLED)
        kill(victim)
        fault.on_page()
        fault.on_console(lambda state: not is_whole(state, CHAT, CHAT_REPLICAS), "a replica less")
        assert fault.in_events()["subject"] == CHAT
        fault.in_events("gets no requests for", reason="lost")
        fault.alerts(model=CHAT)
        fault.is_over(lambda state: is_whole(state, CHAT, CHAT_REPLICAS), "all replicas")
        fault.in_events("new are")
    assert failed(running) == []


def test_a_frozen_engine_and_a_store_that_hangs_are_shown_until_they_answer_again(stage: Stage) -> None:
    (owner,) = titled(stage.place.cluster.pids(), "ray::StoreOwner")
    has_store = lambda: stage.console.states[-1]["missing"] == []  # noqa: E731
    wait_until(has_store, SHOWN_S, "the store answers", poll_s=TRY_S)
    with load(stage.place, CHAT) as running:
        victim = chat_engine(stage)
        engine = Fault(stage, ENGINE_FROZEN)
        store = Fault(stage, STORE_DEAD)
        with standing_still(victim), standing_still(owner):
            engine.on_page()
            engine.on_console(lambda state: any_of(state, CHAT, "silent"), "a silent replica")
            store.alerts(part="store")
            assert stage.place.endpoint.ask(SMALL, key=stage.hog_key).status == 200, "known keys stay valid"
            store.on_console(lambda state: "store" in state["missing"], "no store")
            store.on_page()
            engine.in_events(reason="lost")
            engine.alerts(model=CHAT)
            store.in_events(away=True)
        store.is_over(lambda state: state["missing"] == [], "nothing missing")
        store.in_events("Store answers again", away=False)
        engine.is_over(lambda state: is_whole(state, CHAT, CHAT_REPLICAS), "no ejected replica")
        engine.in_events("gets requests again")
        for fault in (engine, store):
            fault.alert_is_over()
    assert failed(running) == []
    assert stage.stack.get("/admin/keys").status_code == 200


def hog_is_limited(stage: Stage) -> None:
    """Set a limit, and wait until every router refuses what exceeds it. A request counts that began under the limit, so
    each look has a stream of its own."""
    limited = stage.stack.post(f"/admin/keys/{stage.hog_id}", {"limits": {"max_concurrent": 1}})
    assert limited.status_code == 200, limited.text

    def second() -> set[int]:
        with send(stage.stack, COMPLETIONS, body(ENDLESS), key=stage.hog_key) as first:
            read_until(first, b"\r\n\r\n")
            return {stage.place.endpoint.ask(SMALL, key=stage.hog_key).status for _ in range(2 * ROUTERS)}

    wait_until(second, SHOWN_S, "a second request of its is refused", wanted={429}, poll_s=TRY_S)


def test_a_tenant_that_takes_all_and_an_engine_without_memory_are_shown_until_both_have_their_part(
    stage: Stage,
) -> None:
    hogging = Fault(stage, TENANT_HOGS)
    tokens = round(min(patient(HOG_S), LONGEST_HOG_S) / STEP_S)
    with contextlib.ExitStack() as requests_of_hog:
        for _ in range(HOGS):
            requests_of_hog.enter_context(reading(send(stage.stack, COMPLETIONS, body(tokens), key=stage.hog_key)))
        hogging.on_console(lambda state: waiting_of(state, SMALL, HOG), "its requests that wait")
        quiet = stage.place.endpoint.asking(SMALL, key=QUIET_KEY)
        hogging.on_console(lambda state: waiting_of(state, SMALL, QUIET), "another tenant's that waits")
        hogging.on_page("Who waits, and why", HOG, QUIET)
        memory_is_refused_and_freed(stage)
        assert quiet.answer().status == 200
        hogging.alerts(model=SMALL, tenant=HOG)
        history = stage.answer("/admin/history", since=hogging.begun, by="tenant", step_s=86_400, model=SMALL)["data"]
        used = {row["name"]: row["output_tokens"] for row in history}
        assert used[HOG] > 0.9 * sum(used.values())
    hog_is_limited(stage)
    assert stage.place.endpoint.ask(SMALL, key=QUIET_KEY).status == 200
    hogging.is_over(lambda state: not waiting_of(state, SMALL, HOG), "nobody of it who waits")
    assert events_of_small(hogging) == []


def memory_is_refused_and_freed(stage: Stage) -> None:
    figures = stage.place.quota()
    assert figures is not None
    wanted_gb = round((figures["free_bytes"] + 0.5 * CHAT_GB * GB) / GB, 2)
    fault = Fault(stage, MEMORY_REFUSED)
    stage.place.declare(configured(model(LARGE, memory_gb=wanted_gb)))
    state = fault.on_console(lambda state: state["memory"]["waiting"], "an engine that waits")
    (waiting,) = state["memory"]["waiting"]
    assert (waiting["model"], waiting["bytes"]) == (LARGE, round(wanted_gb * GB))
    assert f"at least {wanted_gb:.2f} GB needed" in waiting["reason"]
    fault.on_page("What needs attention", LARGE)
    fault.alerts(model=LARGE)
    assert fault.in_events(blocked="memory")["subject"] == LARGE
    stage.place.declare(configured(model(LARGE, memory_gb=wanted_gb), chat_replicas=1))
    fault.is_over(lambda state: not state["memory"]["waiting"] and is_whole(state, LARGE, 1), "the engine that runs")
    assert fault.in_events("is ready after")["subject"] == LARGE
    fault.alert_is_over()


def slots_used(state: dict[str, Any]) -> int:
    (small,) = (one for one in state["models"] if one["model"] == SMALL)
    return sum(one["slots_used"] for one in small["replicas"])


def test_a_flood_of_one_class_is_shown_by_the_queue_until_it_is_gone(stage: Stage) -> None:
    fault = Fault(stage, CLASS_FLOODS)
    with contextlib.ExitStack() as flood:
        flood.enter_context(reading(send(stage.stack, COMPLETIONS, body(ENDLESS, n=SLOTS))))
        fault.on_console(slots_used, "all slots taken", SLOTS)
        for _ in range(FLOOD):
            flood.enter_context(send(stage.stack, COMPLETIONS, body(3), key=BULK_KEY))
        fault.on_console(lambda state: waiting_of(state, SMALL, BULK), "the flood", FLOOD)
        fault.on_page()
        fault.alerts(model=SMALL, priority="low")
        listed = stage.answer("/admin/requests", waiting=1, limit=1000)["data"]
        assert [one["request_class"] for one in listed] == ["low"] * FLOOD
        assert Counter(one["waits_for"] for one in listed) == {"slots": 1, "turn": FLOOD - 1}
    fault.is_over(lambda state: not waiting_of(state, SMALL, BULK), "an empty queue")
    fault.alert_is_over()
    assert events_of_small(fault) == []


def test_records_that_a_full_disk_loses_are_shown_until_it_takes_them(stage: Stage) -> None:
    ask = stage.place.endpoint.ask
    fault = Fault(stage, DISK_FULL)

    def lost() -> float | None:
        assert ask(SMALL).status == 200, "requests do not need the disk"
        return stage.place.endpoint.figure("serve_app_records_lost_total")

    with filled(stage.records):
        wait_until(lost, SHOWN_S, "records are lost", poll_s=TRY_S)
        fault.alerts()
        answer = stage.answer("/admin/requests", since=fault.begun)
        assert not answer["complete"]
        assert any(
            re.fullmatch(r"router \w+: \d+ records that its disk did not take", one) for one in answer["missing"]
        )
        stage.open_page("requests")
        fault.on_page("The newest")
        stage.open_page("overview")
    emptied = now()
    assert {ask(SMALL).status for _ in range(3 * ROUTERS)} == {200}

    def kept() -> tuple[bool, int]:
        answer = stage.answer("/admin/requests", since=emptied)
        return answer["complete"], len(answer["data"])

    wait_until(kept, SHOWN_S, "all is kept again", wanted=(True, 3 * ROUTERS), poll_s=TRY_S)
    assert "No space left on device" in fault.in_events()["message"], "it was kept until the disk took it"
    fault.in_events("is written again", meanwhile=lambda: ask(SMALL))  # each router says it with its next request


@contextlib.contextmanager
def next_standing_still(stage: Stage, known: set[int]) -> Iterator[Callable[[], None]]:
    """Whoever calls what it gives stops the routers that are started in the block, until its end: one starts within
    seconds, and between two scrapes nobody would have missed the other."""
    seen = set(known)
    with contextlib.ExitStack() as still:

        def hold() -> None:
            for pid in {*stage.place.processes(ROUTER)} - seen:
                with unless_gone():
                    still.enter_context(standing_still(pid))
                seen.add(pid)

        yield hold


def routers(state: dict[str, Any]) -> dict[str, str]:
    return {one["name"]: one["state"] for one in state["routers"]}


def test_a_lost_router_is_shown_until_another_one_answers(stage: Stage) -> None:
    before = routers(stage.console.states[-1])
    assert len(before) == ROUTERS
    fault = Fault(stage, ROUTER_LOST)
    victim, *left = stage.place.processes(ROUTER)
    kill(victim)
    with next_standing_still(stage, {victim, *left}) as hold:
        fault.alerts(meanwhile=hold)
    # the page may have no time to say so: another one takes requests before the console asks Serve's controller again
    fault.on_console(lambda state: routers(state) != before or state["missing"], "a router less")
    assert fault.in_events()["subject"] == "router"

    def is_whole_again(state: dict[str, Any]) -> bool:
        found = routers(state)
        return list(found.values()) == ["RUNNING"] * ROUTERS and found != before and state["missing"] == []

    fault.is_over(is_whole_again, "all routers, one of them new")
    fault.in_events("new are")
    fault.alert_is_over()


def test_after_the_drills_nothing_fires_and_the_terminal_tells_what_has_happened(stage: Stage) -> None:
    wait_until(stage.all_firing, OVER_S, "no alert fires", wanted=[], poll_s=TRY_S)
    shown = stage.stack.command("events", "--since", "1h", key=KEY, columns=400)
    assert [drill.heading for drill in DRILLS if drill.event not in shown] == []


def rows() -> dict[str, list[str]]:
    """The rows of the how-to page's table of single faults, by their first cells."""
    (chapter,) = re.findall(rf"^## {CHAPTER}\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    _, _, *found = re.findall(r"^\| (.*) \|$", chapter, re.MULTILINE)
    return {heading: cells for heading, *cells in (row.split(" | ") for row in found)}


def test_every_drill_has_its_row_and_every_row_its_drill() -> None:
    assert list(rows()) == [drill.heading for drill in DRILLS]


@pytest.mark.parametrize("drill", DRILLS, ids=lambda drill: drill.alert)
def test_a_row_has_what_is_shown_and_what_to_do(drill: Drill) -> None:
    shown, alert, to_do = rows()[drill.heading]
    assert drill.console in shown
    assert drill.event in shown
    assert f"`{drill.alert}`" in alert
    assert to_do
