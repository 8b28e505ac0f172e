"""`serve-app usage`: fetches sums of use from a running endpoint and prints them, as a table, CSV or JSON."""

from __future__ import annotations

import csv
import enum
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from rich.console import Console

from serve_app.cli.endpoint import Endpoint, fetch
from serve_app.cli.layout import Listing

MICRO = 1_000_000  # the cost is counted in millionths


class UsageGroup(enum.StrEnum):
    """By what use can be summed."""

    DAY = "day"
    TENANT = "tenant"
    KEY = "key"
    NAME = "name"
    MODEL = "model"


COUNTS = ("requests", "prompt_tokens", "cached_tokens", "output_tokens", "kv_token_ms", "wait_ms", "unsettled")


def report(endpoint: Endpoint, by: Sequence[UsageGroup], from_day: str | None, to_day: str | None) -> dict[str, Any]:
    """The sums, as GET /admin/usage gives them.

    Raises:
        BadRequest: not a day, or not for this key. Unavailable: no answer.
    """
    query = {"by": ",".join(by), "from": from_day, "to": to_day}
    return fetch(endpoint, "GET", "/admin/usage", params=query)  # type: ignore[no-any-return]


def show(found: Mapping[str, Any], console: Console) -> None:
    """Print a row for each sum; on a terminal with the cost where there is any, in a pipe always."""
    rows = found["data"]
    listing = Listing(console)
    with_cost = not console.is_terminal or any(row["cost_micro"] for row in rows)
    columns = [*found["by"], "requests", "prompt", "cached", "output", "KV token-s", "wait s", "unsettled"]
    if with_cost:
        columns.append("cost")
    if not rows:
        listing.say("Nothing was used.", ())
    listing.table("usage", columns, [_cells(row, found["by"], with_cost=with_cost) for row in rows])


def write_csv(found: Mapping[str, Any], out: TextIO) -> None:
    """Write a head and a line for each sum, always with the same columns after those of the groups."""
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*found["by"], *COUNTS, "cost"])
    for row in found["data"]:
        writer.writerow([*(row[name] for name in (*found["by"], *COUNTS)), _cost(row)])


def _cells(row: Mapping[str, Any], by: Sequence[str], *, with_cost: bool) -> list[str]:
    tokens = [str(row[name]) for name in ("requests", "prompt_tokens", "cached_tokens", "output_tokens")]
    seconds = [f"{row['kv_token_ms'] / 1000:.0f}", f"{row['wait_ms'] / 1000:.1f}"]
    cost = [_cost(row)] if with_cost else []
    return [*(row[word] for word in by), *tokens, *seconds, str(row["unsettled"]), *cost]


def _cost(row: Mapping[str, Any]) -> str:
    """Exact: a float would round sums."""
    whole, part = divmod(row["cost_micro"], MICRO)
    return f"{whole}.{part:06d}"
