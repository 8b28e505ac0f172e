"""`serve-app compare`: the models behind one name side by side, from the request log."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Annotated, Any
from urllib.parse import quote

import typer
from rich.console import Console

from serve_app.cli.command_line import EndpointOptions, JsonOption, print_found
from serve_app.cli.endpoint import Endpoint
from serve_app.cli.layout import NOTHING, Listing
from serve_app.cli.logs import iso, since_of
from serve_app.cli.operators import fetch_soon
from serve_app.cli.records import PAGE, REQUESTS, SinceOption
from serve_app.core.names import Estimate, compared
from serve_app.errors import BadRequest

MAX_PAGES = 20  # of each model: 20,000 requests, the newest; with more, an interval is narrower than anybody acts on
COLUMNS = ("model", "part", "requests", "errors", "first token", "between tokens", "output tokens")


def compare(
    at: EndpointOptions,
    name: Annotated[str, typer.Argument(help="A name of `routes`.")],
    since: SinceOption = "1h",
    as_json: JsonOption = False,
) -> None:
    """Show the models behind a name side by side, with 95% intervals: errors, first token, pace, length."""
    endpoint = at.endpoint()
    card = fetch_soon(endpoint, "GET", f"/v1/models/{quote(name)}")
    route = card.get("route")
    if route is None:
        raise BadRequest(f"{name} is a model; give a name of `routes`", param="NAME")
    begin = iso(since_of(since or "1h", datetime.now(UTC)))
    parts = _parts(route)
    records = [record for model in parts for record in _records(endpoint, name, model, begin)]
    rows = [figures._asdict() | {"part": parts[figures.model]} for figures in compared(name, parts, records)]
    print_found({"name": name, "since": begin, "models": rows}, as_json, show)


def _parts(route: Mapping[str, Any]) -> dict[str, str]:
    """Each model behind a name, with its part of the requests."""
    whole = sum(target["weight"] for target in route["targets"])
    parts = {target["model"]: f"{target['weight'] / whole:.1%}" for target in route["targets"]}
    for model in route["fallbacks"]:
        parts.setdefault(model, "fallback")
    if route["shadow"] is not None:
        parts[route["shadow"]["model"]] = f"shadow {route['shadow']['share']:.1%}"
    return parts


def _records(endpoint: Endpoint, name: str, model: str, since: str) -> Iterator[Mapping[str, Any]]:
    """The records of a model behind the name, the newest first."""
    query: dict[str, Any] = {"name": name, "model": model, "since": since, "limit": PAGE}
    for _ in range(MAX_PAGES):
        found = fetch_soon(endpoint, "GET", REQUESTS, params=query)
        yield from found["data"]
        if found["next_cursor"] is None:
            return
        query["cursor"] = found["next_cursor"]


def show(found: Mapping[str, Any], console: Console) -> None:
    """Print the comparison."""
    listing = Listing(console)
    listing.say(f"{found['name']} since {found['since']}", ())
    rows = [
        (
            model["model"],
            model["part"],
            str(model["requests"]),
            _shown(model["errors"], 100, "%"),
            _shown(model["first_token_s"], 1000, " ms"),
            _shown(model["token_s"], 1000, " ms"),
            _shown(model["output_tokens"], 1, ""),
        )
        for model in found["models"]
    ]
    listing.table("model", COLUMNS, rows)


def _shown(estimate: Estimate | None, scale: float, unit: str) -> str:
    """A figure with its interval."""
    if estimate is None:
        return NOTHING
    value, low, high = (f"{scale * number:.3g}" for number in estimate)
    return f"{value}{unit} ({low} to {high})"
