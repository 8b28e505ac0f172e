"""Every query of the dashboards and every rule, answered by a real Prometheus that scrapes a loaded stack.

The load is known: answers of two tenants in three classes, waits, refusals of a full queue and of a limit, a session,
and a batch. No alert fires: nothing is wrong.
"""

from __future__ import annotations

import io
import json
import math
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import requests

from scripts.dashboards.boards import Board, Kind, Panel
from scripts.dashboards.files import ROOT, RULES
from scripts.dashboards.rules import ALERTS, RECORDINGS
from tests.e2e import stack as stacks
from tests.e2e.panels import asked, panels
from tests.e2e.stack import BATCH_KEY, PEOPLE_KEY, REQUEST_TIMEOUT_S, Stack
from tests.fakes.prometheus_server import PrometheusServer, endpoint_configuration, running_prometheus
from tests.requires import requires
from tests.waiting import during, patient, wait_until

pytestmark = pytest.mark.long  # a load of minutes; test_scrape has a real Prometheus, tests/deploy each panel's names

MODEL = "watched"
SLOTS = 4
LIMITED_KEY = "sk-e2e-limited-0123456789"
LIMITED_ASKED = 4  # requests of a key that may send one a minute
SCRAPE_S = 2
RATE = "10s"  # in place of Grafana's $__rate_interval: at least four scrapes
LOAD_S = 24.0
PAUSE_S = 3.0  # between two bursts
BURST = 24  # requests at once, for 4 slots and 8 places in the queue
ROWS = 40
ENDED_S = 60.0  # for what the load has left to end, and a scrape after that
STACK: dict[str, Any] = {
    "models": [
        {
            "name": MODEL,
            "engine": "simulated",
            "max_num_seqs": SLOTS,
            "max_model_len": 4096,
            "cpus_per_rank": 0.5,
            "simulated": {"decode_step_s": 0.01, "kv_cache_tokens": 32_768},
        }
    ],
    "router": {"replicas": 2},
    "admission": {"max_queued": 8, "classes": {"normal": {"ttft_slo_s": 60.0}, "high": {"ttft_slo_s": 0.001}}},
    "batch": {"workers": 1},
    "auth": {
        "keys": [
            {"key": PEOPLE_KEY, "tenant": "people", "max_class": "high", "admin": True},
            {"key": BATCH_KEY, "tenant": "batch", "max_class": "low", "default_class": "low"},
            {"key": LIMITED_KEY, "tenant": "limited", "limits": {"requests_per_minute": 1}},
        ]
    },
}
# Metrics of alerts that exist only after their fault.
OF_A_FAULT = frozenset({"serve_app_not_continuable_total"})
# What panels have to show of this load beside any data: the panel, and labels of a series that is above zero.
SHOWN: dict[str, list[dict[str, str]]] = {
    "who waits and why": [{"priority": "normal"}, {"priority": "low"}],
    "which tenant hogs": [{"tenant": "people"}, {"tenant": "batch"}],
    "p95 of the first token by class in the last hour": [
        {"priority": "high"},
        {"priority": "normal"},
        {"priority": "low"},
    ],
    "what does GPU memory do": [{"kind": "granted"}],
    "why did it scale": [{"model": MODEL, "state": "running"}, {"model": MODEL}],
    "refused, by reason": [{"reason": "queue_full"}],
    "Refused by a limit": [{"tenant": "limited", "reason": "rate_limit"}],
    "Rows by state": [{"state": "waiting"}, {"state": "completed"}],
    "Batches by status": [{"status": "in_progress"}],
    "Agent sessions": [{"state": "open"}],
    "Service level missed in the last hour": [{"priority": "high", "reason": "ttft"}],
    "Slots in use": [{}],
}


