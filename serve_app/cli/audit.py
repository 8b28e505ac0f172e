"""`serve-app audit`: who changed keys, deployed, drained or freed memory, from GET /admin/audit of an endpoint."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from rich.console import Console

from serve_app.cli.command_line import EndpointOptions
from serve_app.cli.endpoint import Endpoint, fetch
from serve_app.cli.layout import Listing
from serve_app.cli.logs import iso, since_of

PATH = "/admin/audit"
PAGE = 1000
DIGEST_DIGITS = 12  # of a digest, on a terminal: enough to tell configurations apart
COLUMNS = ("time", "author", "action", "target", "what")


def audit(
    at: EndpointOptions,
    since: Annotated[
        str, typer.Option("--since", help="From then on: a date (2026-11-01), a time, or so long ago: 30d, 12h.")
    ] = "30d",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line, for an export.")] = False,
) -> None:
    """Show who made, changed or ended keys, deployed, drained or freed memory; with an operator's key."""
    found = entries(at.endpoint(), since)
    if as_json:
        for entry in found:
            print(json.dumps(entry))
    else:
        show(list(found), Console())


def entries(endpoint: Endpoint, since: str) -> Iterator[dict[str, Any]]:
    """All entries since a date or a time of UTC, or of a duration until now, the oldest first. Raises as `fetch`, and
    BadRequest."""
    begin = iso(since_of(since, datetime.now(UTC), UTC))
    cursor = None
    while True:
        page = fetch(endpoint, "GET", PATH, params={"since": begin, "limit": PAGE, "cursor": cursor})
        yield from page["data"]
        cursor = page["next_cursor"]
        if not page["has_more"]:
            return


def show(found: list[dict[str, Any]], console: Console) -> None:
    """Print a row for each entry."""
    listing = Listing(console)
    if not found:
        listing.say("Nothing was changed.", ())
    listing.table("audit", COLUMNS, map(_row, found))


def _row(entry: Mapping[str, Any]) -> tuple[str, ...]:
    author = entry["author"] if entry["tenant"] is None else f"{entry['author']} ({entry['tenant']})"
    return entry["time"], author, entry["action"], entry["target"], _summary(entry)


def _summary(entry: Mapping[str, Any]) -> str:
    """What was changed, in a few words; the JSON has all of it."""
    details = entry["details"]
    if entry["digest_after"] is not None:
        before = (entry["digest_before"] or "nothing")[:DIGEST_DIGITS]
        return f"{before} -> {entry['digest_after'][:DIGEST_DIGITS]}"
    if "changed" in details:
        return " ".join([details["name"], *sorted(details["changed"])])
    return str(details.get("name") or "")
