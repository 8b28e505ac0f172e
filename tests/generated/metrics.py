"""The metrics of a router."""

from __future__ import annotations

from typing import get_args, get_type_hints

from serve_app.router.metric_table import Metric, MetricRow

TYPES: tuple[str, ...] = get_args(get_type_hints(MetricRow)["type"])


def metrics() -> str:
    """A list for each type, with the labels in braces."""
    rows = [metric.value for metric in Metric]
    parts = []
    for kind in TYPES:
        parts += ["", f"## {kind.capitalize()}s", ""]
        parts += [f"- `{row.name}{_labels(row)}`: {row.help}" for row in rows if row.type == kind]
    return "\n".join(parts)


def _labels(row: MetricRow) -> str:
    return f"{{{','.join(row.labels)}}}" if row.labels else ""
