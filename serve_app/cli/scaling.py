"""`serve-app scaling`: what scaling wants now and what a second policy would; with `--diff` on recorded traffic."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from autoscaling import recorded_decisions
from serve_app.cli import simulate as simulating
from serve_app.cli.command_line import EndpointOptions, JsonOption, print_found
from serve_app.cli.endpoint import Endpoint
from serve_app.cli.layout import NOTHING, Listing
from serve_app.cli.logs import iso, since_of
from serve_app.cli.operators import fetch_soon
from serve_app.cli.records import pages
from serve_app.cli.simulate import LoadOptions
from serve_app.cli.simulate_command import Planned, ProfileOption, WorldOptions, compared, configurations, show
from serve_app.errors import BadRequest
from serve_app.settings import Settings

STATUS = "/admin/status"
REPLAYED = ("deployment", "policy", "decisions", "differing", "first difference")
COLUMNS = ("model", "running", "target", "advised", "why", "advice", "signals")


def scaling(
    at: EndpointOptions,
    diff: Annotated[
        Path | None, typer.Option("--diff", help="The deployed configuration: simulate its policies on what came.")
    ] = None,
    since: Annotated[str, typer.Option("--since", help="With --diff: of the requests since then, such as 1h.")] = "1h",
    profile: ProfileOption = None,
    replay: Annotated[
        Path | None,
        typer.Option("--replay", help="Recorded decisions, a file or a folder: whether each comes out again."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show what scaling wants, and what the policy of `advise` would; with --diff what each costs and meets."""
    if replay is not None:
        show_replays(recorded_decisions.replayed(recorded_decisions.lines_of(replay)), as_json)
        return
    endpoint = at.endpoint()
    found: dict[str, Any] = {"models": _models(endpoint)}
    if diff is None:
        print_found(found, as_json, lambda _, console: show_models(found, console))
        return
    base, _ = configurations(diff, WorldOptions())
    options = WorldOptions(policy=",".join(policies_of(base.settings)), profile=profile)
    load = simulating.load_of(_records(endpoint, since), [model.name for model in base.settings.models], LoadOptions())
    comparison = compared(Planned(diff, f"requests since {since}", base, {}, load), options, 1.0)

    def show_all(_: Any, console: Console) -> None:
        show_models(found, console)
        show(comparison, console)

    print_found(found | asdict(comparison), as_json, show_all)


def show_replays(replays: Sequence[recorded_decisions.Replay], as_json: bool) -> None:
    """Print a row for each deployment. Exits with 1 where a decision did not come out again."""
    rows = [
        [one.deployment, one.policy, str(one.decisions), str(one.differing), _difference(one.first)] for one in replays
    ]
    found = {"replays": [asdict(one) | {"first": one.first and one.first._asdict()} for one in replays]}
    print_found(found, as_json, lambda _, console: Listing(console).table("replay", REPLAYED, rows))
    if any(one.differing for one in replays):
        raise typer.Exit(1)


def _difference(first: recorded_decisions.Difference | None) -> str:
    if first is None:
        return NOTHING
    recorded = first.recorded
    again = first.again
    return f"{recorded.replicas} ({recorded.cause}) recorded at {first.now:.1f}, {again.replicas} ({again.cause}) now"


def policies_of(settings: Settings) -> list[str]:
    """The names of the policies that decide or advise, those that decide first."""
    scaled = [model.replicas for model in settings.models]
    names = [each.policy for each in scaled] + [each.advise for each in scaled if each.advise is not None]
    return list(dict.fromkeys(names))


def _models(endpoint: Endpoint) -> list[dict[str, Any]]:
    status = fetch_soon(endpoint, "GET", STATUS)
    return [
        {
            "model": model["name"],
            "running": sum(replica["state"] == "RUNNING" for replica in model["replicas"]),
            "target": model["target"],
            "advised": model["advised"],
            "why": model["why"],
            "advice": model["advice"],
            "signals": model.get("signals", ""),
        }
        for model in status["models"]
    ]


def _records(endpoint: Endpoint, since: str) -> list[str]:
    """The recorded requests as lines of JSON. Raises BadRequest: there is none."""
    begin = iso(since_of(since, datetime.now(UTC)))
    found = [json.dumps(record) for page in pages(endpoint, {"since": begin}) for record in page["data"]]
    if not found:
        raise BadRequest(f"--since {since}: no request is recorded since then", param="--since")
    return found


def show_models(found: Mapping[str, Any], console: Console) -> None:
    """Print a row for each model."""
    rows = [
        [NOTHING if model[column] in (None, "") else str(model[column]) for column in COLUMNS]
        for model in found["models"]
    ]
    Listing(console).table("scaling", COLUMNS, rows)
