"""The dashboards of deploy/grafana are what the code makes, and well formed, and Grafana's own models take them."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models import prometheus as prometheus_models

from scripts.dashboards import __main__ as command
from scripts.dashboards import expressions, files
from scripts.dashboards.boards import WIDTH, Query
from scripts.dashboards.expressions import WrongExpression, growth, now, quantile, rate
from scripts.dashboards.grafana import GRAFANA, MOUNTED_AT
from serve_app.router.metrics.table import TABLE, ClusterFigure, EngineFigure, Figure, Metric
from tests.requires import requires

ROOT = files.ROOT
MADE = files.files()
DASHBOARDS = {Path(path).stem: json.loads(text) for path, text in MADE.items() if path.endswith(".json")}
EACH = pytest.mark.parametrize("name", DASHBOARDS)
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
QUESTIONS = (
    "who waits and why",
    "which tenant hogs",
    "p95 of the first token by class in the last hour",
    "what does GPU memory do",
    "why did it scale",
    "what failed in the last ten minutes",
    "model or router?",
)
# Metrics that no dashboard shows, with the reason.
NOT_SHOWN = {
    Metric.IDEMPOTENT_REQUESTS: "a matter of single clients",
    Metric.ESTIMATE_RATIO: "the ratio by tenant says more",
    Metric.GRANTED_TOKENS: "used tokens over estimated ones are shown",
    Metric.UNAUTHORIZED: "the outcome `unauthorized` is shown; the reason is a matter of single clients",
    ClusterFigure.ROUTERS_WANTED: "the alert of a lost router compares with it",
    Figure.JWKS_AGE: "with `auth.jwt` alone, and the events tell when the issuer is away",
    Figure.UNREAD_BYTES: "`slow_client` is among the refusals and failures",
    Figure.SLOW_CLIENTS: "the same",
    EngineFigure.KV_CACHE_USAGE: "the ledger's KV tokens are shown",
    EngineFigure.STEPS: "the mean batch is shown",
    EngineFigure.SEQUENCE_STEPS: "the same",
    EngineFigure.GENERATED_TOKENS: "tokens a second are shown",
    EngineFigure.BATCH_WAIT_S: "with `batching` alone",
    EngineFigure.PADDING_RATIO: "the same",
    EngineFigure.BATCHES: "the same",
    EngineFigure.BATCHED_REQUESTS: "the same",
}


def panels_of(name: str) -> list[dict[str, Any]]:
    """Without headings."""
    return [panel for panel in DASHBOARDS[name]["panels"] if panel["type"] != "row"]


def expressions_of(name: str) -> Iterator[str]:
    for panel in panels_of(name):
        for target in panel["targets"]:
            yield target["expr"]


@pytest.mark.parametrize("path", MADE)
def test_a_file_is_what_the_code_makes(path: str) -> None:
    assert (ROOT / path).read_text() == MADE[path], "write it anew: python -m scripts.dashboards"


def test_every_dashboard_that_is_there_is_made() -> None:
    found = {file.relative_to(ROOT).as_posix() for file in (ROOT / "deploy/grafana").rglob("*") if file.is_file()}
    assert found == {path for path in MADE if path.startswith("deploy/grafana/")}


def test_check_names_what_differs_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "ROOT", tmp_path)
    monkeypatch.setattr("sys.argv", ["dashboards", "--check"])
    assert command.main() == 1
    assert sorted(capsys.readouterr().out.splitlines()) == sorted(f"differs: {path}" for path in MADE)
    assert list(tmp_path.iterdir()) == []

    monkeypatch.setattr("sys.argv", ["dashboards"])
    assert command.main() == 0
    monkeypatch.setattr("sys.argv", ["dashboards", "--check"])
    assert command.main() == 0


def test_runbooks_may_be_anywhere() -> None:
    rules = yaml.safe_load(files.files("https://wiki.example/serve-app/")[files.RULES])
    urls = [rule["annotations"]["runbook_url"] for rule in rules["groups"][1]["rules"]]
    assert all(url.startswith("https://wiki.example/serve-app/") for url in urls)
    assert len(urls) > 10


@EACH
def test_grafana_s_own_models_take_a_dashboard(name: str) -> None:
    """What they read and write again is the same, but for `custom`, which they add to each panel."""
    register_default_plugins()
    read = models.Dashboard.from_json(DASHBOARDS[name])
    again = json.loads(json.dumps(read, cls=JSONEncoder))
    for panel in again["panels"]:
        defaults = panel.get("fieldConfig", {}).get("defaults", {})
        if defaults.get("custom") == {}:
            del defaults["custom"]
    assert again == DASHBOARDS[name]
    targets = [target for panel in read.panels or [] for target in getattr(panel, "targets", None) or []]
    assert targets
    assert all(isinstance(target, prometheus_models.Dataquery) for target in targets)


def test_the_models_are_of_the_grafana_that_is_named() -> None:
    assert version("grafana-foundation-sdk").partition("!")[2] == GRAFANA


@EACH
def test_panels_have_numbers_and_places_of_their_own(name: str) -> None:
    panels = DASHBOARDS[name]["panels"]
    ids = [panel["id"] for panel in panels]
    assert len(ids) == len(set(ids))
    cells = [cell for panel in panels for cell in cells_of(panel["gridPos"])]
    assert len(cells) == len(set(cells)), "two panels overlap"
    assert max(x for x, _ in cells) < WIDTH


def cells_of(place: dict[str, int]) -> Iterator[tuple[int, int]]:
    return itertools.product(range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"]))


@EACH
def test_every_panel_has_a_title_a_help_a_unit_and_names_for_its_series(name: str) -> None:
    panels = panels_of(name)
    titles = [panel["title"] for panel in panels]
    assert len(titles) == len(set(titles))
    for panel in panels:
        assert panel["description"], panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        references = [target["refId"] for target in panel["targets"]]
        legends = [target["legendFormat"] for target in panel["targets"]]
        assert len(references) == len(set(references)) >= 1
        assert len(legends) == len(set(legends)), panel["title"]
        assert all(legends)


@EACH
def test_everything_asks_the_prometheus_that_is_chosen(name: str) -> None:
    dashboard = DASHBOARDS[name]
    chosen, *others = dashboard["templating"]["list"]
    assert (chosen["name"], chosen["type"], chosen["query"]) == ("datasource", "datasource", "prometheus")
    for panel in panels_of(name):
        assert panel["datasource"] == SOURCE
        assert [target["datasource"] for target in panel["targets"]] == [SOURCE] * len(panel["targets"])
    assert [variable["datasource"] for variable in others] == [SOURCE] * len(others)


@EACH
def test_a_dashboard_has_the_variables_that_its_queries_use(name: str) -> None:
    used = {found for text in expressions_of(name) for found in re.findall(r"\$(\w+)", text)}
    declared = {variable["name"] for variable in DASHBOARDS[name]["templating"]["list"]}
    assert used - {"__rate_interval"} == declared - {"datasource"}


def test_each_question_of_the_night_has_its_panel_on_the_overview() -> None:
    titles = [panel["title"] for panel in panels_of("serve-app-overview")]
    assert [title for title in QUESTIONS if titles.count(title) != 1] == []


def test_dashboards_have_addresses_of_their_own() -> None:
    assert [dashboard["uid"] for dashboard in DASHBOARDS.values()] == list(DASHBOARDS)


def test_every_metric_of_ours_is_on_a_dashboard_or_has_a_reason_not_to_be() -> None:
    texts = "\n".join(text for name in DASHBOARDS for text in expressions_of(name))
    named = set(re.findall(r"\b(?:serve_app|haproxy)_\w+", texts))
    histograms = {row.name for row in TABLE if row.type == "histogram"}
    named = {name if base not in histograms else base for name in named for base in [name.rpartition("_")[0]]}
    assert named <= {row.sample_name for row in TABLE if not row.is_old}
    known = {row.sample_name for row in TABLE if row.sample_name.startswith("serve_app_") and not row.is_old}
    not_shown = {source.value.sample_name for source in NOT_SHOWN}
    assert known - named == not_shown, "put it on a dashboard, or say in NOT_SHOWN why not"


def test_promtool_can_read_every_query(tmp_path: Path) -> None:
    requires("promtool")
    texts = sorted({text.replace("$__rate_interval", "5m") for name in DASHBOARDS for text in expressions_of(name)})
    rules = [{"record": f"query:number:{number}", "expr": text} for number, text in enumerate(texts)]
    file = tmp_path / "queries.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}, width=100_000))
    done = subprocess.run(["promtool", "check", "rules", file], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"SUCCESS: {len(texts)} rules found" in done.stdout


def test_one_mount_and_one_address_provision_everything() -> None:
    provider = yaml.safe_load(MADE["deploy/grafana/provisioning/dashboards/serve-app.yaml"])["providers"][0]
    assert provider["options"]["path"] == f"{MOUNTED_AT}/dashboards"
    (source,) = yaml.safe_load(MADE["deploy/grafana/provisioning/datasources/serve-app.yaml"])["datasources"]
    assert source["url"] == "$SERVE_APP_PROMETHEUS_URL"
    page = (ROOT / "docs/how-to/watch.md").read_text()
    assert f"deploy/grafana:{MOUNTED_AT}" in page
    assert f"GF_PATHS_PROVISIONING={MOUNTED_AT}/provisioning" in page
    assert "SERVE_APP_PROMETHEUS_URL=" in page
    assert f"grafana/grafana:{GRAFANA}" in page


@pytest.mark.parametrize(
    ("made", "complaint"),
    [
        (lambda: now(Figure.WAITING, tenant="acme"), "no label tenant"),
        (lambda: now(Figure.WAITING).summed("tenant"), "no label tenant"),
        (lambda: now(Figure.OLD_PLACED), "goes with the next version"),
        (lambda: now(Metric.REQUESTS), "is a counter, and not a gauge"),
        (lambda: rate(Figure.WAITING, "5m"), "is a gauge, and not a counter"),
        (lambda: quantile(0.5, Metric.REQUESTS, "5m"), "is a counter, and not a histogram"),
        (lambda: quantile(0.5, Metric.DURATION, "5m", "outcome"), "no label outcome"),
        (lambda: now(Figure.BLOCKED).summed("model"), "a sum is wrong"),
        (lambda: now(Figure.SLOTS, state="total").summed("model"), "a sum is wrong"),
        (lambda: now(Figure.WAITING).summed().over(now(Figure.WAITING).summed("model")), "no label model"),
        (lambda: now(Figure.WAITING).summed("model").or_else(now(Figure.WAITING).summed()), "other labels"),
        (lambda: now(Figure.WAITING).summed("model").or_zero("priority"), "no label priority"),
        (lambda: expressions.values_of(Figure.WAITING, "tenant"), "no label tenant"),
        (lambda: Query(now(Figure.WAITING).summed("model"), "{{priority}}"), "names {'priority'}"),
    ],
)
def test_a_query_of_what_does_not_exist_is_an_error(made: Any, complaint: str) -> None:
    with pytest.raises(WrongExpression, match=re.escape(complaint)):
        made()


def test_expressions_are_promql() -> None:
    free = now(ClusterFigure.GPU_MEMORY, kind="free").summed("node")
    everything = now(ClusterFigure.GPU_MEMORY).summed()
    assert free.over(everything).above(0.5).text == (
        '(sum by (node) (serve_app_gpu_memory_bytes{kind="free"}) / on () group_left () '
        "sum (serve_app_gpu_memory_bytes)) > 0.5"
    )
    assert growth(Metric.MOVES, "5m", model="$model").summed().text == (
        'sum (((serve_app_moves_total{model=~"$model"} unless '
        'present_over_time(serve_app_moves_total{model=~"$model"}[5m] offset 5m)) and on (instance, job) '
        '(up offset 5m == 1)) or increase(serve_app_moves_total{model=~"$model"}[5m]))'
    )
