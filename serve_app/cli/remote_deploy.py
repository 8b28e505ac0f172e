"""`serve-app deploy --url`: send the configuration to a running endpoint by HTTP, with a key that may deploy.

Variables are resolved here, and keys are sent by their SHA-256. What the endpoint changes from its machine alone may be
left out of the file; where it differs, the endpoint refuses the whole configuration.

Invariant: what is followed is what was begun; the deployment goes on if this command ends.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from serve_app import settings as configuration
from serve_app.cli import check_command as checking
from serve_app.cli.endpoint import CONNECT_S, Endpoint, fetch
from serve_app.cli.layout import say
from serve_app.cli.operators import fetch_soon
from serve_app.cli.progress import Progress
from serve_app.engine.start import environment
from serve_app.errors import Unavailable
from serve_app.settings import Change, Settings

PATH = "/admin/deploys"
BEGIN_S = 75.0  # the endpoint says within a minute that it cannot
LOOK_S = 1.0
UNDER_WAY = ("checking", "declaring", "waiting")


@dataclass(frozen=True, slots=True)
class DeployOptions:
    """Of `serve-app deploy`."""

    plan_only: bool
    as_json: bool
    check_first: bool
    wait: bool
    roll_back: bool
    timeout_s: float


def deploy(config: Path, endpoint: Endpoint, options: DeployOptions, console: Console, errors: Console) -> int:
    """Plan or deploy it there. Returns the exit status.

    Raises:
        ServeAppError: the file is wrong; the endpoint refuses it, the key, or does not answer.
    """
    wanted = configuration.load(config)
    body = {"configuration": sent(wanted), "roll_back": options.roll_back, "timeout_s": options.timeout_s}
    if options.plan_only or options.check_first:
        plan = _post(endpoint, body | {"plan_only": True})
        if options.plan_only and options.as_json:
            print(json.dumps({"plan": [checking.change_as_json(*one) for one in _changes(plan)]}))
            return 0
        shown = [change for change, _ in _changes(plan) if options.plan_only or change.effect != "unchanged"]
        if options.check_first and not _fits(wanted, plan, errors):
            return 2
        checking.show_plan(shown, plan["replicas"], console)
        if options.plan_only:
            return 0
    begun = _post(endpoint, body)
    say(console, f"deployment {begun['id']} has begun")
    if not options.wait:
        return 0
    with Progress(console) as progress:
        progress.begin("Waiting until it runs")
        found = _follow(endpoint, begun, options.timeout_s, progress)
    say(console, f"{found['state'].replace('_', ' ')}  {found['message']}".rstrip())
    return 0 if found["state"] == "done" else 1


def sent(wanted: Settings) -> dict[str, Any]:
    """The settings that the file has, as JSON values; keys by their SHA-256 alone."""
    return wanted.without_secrets().model_dump(mode="json", exclude_unset=True)


def _post(endpoint: Endpoint, body: dict[str, Any]) -> dict[str, Any]:
    return fetch(endpoint, "POST", PATH, json=body, timeout=(CONNECT_S, BEGIN_S))  # type: ignore[no-any-return]


def _changes(plan: dict[str, Any]) -> list[tuple[Change, list[str]]]:
    """Each change, with the ids of the replicas that it is about."""
    found = [Change(**{**one, "fields": tuple(one["fields"])}) for one in plan["changes"]]
    return [(change, plan["replicas"].get(change.deployment, [])) for change in found]


def _fits(wanted: Settings, plan: dict[str, Any], errors: Console) -> bool:
    """Whether the nodes there can run it; what is found is shown. Of a model whose path only the machine knows, nothing
    can be found here."""
    cluster = checking.running_cluster(plan, grows=True)
    platform: environment.Platform = "gpu" if any(node.gpus for node in cluster.nodes) else "cpu"
    unknown = tuple(f"models.{index}." for index, one in enumerate(wanted.models) if "path" not in one.model_fields_set)
    with Progress(errors) as progress:
        found = checking.check(wanted, cluster, progress, here=False, platform=platform).findings
    found = [one for one in found if not f"{one.path}.".startswith(unknown)]
    if found:
        checking.show(found, "configuration", errors)
    return not checking.has_errors(found)


def _follow(endpoint: Endpoint, begun: dict[str, Any], timeout_s: float, progress: Progress) -> dict[str, Any]:
    """How it ended. Raises Unavailable: not in this time; NotFound: nobody there knows of it any more."""
    found = begun
    deadline = time.monotonic() + timeout_s
    while found["state"] in UNDER_WAY:
        if time.monotonic() > deadline:
            raise Unavailable(f"{begun['id']} is still {found['state']}; it goes on there", code="deploy_failed")
        time.sleep(LOOK_S)  # bound: by the deadline
        try:
            found = fetch_soon(endpoint, "GET", f"{PATH}/{begun['id']}")
        except Unavailable as error:  # routers may restart with it: the next one answers
            progress.detail(error.message)
            continue
        waits = ", ".join(f"{name} {state}" for name, state in found.get("waits", {}).items())
        progress.detail(waits or found["state"])
    return found