@dataclass
class Load:
    """What the clients have counted, and when."""

    began: float = field(default_factory=time.time)
    statuses: Counter[tuple[str, int]] = field(default_factory=Counter)  # by tenant
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, tenant: str, status: int) -> None:
        with self.lock:
            self.statuses[tenant, status] += 1


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[PrometheusServer, Load]]:
    """A Prometheus that has watched a stack under the load, until both had ended and were scraped."""
    requires("linux")
    requires("prometheus")
    folder = tmp_path_factory.mktemp("prometheus")
    with stacks.own(tmp_path_factory.mktemp("watched"), STACK, "watched") as stack:
        scraping = endpoint_configuration(stack.base_url, stack.api_key, ROOT / RULES, SCRAPE_S, SCRAPE_S)
        with running_prometheus(scraping, folder) as server:
            yield server, loaded(stack, server)


def loaded(stack: Stack, server: PrometheusServer) -> Load:
    """Sends the load, and waits until it has ended and a scrape has all of it."""
    load = Load()
    with open_session(stack, load), ThreadPoolExecutor(BURST + 8) as threads:
        batch = begin_batch(stack)
        for steady in (people, batch_tenant):
            threads.submit(steady, stack, load)
        for _ in range(LIMITED_ASKED):  # first: a rate takes two scrapes
            ask(stack, load, "limited", LIMITED_KEY)
        bursts(stack, load, threads)
        with stack.client(BATCH_KEY) as client:
            look = lambda: client.batches.retrieve(batch).status  # noqa: E731
            wait_until(look, ENDED_S, "the batch has ended", wanted="completed", poll_s=0.5)
    wait_until(lambda: counted(server), ENDED_S, "requests in a scrape", wanted=clients(load), poll_s=0.5)
    return load


def ask(stack: Stack, load: Load, tenant: str, key: str, tokens: int = 20, **more: Any) -> None:
    """A completion; its status is counted."""
    headers = stack.headers(key) | more.pop("headers", {})
    body = {"model": MODEL, "prompt": "The river", "max_tokens": tokens, "ignore_eos": True} | more
    load.count(tenant, stack.post("/v1/completions", body, headers=headers).status_code)


def people(stack: Stack, load: Load) -> None:
    """Streams and whole answers by turns, of two classes."""
    for number, _ in enumerate(during(LOAD_S)):
        priority = "high" if number % 3 == 0 else "normal"
        ask(stack, load, "people", PEOPLE_KEY, stream=number % 2 == 0, priority=priority)


def batch_tenant(stack: Stack, load: Load) -> None:
    for _ in during(LOAD_S):
        ask(stack, load, "batch", BATCH_KEY)


def bursts(stack: Stack, load: Load, threads: ThreadPoolExecutor) -> None:
    """More at once than run and wait."""
    for _ in during(LOAD_S):
        for number in range(BURST):
            tenant, key = (("people", PEOPLE_KEY), ("batch", BATCH_KEY))[number % 2]
            threads.submit(ask, stack, load, tenant, key, 60)
        time.sleep(PAUSE_S)  # bound: LOAD_S; the bursts are apart


@contextmanager
def open_session(stack: Stack, load: Load) -> Iterator[None]:
    """An agent's session of two requests, open for the block."""
    opened = stack.post("/v1/sessions", {"model": MODEL, "session_id": "agent", "kv_tokens": 2048})
    assert opened.status_code == 201, opened.text
    for _ in range(2):
        ask(stack, load, "people", PEOPLE_KEY, headers={"X-Session-Id": "agent"})
    yield
    headers = stack.headers()
    ended = requests.delete(f"{stack.base_url}/v1/sessions/agent", headers=headers, timeout=patient(REQUEST_TIMEOUT_S))
    assert ended.status_code < 300, ended.text


def begin_batch(stack: Stack) -> str:
    """The id of a batch of the tenant `batch`."""
    body = {"model": MODEL, "prompt": "The river", "max_tokens": 60, "ignore_eos": True}
    row = {"method": "POST", "url": "/v1/completions", "body": body}
    content = io.BytesIO(b"".join(json.dumps(row | {"custom_id": f"row-{n}"}).encode() + b"\n" for n in range(ROWS)))
    with stack.client(BATCH_KEY) as client:
        file = client.files.create(file=("rows.jsonl", content), purpose="batch")
        made = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        return str(made.id)


