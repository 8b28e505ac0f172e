"""One scrape of a real stack, as promtool and a real Prometheus read it: ours, vLLM's and HAProxy's metrics."""

from __future__ import annotations

import math
import subprocess
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from scripts.dashboards.files import ROOT, RULES
from serve_app.router.metrics.haproxy_table import HaproxyFigure
from tests.e2e.observe import Observer
from tests.e2e.panels import asked, panels
from tests.e2e.stack import CONFIG, SIMULATED, TINY, Stack
from tests.fakes.prometheus_server import (
    PrometheusServer,
    endpoint_configuration,
    prometheus_of,
    running_prometheus,
)
from tests.http.test_prometheus import PROMETHEUS_ACCEPTS, samples_of
from tests.requires import missing, requires
from tests.waiting import wait_until

pytestmark = pytest.mark.long  # a stack of its own; tests/http has a real Prometheus and the drills its alerts

TOKENS = 12
STREAMS = 3
SCRAPE_S = 1
EVALUATE_S = 60  # of rules, which are not looked at
WINDOW = "1m"  # in place of Grafana's $__rate_interval: it has all requests, whenever they were
ANSWERED_S = 30.0  # for two scrapes after the requests
POLL_S = 0.2
LINT_OF_OTHERS = (b"vllm:", b"haproxy_")  # names that are not ours to choose


@pytest.fixture(scope="module")
def scraped(stack: Stack, observer: Observer) -> Stack:
    """The stack after an answer of the real engine and one of the simulated one, when both are idle."""
    for needed in ("linux", "vllm", "prometheus", "promtool"):
        requires(needed)
    if stack.cluster is None:
        missing("what the external stack is to show is not known")
    body = {"prompt": "The river", "max_tokens": TOKENS, "ignore_eos": True}
    for model in (TINY, SIMULATED):
        assert stack.post("/v1/completions", {"model": model, **body}).status_code == 200
        observer.wait_idle(model)
    return stack


def scrape(stack: Stack, accept: str = "text/plain") -> Any:
    answer = stack.get("/metrics", headers={"Accept": accept})
    assert answer.status_code == 200
    return answer


def test_promtool_complains_of_no_name_of_ours(scraped: Stack) -> None:
    text = scrape(scraped).content
    checked = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, check=False)
    complaints = (checked.stdout + checked.stderr).splitlines()
    assert [line for line in complaints if not line.startswith(LINT_OF_OTHERS)] == []


def test_vllms_own_metrics_are_there_once_with_model_and_replica(scraped: Stack) -> None:
    families = {one.name: one for one in text_string_to_metric_families(scrape(scraped).text)}
    vllms = [one for name, one in families.items() if name.startswith("vllm:")]
    assert len(vllms) > 30
    labels = [sample.labels for one in vllms for sample in one.samples]
    assert {found["model"] for found in labels} == {TINY}  # the simulated engine has none
    assert len({found["replica"] for found in labels}) == 1
    assert not [sample.name for one in vllms for sample in one.samples if sample.name.endswith("_created")]
    histogram = families["vllm:inter_token_latency_seconds"]
    (count,) = (one.value for one in histogram.samples if one.name.endswith("_count"))
    assert count >= TOKENS - 1


def test_a_real_prometheus_has_what_every_part_counts(scraped: Stack, tmp_path: Path) -> None:
    revoked = sum(one["state"] == "revoked" for one in scraped.get("/admin/keys").json()["data"])
    answer = scrape(scraped, PROMETHEUS_ACCEPTS)
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    with prometheus_of(answer.headers["content-type"], answer.content, tmp_path) as prometheus:
        taken = prometheus.samples('{__name__=~"(serve_app_|vllm:|haproxy_).+"}')
        assert len(taken) == len(samples_of(answer.content))
        parts = dict.fromkeys(("quota_actor", "store", "controller", "haproxy"), 1.0)
        assert {labels["part"]: up for labels, up in by_labels(prometheus, "serve_app_up")} == parts
        check_engines(prometheus)
        check_scaling(prometheus)
        check_haproxy(prometheus)
        keys = {(one["source"], one["state"]): count for one, count in by_labels(prometheus, "serve_app_keys")}
        assert keys["configured", "valid"] == len(CONFIG["auth"]["keys"])
        assert keys["stored", "revoked"] == revoked
        assert prometheus.samples("serve_app_store_bytes")[0][1] > 0


def test_every_query_of_vllms_own_metrics_has_data(scraped: Stack, tmp_path: Path) -> None:
    """In the panels that the dashboards have of them, answered by a Prometheus that scrapes the engine as it works."""
    found = panels(of_vllm=True)
    assert len(found) == 6
    scraping = endpoint_configuration(scraped.base_url, scraped.api_key, ROOT / RULES, SCRAPE_S, EVALUATE_S)
    with running_prometheus(scraping, tmp_path) as prometheus:
        for number in range(STREAMS):  # between two scrapes: rates, and quantiles of them, need a growth
            body = {"prompt": f"{number} boats on the river", "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
            assert scraped.post("/v1/completions", {"model": TINY, **body}).status_code == 200
        for board, panel in found:
            for query in asked(board, panel, TINY, WINDOW):
                wait_until(lambda: known(prometheus, query), ANSWERED_S, f"data of {query}", poll_s=POLL_S)  # noqa: B023


def known(prometheus: PrometheusServer, query: str) -> bool:
    return any(not math.isnan(value) for _, value in prometheus.samples(query))


def by_labels(prometheus: PrometheusServer, name: str) -> list[tuple[dict[str, str], float]]:
    found = prometheus.samples(name)
    assert found, f"Prometheus has no {name}"
    return found


def check_engines(prometheus: PrometheusServer) -> None:
    """vLLM's count of tokens is that of the engine's load, replica by replica."""
    vllms = "vllm:generation_tokens_total"
    ((labels, tokens),) = by_labels(prometheus, vllms)
    assert (labels["model"], labels["model_name"], labels["engine"]) == (TINY, TINY, "0")
    assert tokens >= TOKENS
    difference = prometheus.samples(f"serve_app_engine_generated_tokens_total - on(model, replica) {vllms}")
    assert [value for _, value in difference] == [0]


def check_scaling(prometheus: PrometheusServer) -> None:
    """Of models with a fixed number; tests/e2e/test_scaling.py has those that scale."""
    for name in ("serve_app_replicas_wanted", "serve_app_replicas_target"):
        assert {labels["model"]: count for labels, count in by_labels(prometheus, name)} == {TINY: 1, SIMULATED: 1}
    reasons = by_labels(prometheus, "serve_app_replicas_wanted_reason")
    assert {(labels["model"], labels["reason"]) for labels, _ in reasons} == {(TINY, "fixed"), (SIMULATED, "fixed")}


def check_haproxy(prometheus: PrometheusServer) -> None:
    """Every row, of this node."""
    nodes = set()
    for figure in HaproxyFigure:
        nodes |= {labels["node"] for labels, _ in by_labels(prometheus, figure.value.sample_name)}
    assert len(nodes) == 1
    assert [up for _, up in prometheus.samples('haproxy_backend_status{proxy=~".*serve_app.*", state="UP"}')] == [1]
    answered = prometheus.samples('sum(haproxy_frontend_http_responses_total{proxy="http_frontend", code="2xx"})')
    assert answered[0][1] >= 2
