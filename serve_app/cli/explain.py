"""`serve-app explain`: fetches the receipt of a request from a running endpoint and prints it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from serve_app.cli.chat import Endpoint, request, session

_GOOD = frozenset({"ok"})
_GONE = frozenset({"cancelled_queued", "cancelled_running"})


def receipt(endpoint: Endpoint, request_id: str) -> dict[str, Any]:
    """The receipt of a request, as GET /admin/requests/{id} gives it.

    Raises:
        BadRequest: no router has the receipt, or the key is not an operator's. Unavailable: no answer.
    """
    with session(endpoint) as http:
        path = f"/admin/requests/{quote(request_id, safe='')}"
        found: dict[str, Any] = request(http, endpoint, "GET", path).json()
        return found


def show(found: Mapping[str, Any], console: Console) -> None:
    """Print a receipt: the first line says how the request ended, the others why."""
    outcome = found["outcome"]
    style = "green" if outcome in _GOOD else "yellow" if outcome in _GONE else "red"
    first, *others = found["story"]
    console.print(Text(first, style=style))
    for line in others:
        console.print(Padding(Text(line), (0, 0, 0, 2), expand=False))
