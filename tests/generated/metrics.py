"""The metrics of a router."""

from __future__ import annotations

from serve_app.router.metric_table import Metric
from tests.generated.blocks import table


def metrics() -> str:
    rows = [(f"`{row.name}`", row.type, ", ".join(row.labels), row.help) for row in (each.value for each in Metric)]
    return table(("metric", "type", "labels", "what it counts"), rows)
