"""What the how-to pages say of scrapers, alerts, dashboards and reverse proxies, tried on a router."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import yaml

from scripts.dashboards.expressions import JOB
from scripts.dashboards.files import boards
from scripts.dashboards.grafana import SCRAPE_INTERVAL
from scripts.dashboards.rules import ALERTS
from serve_app.settings import Settings, parse
from serve_app.system import haproxy
from tests.fakes.asgi_client import Client, ask, started
from tests.fakes.engines import FakeCluster, run
from tests.requires import requires

PAGES = Path(__file__).parents[2] / "docs/how-to"
METRICS = Path(__file__).parents[2] / "docs/reference/metrics.md"
FORWARDED = ("x-forwarded-for", "x-forwarded-proto", "x-forwarded-host", "forwarded", "x-real-ip")
# Of a scrape configuration: https://prometheus.io/docs/prometheus/latest/configuration/configuration/#scrape_config
SCRAPE_KEYS = {
    "job_name",
    "scheme",
    "metrics_path",
    "scrape_interval",
    "scrape_timeout",
    "authorization",
    "static_configs",
}


def block(page: str, language: str) -> str:
    (found,) = re.findall(rf"^```{language}\n(.*?)^```", (PAGES / page).read_text(), re.MULTILINE | re.DOTALL)
    return str(found)


def scrape_configuration() -> str:
    return block("watch.md", "yaml prometheus")


def three_teams() -> Settings:
    return parse(yaml.safe_load(block("share-gpus-between-teams.md", "yaml")))


def directives() -> dict[str, str]:
    """Of the nginx configuration, by name."""
    return dict(re.findall(r"^ +(\w+) (.*?);", block("put-a-proxy-in-front.md", "nginx"), re.MULTILINE))


def seconds(text: str) -> int:
    return int(text.removesuffix("s"))


def test_the_scrape_configuration_reads_the_metrics_with_the_scraper_s_key() -> None:
    (job,) = yaml.safe_load(scrape_configuration())["scrape_configs"]
    assert set(job) == SCRAPE_KEYS
    assert set(job["authorization"]) == {"type", "credentials"}
    assert [set(one) for one in job["static_configs"]] == [{"targets"}]
    assert seconds(job["scrape_timeout"]) <= seconds(job["scrape_interval"])
    header = {"Authorization": f"{job['authorization']['type']} {job['authorization']['credentials']}"}

    async def scenario(cluster: FakeCluster) -> None:
        client = await started(cluster, "r1")
        client.edge.configure(client.edge.settings.model_copy(update={"auth": three_teams().auth}))
        scraped = await client.get(job["metrics_path"], headers=header, key=None)
        assert scraped.status == 200
        assert scraped.headers["content-type"].startswith("text/plain; version=0.0.4")
        assert b'router="' in scraped.body

    run(scenario)


def test_prometheus_takes_the_scrape_configuration(tmp_path: Path) -> None:
    requires("promtool")
    file = tmp_path / "prometheus.yml"
    file.write_text(scrape_configuration())
    done = subprocess.run(["promtool", "check", "config", file], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_job_of_the_scrape_configuration_is_the_one_of_the_alerts() -> None:
    (job,) = yaml.safe_load(scrape_configuration())["scrape_configs"]
    assert job["job_name"] == JOB
    assert job["scrape_interval"] == SCRAPE_INTERVAL


def test_the_page_names_alerts_and_panels_that_exist() -> None:
    page, _, questions = (PAGES / "watch.md").read_text().partition("## The seven questions of a night\n")
    named = set(re.findall(r"`([A-Z]\w+)`", page))
    assert named & {alert.name for alert in ALERTS} == named - {"URL"}
    titles = {panel.title for board in boards() for panel in board.panels()}
    asked = set(re.findall(r"^\| (.*?) \| .*`serve-app ", questions, re.MULTILINE))
    assert len(asked) == 7
    assert asked <= titles


def test_every_metric_on_a_how_to_page_exists() -> None:
    """The reference is made of the table that the routers count by."""
    pages = "".join(page.read_text() for page in PAGES.glob("*.md"))
    named = set(re.findall(r"`(serve_app_\w+)`", pages))
    assert named
    assert named <= set(re.findall(r"^- `(serve_app_\w+)", METRICS.read_text(), re.MULTILINE))


def test_a_stream_asks_proxies_not_to_buffer_it() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client = await started(cluster, "r1")
        for body in (ask("a"), ask("a") | {"model": "unknown"}):
            reply = await client.post(body)
            streamed = reply.status == 200
            assert reply.headers.get("x-accel-buffering") == ("no" if streamed else None)
            assert reply.headers.get("cache-control") == ("no-cache" if streamed else None)

    run(scenario)


def test_what_a_proxy_says_of_the_client_changes_nothing_and_is_not_kept() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client = await started(cluster, "r1")
        plain = await client.post(ask("a", stream=False))
        reported = await client.post(ask("a", stream=False), headers=dict.fromkeys(FORWARDED, "203.0.113.9"))
        assert (reported.status, reported.text) == (plain.status, plain.text)
        assert "203.0.113.9" not in str(reported.headers) + reported.body.decode() + await metrics(client)

    run(scenario)


async def metrics(client: Client) -> str:
    return (await client.get("/metrics")).body.decode()


def test_the_edge_counts_connections_by_the_address_that_connects() -> None:
    lines = " ".join(haproxy.frontend_lines(haproxy.Sources()) + haproxy.defaults_lines(Path("/run")))
    assert "track-sc0 src," in lines
    assert not [name for name in FORWARDED if name in lines.lower()]


def test_the_bounds_of_the_proxy_fit_ours() -> None:
    found = directives()
    settings = Settings()
    assert int(found["client_max_body_size"].removesuffix("m")) * 2**20 == settings.http.max_body_bytes
    assert seconds(found["keepalive_timeout"]) < haproxy.REQUEST_S
    assert seconds(found["proxy_read_timeout"]) > settings.admission.max_wait_s
    assert found["proxy_http_version"] == "1.1"
    assert found["proxy_buffering"] == "off"
