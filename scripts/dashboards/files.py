"""The text of each file by its path."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from scripts.dashboards.batches import batches
from scripts.dashboards.boards import Board
from scripts.dashboards.grafana import dashboard_json, provider, source
from scripts.dashboards.memory import memory
from scripts.dashboards.model import model
from scripts.dashboards.overview import overview
from scripts.dashboards.rules import groups
from scripts.dashboards.scaling import scaling
from scripts.dashboards.tenants import tenants

ROOT = Path(__file__).resolve().parents[2]
DASHBOARDS = "deploy/grafana/dashboards"
RULES = "deploy/prometheus/rules.yaml"
RUNBOOKS = "docs/how-to/"  # in a checkout
LINE = 10_000  # of YAML: an expression is not broken
MADE = "# Written by `python -m scripts.dashboards`.\n"
KUBERNETES = f"""{MADE}#
# The alerts of deploy/prometheus/rules.yaml for Prometheus' operator:
#
#   kubectl -n serve-app apply -f deploy/kubernetes/rules.yaml
"""


def boards() -> tuple[Board, ...]:
    """All dashboards, the first one to look at first."""
    return overview(), model(), tenants(), memory(), scaling(), batches()


def files(runbooks: str = RUNBOOKS) -> Mapping[str, str]:
    """What is written. `runbooks`: the address of the pages of docs/how-to, with a slash at its end."""
    rules = groups(runbooks)
    made = {f"{DASHBOARDS}/{board.uid}.json": dashboard_json(board) for board in boards()}
    return made | {
        "deploy/grafana/provisioning/dashboards/serve-app.yaml": MADE + _yaml(provider()),
        "deploy/grafana/provisioning/datasources/serve-app.yaml": MADE + _yaml(source()),
        RULES: MADE + _yaml(rules),
        "deploy/kubernetes/rules.yaml": KUBERNETES + _yaml(_prometheus_rule(rules)),
    }


def _prometheus_rule(rules: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "serve-app", "labels": {"release": "prometheus"}},
        "spec": dict(rules),
    }


def _yaml(value: Mapping[str, Any]) -> str:
    text: str = yaml.safe_dump(dict(value), sort_keys=False, width=LINE)
    return text
