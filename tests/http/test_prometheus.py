"""What a loaded router shows, judged by Prometheus: by its tool, and by a real server that scrapes it."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

from tests.fakes.asgi_client import BATCH_KEY, Reply, ask, cancel, running, started
from tests.fakes.engines import FakeCluster, model, run, turns
from tests.fakes.prometheus_server import prometheus_of
from tests.requires import requires

# What Prometheus 2.42, Debian's, sends.
PROMETHEUS_ACCEPTS = (
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)


def scrape_of_a_loaded_router(accept: str) -> Reply:
    """After answers, waits and refusals of two tenants."""

    async def scenario(cluster: FakeCluster) -> Reply:
        client = await started(cluster, "r1", admission={"max_queued": 1, "classes": {"normal": {"ttft_slo_s": 9.0}}})
        task, _ = await running(client)
        waits = client.posting(ask("waits"))
        await turns(20)
        assert (await client.post(ask("no room"), key=BATCH_KEY)).status == 429
        await cancel(task)
        assert (await waits).status == 200
        assert (await client.post(ask("p", 7, stream=False))).status == 200
        return await client.get("/metrics", headers={"Accept": accept})

    reply: Reply = run(scenario, model(slots=1))
    return reply


def samples_of(text: bytes) -> list[bytes]:
    """The lines with a sample."""
    return [line for line in text.splitlines() if not line.startswith(b"#")]


def test_promtool_has_no_complaint() -> None:
    requires("promtool")
    text = scrape_of_a_loaded_router("text/plain").body
    names = {line.split(b"{")[0] for line in samples_of(text)}
    assert len(names) > 60, "the router was not loaded: nothing is checked"
    checked = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, check=False)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")


def test_a_real_prometheus_takes_every_sample_and_the_request_ids(tmp_path: Path) -> None:
    reply = scrape_of_a_loaded_router(PROMETHEUS_ACCEPTS)
    assert reply.headers["content-type"].startswith("application/openmetrics-text")
    with prometheus_of(reply.headers["content-type"], reply.body, tmp_path) as prometheus:
        taken = prometheus.samples('{__name__=~"serve_app_.+"}')
        assert len(taken) == len(samples_of(reply.body))
        ok = prometheus.samples('sum by (tenant) (serve_app_requests_total{outcome="ok"})')
        assert ok == [({"tenant": "people"}, 2)]
        refused = prometheus.samples("sum by (tenant, reason) (serve_app_refusals_total)")
        assert refused == [({"tenant": "batch", "reason": "queue_full"}, 1)]
        end = str(time.time() + 1)
        found = prometheus.get("query_exemplars", query="serve_app_request_duration_seconds_bucket", start="0", end=end)
        ids = [one["labels"]["request_id"] for series in found for one in series["exemplars"]]
        assert len(ids) == len(set(ids)) >= 1
