"""The metrics of a router."""

from __future__ import annotations

from typing import get_args, get_type_hints

from serve_app.router.metrics.haproxy_table import HaproxyFigure
from serve_app.router.metrics.metric_row import MetricRow
from serve_app.router.metrics.table import TABLE

TYPES: tuple[str, ...] = get_args(get_type_hints(MetricRow)["type"])


def metrics() -> str:
    """A list for each type, by the names that queries use, with the labels in braces; HAProxy's and old names in lists
    of their own. What HAProxy's names mean is in its manual."""
    parts = []
    haproxys = [figure.value for figure in HaproxyFigure]
    for kind in TYPES:
        parts += ["", f"## {kind.capitalize()}s", ""]
        parts += [_item(row) for row in TABLE if row.type == kind and not row.is_old and row not in haproxys]
    parts += ["", "## HAProxy's own", "", ", ".join(f"`{_named(row)}`" for row in haproxys)]
    parts += ["", "## Old names", ""]
    parts += [_item(row) for row in TABLE if row.is_old]
    return "\n".join(parts)


def _item(row: MetricRow) -> str:
    return f"- `{_named(row)}`: {row.help}"


def _named(row: MetricRow) -> str:
    labels = f"{{{','.join(row.labels)}}}" if row.labels else ""
    return f"{row.sample_name}{labels}"
