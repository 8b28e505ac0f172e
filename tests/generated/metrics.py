"""The metrics of a router."""

from __future__ import annotations

from typing import get_args, get_type_hints

from serve_app.router.metrics.table import TABLE, MetricRow

TYPES: tuple[str, ...] = get_args(get_type_hints(MetricRow)["type"])


def metrics() -> str:
    """A list for each type, by the names that queries use, with the labels in braces; old names in a list of their
    own."""
    parts = []
    for kind in TYPES:
        parts += ["", f"## {kind.capitalize()}s", ""]
        parts += [_item(row) for row in TABLE if row.type == kind and not row.is_old]
    parts += ["", "## Old names", ""]
    parts += [_item(row) for row in TABLE if row.is_old]
    return "\n".join(parts)


def _item(row: MetricRow) -> str:
    labels = f"{{{','.join(row.labels)}}}" if row.labels else ""
    return f"- `{row.sample_name}{labels}`: {row.help}"
