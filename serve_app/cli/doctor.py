"""`serve-app doctor`: what is wrong with this machine, the endpoint's port and the cluster, each with a remedy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console

from serve_app.cli.deploy import find
from serve_app.cli.layout import Listing
from serve_app.cluster.local import InstanceState, ask, require_free
from serve_app.errors import ServeAppError
from serve_app.system import Check, doctor, marked

STYLES = {"ok": "", "warn": "yellow", "fail": "red"}


def checks(state: InstanceState, address: str | None, host: str, port: int) -> list[Check]:
    """All checks; the port is free, or the running instance's own."""
    return [*doctor.machine(), _port(state, host, port), _ray(state, address)]


def _port(state: InstanceState, host: str, port: int) -> Check:
    instance = state.read()
    if instance is not None and marked(instance.mark):
        return Check("port", "ok", f"{instance.http_port}, of the running instance")
    try:
        require_free(host, port)
    except ServeAppError as error:
        return Check("port", "fail", error.message, "end that process, or choose another port with --port")
    return Check("port", "ok", f"{port} is free")


def _ray(state: InstanceState, address: str | None) -> Check:
    """Whether a driver reaches the cluster and its application."""
    try:
        target = find(address, state)
    except ServeAppError:
        return Check("Ray", "ok", "nothing runs here")
    try:
        found = ask({"do": "status", "environment": target.environment, "models": []})
    except ServeAppError as error:
        remedy = "check --address, the token (RAY_AUTH_TOKEN_PATH) and the network; `serve-app logs` of the head"
        return Check("Ray", "fail", error.message, remedy)
    is_well = found["state"] == "running"
    text = f"answers; the application is {found['state']}" + (f": {found['message']}" if found["message"] else "")
    return Check("Ray", "ok" if is_well else "warn", text, "" if is_well else "`serve-app status` says more")


def as_json(found: Sequence[Check]) -> dict[str, Any]:
    """The checks as JSON values, with the worst state."""
    states = {one.state for one in found}
    worst = next(state for state in ("fail", "warn", "ok") if state in states)
    return {"state": worst, "checks": [one._asdict() for one in found]}


def show(found: dict[str, Any], console: Console) -> None:
    """Print each check, with the remedy below it."""
    listing = Listing(console)
    for check in found["checks"]:
        record = ("check", check["state"], check["name"], check["found"], check["remedy"])
        listing.say(f"{check['state']}: {check['name']}: {check['found']}", record, style=STYLES[check["state"]])
        if check["remedy"]:
            listing.say(check["remedy"], (), indent=1)