def clients(load: Load) -> dict[str, float]:
    """What the clients of the tenants without a batch were answered."""
    with load.lock:
        return {
            "people ok": load.statuses["people", 200],
            "people refused": load.statuses["people", 429],
            "limited refused": load.statuses["limited", 429],
        }


def counted(server: PrometheusServer) -> dict[str, float]:
    """The same by the metrics."""
    found = server.samples("sum by (tenant, outcome) (serve_app_requests_total)")
    by_labels = {f"{labels['tenant']} {labels['outcome']}": value for labels, value in found}
    return {name: by_labels.get(name, 0.0) for name in ("people ok", "people refused", "limited refused")}


def answered(server: PrometheusServer, load: Load, panel: Panel, query: str) -> list[tuple[dict[str, str], float]]:
    """Labels and the highest value of each series since the load's begin; of a panel of present values the last one."""
    if panel.kind in (Kind.NUMBER, Kind.BARS):
        return [(labels, value) for labels, value in server.samples(query) if not math.isnan(value)]
    series = server.history(query, load.began, time.time(), SCRAPE_S)
    known = ((labels, [value for value in values if not math.isnan(value)]) for labels, values in series)
    return [(labels, max(values)) for labels, values in known if values]


def test_the_load_was_what_the_clients_have_counted(watched: tuple[PrometheusServer, Load]) -> None:
    server, load = watched
    assert counted(server) == clients(load)
    assert {status for _, status in load.statuses} == {200, 429}
    assert load.statuses["people", 200] > 20
    assert load.statuses["limited", 429] == LIMITED_ASKED - 1


PANELS = panels(of_vllm=False)


@pytest.mark.parametrize(("board", "panel"), PANELS, ids=[f"{board.uid}: {panel.title}" for board, panel in PANELS])
def test_every_query_of_a_panel_has_data(watched: tuple[PrometheusServer, Load], board: Board, panel: Panel) -> None:
    server, load = watched
    found = [answered(server, load, panel, query) for query in asked(board, panel, MODEL, RATE)]
    assert [query for query, series in zip(asked(board, panel, MODEL, RATE), found, strict=True) if not series] == []
    above_zero = [labels for series in found for labels, value in series if value > 0]
    for wanted in SHOWN.get(panel.title, []):
        assert [labels for labels in above_zero if wanted.items() <= labels.items()], f"{wanted} in {found}"


def test_the_panels_that_have_to_show_something_exist() -> None:
    assert SHOWN.keys() <= {panel.title for _, panel in PANELS}


def test_every_rule_is_evaluated_without_an_error(watched: tuple[PrometheusServer, Load]) -> None:
    server, _ = watched
    groups = server.get("rules")["groups"]
    rules = {rule["name"]: rule for group in groups for rule in group["rules"]}
    assert rules.keys() == {rule.name for rule in (*ALERTS, *RECORDINGS)}
    assert {name: rule.get("lastError") for name, rule in rules.items() if rule["health"] != "ok"} == {}


@pytest.mark.parametrize("recording", RECORDINGS, ids=lambda rule: rule.name)
def test_a_recording_has_data(watched: tuple[PrometheusServer, Load], recording: Any) -> None:
    server, load = watched
    assert server.history(recording.name, load.began, time.time(), SCRAPE_S)


@pytest.mark.parametrize("alert", ALERTS, ids=lambda rule: rule.name)
def test_what_an_alert_looks_at_exists(watched: tuple[PrometheusServer, Load], alert: Any) -> None:
    server, load = watched
    names = set(re.findall(r"[\w:]*serve_app[\w:]+|\bup\b", alert.expression.text))
    assert names
    known = {name for name in names if server.history(name, load.began, time.time(), SCRAPE_S)}
    assert names - known - OF_A_FAULT == set()


def test_no_alert_fires_under_an_ordinary_load(watched: tuple[PrometheusServer, Load]) -> None:
    server, load = watched
    assert server.history('ALERTS{alertstate="firing"}', load.began, time.time(), SCRAPE_S) == []
