"""Agent sessions on a running stack: two routers, two engine replicas, and processes that die."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest
import requests

from serve_app.names import deployment_of
from tests.e2e.agents_inside import run_agents, without_await
from tests.e2e.changing import CHANGED_S, KEY, POLL_S, REQUEST_S, Place, model
from tests.waiting import during, patient, quiet_time, wait_until

pytestmark = pytest.mark.long  # ten changes of a cluster; tests/http and tests/core have each rule

MODEL = "agents"
OTHER_KEY = "sk-sessions-other-tenant"
POOL = 8192  # KV tokens of an engine
SLOTS = 2  # of an engine's line
BYTES_PER_TOKEN = 131_072  # of the simulated engine
NO_WAIT_S = 1.0  # from a session request's start to its end; an ordinary one waits for many seconds
CONFIG: dict[str, Any] = {
    "models": [
        model(
            MODEL,
            max_num_seqs=SLOTS,
            max_model_len=4096,
            max_session_share=1.0,  # one tenant fills engines here
            replicas={"min_replicas": 2, "max_replicas": 2},
            simulated={"decode_step_s": 0.01, "kv_cache_tokens": POOL},
        )
    ],
    "auth": {"keys": [{"key": KEY, "tenant": "ours"}, {"key": OTHER_KEY, "tenant": "theirs"}]},
    "router": {"replicas": 2},
}


@pytest.fixture(scope="module")
def place(changing: Place) -> Place:
    changing.begin(CONFIG)
    return changing


def call(place: Place, method: str, path: str = "", body: Any = None, key: str = KEY) -> requests.Response:
    """A call of /v1/sessions over a connection of its own, so that either router may get it."""
    return requests.request(
        method,
        f"{place.endpoint.url}/v1/sessions{path}",
        headers={"Authorization": f"Bearer {key}"},
        json=body,
        timeout=patient(REQUEST_S),
    )


def opened(place: Place, session_id: str, **asked: Any) -> dict[str, Any]:
    answer = call(place, "POST", body={"model": MODEL, "session_id": session_id, "kv_tokens": 1024, **asked})
    assert answer.status_code == 201, answer.text
    return dict(answer.json())


def step(place: Place, session_id: str, tokens: int = 3) -> tuple[int, float]:
    """One request of a session: its status and the seconds of a quiet machine that it took."""
    began = quiet_time()
    answer = requests.post(
        f"{place.endpoint.url}/v1/completions",
        headers={"Authorization": f"Bearer {KEY}", "X-Session-Id": session_id},
        json={"model": MODEL, "prompt": "The river", "max_tokens": tokens},
        timeout=patient(REQUEST_S),
    )
    return answer.status_code, quiet_time() - began


def ends(place: Place, session_id: str) -> None:
    look = lambda: call(place, "GET", f"/{session_id}").status_code  # noqa: E731
    wait_until(look, CHANGED_S, f"{session_id} has ended", wanted=404, poll_s=POLL_S)


def test_a_session_is_opened_looked_at_renewed_and_closed_through_any_router(place: Place) -> None:
    reported = opened(place, "a", kv_tokens=1000, ttl_s=30)
    assert (reported["id"], reported["model"], reported["kv_tokens"]) == ("a", MODEL, 1000)
    assert reported["granted_bytes"] == 1000 * BYTES_PER_TOKEN
    assert reported["replica"] in place.replicas(MODEL)[MODEL]
    for _ in range(6):
        seen = call(place, "GET", "/a").json()
        assert (seen["replica"], seen["kv_tokens"]) == (reported["replica"], 1000)
    assert 29 < call(place, "POST", "/a/renew").json()["expires_in_s"] <= 30
    assert call(place, "DELETE", "/a").json() == {"id": "a", "object": "session", "deleted": True}
    for method, path in (("GET", "/a"), ("POST", "/a/renew"), ("DELETE", "/a")):
        gone = call(place, method, path)
        assert (gone.status_code, gone.json()["error"]["code"]) == (404, "session_not_found")


def test_a_session_of_bytes_gets_the_tokens_they_hold(place: Place) -> None:
    reported = opened(place, "bytes", kv_tokens=None, vram_gb=0.25)
    assert reported["kv_tokens"] == 250_000_000 // BYTES_PER_TOKEN
    call(place, "DELETE", "/bytes")


def test_another_tenant_cannot_see_a_session_and_may_have_its_name(place: Place) -> None:
    opened(place, "shared")
    for method, path in (("GET", "/shared"), ("POST", "/shared/renew"), ("DELETE", "/shared")):
        assert call(place, method, path, key=OTHER_KEY).status_code == 404
    theirs = call(place, "POST", body={"model": MODEL, "session_id": "shared", "kv_tokens": 512}, key=OTHER_KEY)
    assert (theirs.status_code, theirs.json()["kv_tokens"]) == (201, 512)
    assert call(place, "DELETE", "/shared", key=OTHER_KEY).status_code == 200
    assert call(place, "GET", "/shared").json()["kv_tokens"] == 1024
    call(place, "DELETE", "/shared")


def test_what_does_not_fit_is_refused_with_the_figures_or_waits(place: Place) -> None:
    large = call(place, "POST", body={"model": MODEL, "kv_tokens": POOL + 1})
    error = large.json()["error"]
    assert (large.status_code, error["code"], error["param"]) == (400, "session_too_large", "kv_tokens")
    for name in ("half-1", "half-2"):  # one on each engine
        opened(place, name, kv_tokens=6000)
    refused = call(place, "POST", body={"model": MODEL, "kv_tokens": 3000})
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "insufficient_memory")
    assert "3000 KV tokens asked" in refused.json()["error"]["message"]
    assert "retry-after" not in refused.headers  # nobody knows when a session will end
    threading.Timer(1.0, lambda: call(place, "DELETE", "/half-1")).start()
    waited = call(place, "POST", body={"model": MODEL, "session_id": "late", "kv_tokens": 3000, "wait_s": 30})
    assert waited.status_code == 201, waited.text
    for name in ("half-2", "late"):
        call(place, "DELETE", f"/{name}")


def test_requests_of_a_session_do_not_wait_while_the_queue_is_full(place: Place) -> None:
    opened(place, "urgent")
    long = [place.endpoint.asking(MODEL, 600) for _ in range(8)]  # six seconds each, two at a time on each engine
    time.sleep(1.0)  # bound: for the line to fill; it takes milliseconds
    took = []
    for _ in range(10):  # the line is full for longer than ten that keep the promise can take
        status, took_s = step(place, "urgent")
        assert status == 200
        took.append(took_s)
    ordinary = place.endpoint.ask(MODEL, 3)
    assert ordinary.status == 200
    assert all(one.answer().status == 200 for one in long)
    assert max(took) < NO_WAIT_S < ordinary.took_s, (max(took), ordinary.took_s)
    call(place, "DELETE", "/urgent")


def test_a_silent_session_ends_and_one_in_use_does_not(place: Place) -> None:
    for name in ("silent", "used"):
        opened(place, name, ttl_s=5)
    for _ in during(patient(7.0)):  # the time to live, and the tick after it
        assert step(place, "used")[0] == 200
        time.sleep(0.5)  # a client's pace
    assert call(place, "GET", "/silent").status_code == 404
    assert call(place, "GET", "/used").status_code == 200
    assert step(place, "silent")[0] == 200  # an ordinary request
    call(place, "DELETE", "/used")


def test_a_session_outlives_the_quota_actor(place: Place) -> None:
    reported = opened(place, "survivor")
    (actor,) = [pid for pid in place.cluster.pids() if b"GpuMemoryQuota" in _command(pid)]
    os.kill(actor, signal.SIGKILL)
    statuses = [step(place, "survivor")[0] for _ in range(20)]
    assert statuses == [200] * 20
    seen = _eventually_found(place, "survivor")
    assert (seen["replica"], seen["kv_tokens"]) == (reported["replica"], reported["kv_tokens"])
    call(place, "DELETE", "/survivor")


def test_the_death_of_its_engine_ends_a_session_and_its_requests_go_on(place: Place) -> None:
    reported = opened(place, "orphan")
    victims = [
        pid for pid in place.processes(deployment_of(MODEL)) if reported["replica"].encode() in _environment(pid)
    ]
    for pid in victims or place.processes(deployment_of(MODEL)):
        os.kill(pid, signal.SIGKILL)
    assert step(place, "orphan")[0] == 200
    ends(place, "orphan")
    assert step(place, "orphan")[0] == 200
    place.wait_running(CONFIG)


def test_agents_run_under_a_bound_each_with_a_session_of_its_own(place: Place) -> None:
    reported = place.within(run_agents, KEY, MODEL, 6, 2)
    assert reported == {"most": 2, "done": [256] * 5, "failed": ["the tool failed"]}
    assert call(place, "GET", "/run-1").status_code == 404


def test_a_script_has_a_session_without_await(place: Place) -> None:
    assert place.within(without_await, KEY, MODEL) == ("script-1", 256, "chat.completion")
    assert call(place, "GET", "/script-1").status_code == 404


def _eventually_found(place: Place, session_id: str) -> dict[str, Any]:
    """The session, once the actor is there again: Ray starts it within seconds."""

    def look() -> dict[str, Any]:
        answer = call(place, "GET", f"/{session_id}")
        return dict(answer.json()) if answer.status_code == 200 else {}

    return wait_until(look, CHANGED_S, f"{session_id} is found", poll_s=POLL_S).found


def _command(pid: int) -> bytes:
    return _read(pid, "cmdline")


def _environment(pid: int) -> bytes:
    return _read(pid, "environ")


def _read(pid: int, kind: str) -> bytes:
    try:
        with open(f"/proc/{pid}/{kind}", "rb") as file:
            return file.read()
    except OSError:
        return b""
