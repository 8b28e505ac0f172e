"""The console's backend on a real stack: the login, what waits as it waits, a tenant's own part, and its end."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator

import pytest
import requests

from tests.e2e.consoles import Watch, browser, watching
from tests.e2e.half_closed import send
from tests.e2e.observe import Observer
from tests.e2e.stack import BATCH_KEY, PEOPLE_KEY, REQUEST_TIMEOUT_S, SIMULATED_SLOTS, Stack
from tests.waiting import patient, wait_until

MARK = {"X-Serve-App-Console": "1"}
SHOWN_S = 15.0  # for what has happened to be shown: two states, beside others of the suite
ENDS_S = 2.0  # the promise, after a key is revoked
BUSY_S = 4.0  # of this test, beside others of the suite
BYTES_PER_S = 50_000
LONG_TOKENS = 8000  # 40 s of the simulated engine


@contextlib.contextmanager
def waiting(stack: Stack, model: str) -> Iterator[None]:
    """All slots taken, three requests of the tenant `people` and two of `batch` waiting."""
    body = {"model": model, "prompt": "a", "max_tokens": LONG_TOKENS, "stream": True}
    with contextlib.ExitStack() as open_ones:
        open_ones.enter_context(send(stack, "/v1/completions", body | {"n": SIMULATED_SLOTS}))
        wait_until(lambda: Observer(stack).running(model), SHOWN_S, "it runs", wanted=SIMULATED_SLOTS)
        for key, count in ((PEOPLE_KEY, 3), (BATCH_KEY, 2)):
            for _ in range(count):
                open_ones.enter_context(send(stack, "/v1/completions", body, key=key))
        yield


def rows(watch: Watch, model: str) -> dict[tuple[str, str], int]:
    return {(one["class"], one["tenant"]): one["waiting"] for one in watch.model(model)["queues"]}


def used(watch: Watch, model: str) -> tuple[int, int]:
    (replica,) = watch.model(model)["replicas"]
    return replica["slots_used"], replica["slots_total"]


def test_the_page_is_there_and_everything_else_asks_who_it_is(stack: Stack) -> None:
    page = requests.get(f"{stack.base_url}/console", timeout=patient(REQUEST_TIMEOUT_S))
    assert page.url == f"{stack.base_url}/console/"
    assert page.headers["content-security-policy"].startswith("default-src 'none'")
    known = {"If-None-Match": page.headers["etag"]}
    assert requests.get(page.url, headers=known, timeout=patient(REQUEST_TIMEOUT_S)).status_code == 304
    for path in ("/console/session", "/console/live", "/admin/status", "/v1/models"):
        assert requests.get(f"{stack.base_url}{path}", timeout=patient(REQUEST_TIMEOUT_S)).status_code == 401


@pytest.mark.usefixtures("batch_key")
def test_an_operator_sees_who_waits_for_what_and_a_tenant_its_own_part(stack: Stack, simulated: str) -> None:
    operator = browser(stack, PEOPLE_KEY)
    tenant = browser(stack, BATCH_KEY)
    with waiting(stack, simulated), watching(stack, operator) as everything, watching(stack, tenant) as own:
        wanted = {("normal", "people"): 3, ("low", "batch"): 2}
        wait_until(lambda: rows(everything, simulated), SHOWN_S, "all who wait", wanted=wanted)
        wait_until(lambda: rows(own, simulated), SHOWN_S, "its own", wanted={("low", "batch"): 2})
        model = everything.model(simulated)
        assert (model["waiting"], model["running"], model["wanted"], model["state"]) == (5, 1, 1, "healthy")
        assert all(sum(one["reasons"].values()) == one["waiting"] for one in model["queues"])
        (replica,) = model["replicas"]
        wait_until(
            lambda: used(everything, simulated), SHOWN_S, "slots used", wanted=(SIMULATED_SLOTS, SIMULATED_SLOTS)
        )
        assert 0 < replica["kv_used"] <= replica["kv_total"]
        assert replica["node"]
        wait_until(lambda: (everything.model(simulated)["tokens_per_s"] or 0) > 0, SHOWN_S, "tokens")
        assert everything.state["missing"] == []
        assert everything.state["routers"]
        leases = [lease for device in everything.state["memory"]["devices"] for lease in device["leases"]]
        assert {lease["owner"] for lease in leases if lease["model"] == simulated} == {replica["replica"]}
        text = json.dumps(own.state)
        assert (own.state["scope"], own.state["tenant"], own.model(simulated)["waiting"]) == ("tenant", "batch", 2)
        assert "people" not in text
        assert replica["node"] not in text
        began = time.monotonic()
        before = everything.received
        states = everything.states
        wait_until(lambda: everything.states >= states + 3, SHOWN_S, "three more")
        rate = (everything.received - before) / (time.monotonic() - began)
        print(f"a console gets {rate:.0f} bytes/s")
        assert rate < BYTES_PER_S


def test_a_console_ends_soon_after_its_key_is_revoked(stack: Stack) -> None:
    made = stack.post("/admin/keys", {"name": "console", "tenant": "acme"}).json()

    def logged_in() -> list[requests.Session]:
        with contextlib.suppress(AssertionError):  # another router learns of a key within a second
            return [browser(stack, made["key"])]
        return []

    (session,) = wait_until(logged_in, ENDS_S + BUSY_S, "it is known").found
    own = session.get(f"{stack.base_url}/console/session", timeout=patient(REQUEST_TIMEOUT_S)).json()
    assert (own["name"], own["tenant"], own["admin"]) == ("console", "acme", False)
    with watching(stack, session) as watch:
        wait_until(lambda: watch.states, SHOWN_S, "a state", wanted=1)
        revoked = requests.delete(
            f"{stack.base_url}/admin/keys/{made['id']}", headers=stack.headers(), timeout=patient(REQUEST_TIMEOUT_S)
        )
        assert revoked.status_code == 200
        took = wait_until(watch.ended.is_set, ENDS_S + BUSY_S, "it has ended")
        print(f"the stream ended {took.wall_s:.2f} s after its key")
        assert watch.last_event == "end"
    assert session.get(f"{stack.base_url}/console/session", timeout=patient(REQUEST_TIMEOUT_S)).status_code == 401


def test_a_page_of_another_origin_changes_nothing(stack: Stack) -> None:
    cookies = browser(stack, PEOPLE_KEY).cookies
    sent = {"Cookie": f"serve_app_console={cookies['serve_app_console']}", "Origin": stack.base_url}
    url = f"{stack.base_url}/admin/keys"
    body = {"name": "made by a page", "tenant": "acme"}
    foreign: list[dict[str, str]] = [
        {"Origin": "http://evil.example", **MARK},
        {"Sec-Fetch-Site": "cross-site", **MARK},
        {"X-Serve-App-Console": "no"},
        {"Host": "other.example", **MARK},
    ]
    for headers in foreign:
        answer = requests.post(url, json=body, headers=sent | headers, timeout=patient(REQUEST_TIMEOUT_S))
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "csrf"), headers
    behind_proxy = {"Host": "serve_app", "Sec-Fetch-Site": "same-origin", "Origin": "https://console.example", **MARK}
    for headers in (MARK, behind_proxy):
        answer = requests.post(url, json=body, headers=sent | headers, timeout=patient(REQUEST_TIMEOUT_S))
        assert answer.status_code == 201, answer.text
    listed = [one["name"] for one in stack.get("/admin/keys").json()["data"]]
    assert listed.count("made by a page") == 2
