"""`serve-app explain`: fetches the receipt of a request from a running endpoint and prints it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from rich.console import Console

from serve_app.cli.endpoint import Endpoint, fetch
from serve_app.cli.layout import Listing

STYLES = {"ok": "green", "cancelled_queued": "yellow", "cancelled_running": "yellow"}  # by outcome; others are red


def receipt(endpoint: Endpoint, request_id: str) -> dict[str, Any]:
    """The receipt of a request, as GET /admin/requests/{id} gives it.

    Raises:
        BadRequest: no router has the receipt, or it is not for this key. Unavailable: no answer.
    """
    return fetch(endpoint, "GET", f"/admin/requests/{quote(request_id, safe='')}")  # type: ignore[no-any-return]


def show(found: Mapping[str, Any], console: Console) -> None:
    """Print a receipt: the first line says how the request ended, the others why."""
    listing = Listing(console)
    first, *others = found["story"]
    listing.say(first, style=STYLES.get(found["outcome"], "red"))
    for line in others:
        listing.say(line, indent=1)
