"""The load, the watchers and the figures of `benchmarks.observability`; the stacks themselves it alone starts."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import pytest
import requests

from benchmarks.common.arms import BenchmarkError
from benchmarks.common.scaling_stack import Stage
from benchmarks.observability.load import Load
from benchmarks.observability.main import MODELS, ROUTERS, configuration, judged, keys_of
from benchmarks.observability.watchers import Console, Scraper, Watcher, series_of
from serve_app.settings import parse
from tests.benchmarks.fake_endpoint import FakeEndpoint, serving
from tests.waiting import wait_until

TOKENS = 4
EVENT = b"event: live\ndata: {}\n\n"
KEYS = {"sk-a": "a", "sk-b": "b", "sk-c": "c"}
WITHIN = {"cpu_ratio": 1.05, "console_bytes_per_s": 50_000, "series": 50_000, "series_few_tenants": 1_000}


class FakeAnswer(NamedTuple):
    """What is read of an answer."""

    text: str

    def raise_for_status(self) -> None:
        """It is a 200."""


@dataclass(frozen=True)
class FakeStage:
    """What the watchers use of a stage."""

    text: str

    def get(self, path: str) -> FakeAnswer:
        assert path == "/metrics"
        return FakeAnswer(self.text)


@pytest.mark.parametrize("watched", [True, False])
def test_both_configurations_are_valid_and_differ_in_what_watches_alone(watched: bool) -> None:
    settings = parse(configuration(watched, "http://127.0.0.1:4318"))
    assert [model.name for model in settings.models] == list(MODELS)
    assert settings.router.replicas == ROUTERS
    assert (settings.traces.endpoint is not None) == watched
    assert (settings.records.keep_days > 0) == watched


def test_keys_are_of_one_tenant_each() -> None:
    keys = keys_of(10_000)
    assert len({key["key"] for key in keys}) == len({key["tenant"] for key in keys}) == 10_000


def test_a_load_asks_so_many_times_with_each_key_and_model_in_turn() -> None:
    endpoint = FakeEndpoint(KEYS)
    with serving(endpoint) as url:
        load = Load(url, list(KEYS), ("x", "y"), TOKENS, seed=1)
        load.times(clients=2, requests=12)
    assert load.answered == len(endpoint.asked) == 12
    asked = {(one.tenant, one.body["model"]) for one in endpoint.asked}
    assert asked == {(tenant, model) for tenant in KEYS.values() for model in "xy"}


def test_a_refused_request_ends_the_load() -> None:
    endpoint = FakeEndpoint(KEYS, refuses=lambda asked: asked.number == 3)
    with serving(endpoint) as url, pytest.raises(ExceptionGroup) as failed:
        Load(url, list(KEYS), ("x",), TOKENS, seed=1).times(clients=1, requests=9)
    assert isinstance(failed.value.exceptions[0], BenchmarkError)


def test_series_are_samples_and_no_comments() -> None:
    stage = cast(Stage, FakeStage('# HELP a b\n# TYPE a counter\na 1\na{b="c"} 2\n\n'))
    assert series_of(stage) == 2


def test_a_watcher_that_fails_says_so_and_goes_on() -> None:
    calls: list[int] = []

    def step() -> None:
        calls.append(1)
        raise requests.ConnectionError("away")

    watcher = Watcher(step, every_s=0.0)
    watcher.start()
    wait_until(lambda: len(calls) > 1, 10.0, "a second step")
    watcher.close()
    assert watcher.failures[0] == "ConnectionError: away"


def test_the_scraper_keeps_the_last_count() -> None:
    scraper = Scraper(cast(Stage, FakeStage("a 1\nb 2\n")))
    scraper.start()
    wait_until(lambda: scraper.scrapes == 1, 10.0, "a scrape")
    scraper.close()
    assert (scraper.series, scraper.failures) == (2, [])


class Stream(BaseHTTPRequestHandler):
    """A console's stream of two events that then ends."""

    def do_GET(self) -> None:
        self.send_response(200 if self.headers["authorization"] == "Bearer sk-a" else 401)
        self.end_headers()
        self.wfile.write(2 * EVENT)


def test_a_console_counts_its_bytes_and_a_stream_that_ends_by_itself_is_a_failure() -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Stream)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    console = Console(cast(Stage, SimpleNamespace(cluster=SimpleNamespace(url=url), key="sk-a")))
    console.start()
    wait_until(lambda: bool(console.failures), 10.0, "the end of the stream")
    console.close()
    server.shutdown()
    server.server_close()
    assert console.received % (2 * len(EVENT)) == 0 < console.received
    assert console.failures[0] == "AssertionError: the console's stream ended by itself"


@pytest.mark.parametrize(
    ("changed", "missed"),
    [
        ({}, set()),
        ({"cpu_ratio": 1.06}, {"cpu_ratio"}),
        ({"console_bytes_per_s": 50_001}, {"console_bytes_per_s"}),
        ({"series": 50_001}, {"series"}),
        ({"series_10000_tenants": 1_101}, {"series_10000_tenants"}),
    ],
)
def test_each_bar_is_judged(changed: dict[str, Any], missed: set[str]) -> None:
    found = judged({**WITHIN, "series_10000_tenants": 1_100, **changed})
    assert {name for name, within in found.items() if not within} == missed
