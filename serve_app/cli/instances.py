"""`serve-app status` and `serve-app down`: for instances started anywhere on this machine by this user.

Invariant: `down` leaves no process of the instance and may be repeated.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console

from autoscaling.operations import FIXED
from serve_app.cli.command_line import EndpointOptions
from serve_app.cli.endpoint import Endpoint
from serve_app.cli.layout import Listing
from serve_app.cli.operators import fetch_soon
from serve_app.cli.progress import start_text
from serve_app.cluster.local import (
    SHUTDOWN_QUESTION_S,
    TERM_GRACE_S,
    Instance,
    InstanceState,
    ask,
    clean_up,
)
from serve_app.core.times import STATUS_FRESH_S
from serve_app.errors import ServeAppError, Unavailable
from serve_app.system import ask_to_end, end_marked, marked, start_ticks

SUPERVISOR_STOP_S = 75.0  # above all waits of `up` when it ends
STYLES = {"running": "green", "unhealthy": "red", "failed": "red", "unreachable": "red"}  # by state


def status(at: EndpointOptions) -> dict[str, Any] | None:
    """The application as `status --json` prints it; None when nothing runs on this machine and no endpoint is named.

    Of an instance of this machine, what its `up` wrote last counts while it is fresh; else its endpoint is asked, and
    Ray where that does not answer.

    Keys: instance, state, message, url, api_key_file, dashboard_url, routers [{id, state, node, address}], models
    [{name, deployment, state, message, cause (why a replica has not started, or an engine has died in the last ten
    minutes), replicas (as routers, and start), target, ongoing, waiting, why}], routes (as in the settings),
    other_applications [{name, state, route}], resources and holders (`autoscaling.operations.holders.usage`),
    unready {deployment: state}.

    Raises:
        ServeAppError: an endpoint elsewhere does not answer, or refuses the key.
    """
    elsewhere = at.elsewhere()
    if elsewhere is not None:
        named = {"instance": urlsplit(elsewhere.url).hostname, "url": elsewhere.url}
        return named | {"api_key_file": None, "dashboard_url": None} | _http_status(elsewhere)
    state = at.state
    instance = state.read()
    if instance is None or not marked(instance.mark):
        return None
    return {
        "instance": instance.name,
        "url": instance.url,
        "api_key_file": instance.api_key_file,
        "dashboard_url": instance.dashboard_url,
        **(state.read_status(STATUS_FRESH_S) or _instance_status(at, instance)),
    }


def nothing_runs(state: InstanceState) -> str:
    """What `status` says of an instance that does not run: how to start it, and where its end can be read."""
    ended = "; `serve-app logs` shows how it ended" if (state.logs / "ray").is_dir() else ""
    return f"{state.name}: nothing runs; start it with `serve-app up`{ended}"


def _http_status(endpoint: Endpoint) -> dict[str, Any]:
    return fetch_soon(endpoint, "GET", "/admin/status")  # type: ignore[no-any-return]


def _instance_status(at: EndpointOptions, instance: Instance) -> dict[str, Any]:
    is_starting = _supervised(instance) and at.state.read_status() is None
    with contextlib.suppress(ServeAppError):  # its routers do not answer, or its key is no operator's
        if not is_starting:
            return _http_status(at.of_instance())
    return _driver_status(at.state, instance)


def _driver_status(state: InstanceState, instance: Instance) -> dict[str, Any]:
    nothing: dict[str, Any] = {"state": "starting", "message": "", "models": [], "routers": [], "unready": {}}
    order = _order("status", state, instance)
    if order is None or (_supervised(instance) and state.read_status() is None):
        return nothing
    try:
        return nothing | ask(order)
    except Unavailable as error:
        return nothing | {"state": "unreachable", "message": error.message}


def _order(command: str, state: InstanceState, instance: Instance) -> dict[str, Any] | None:
    """An order to a driver; None: Ray has not started."""
    environment = state.driver_environment(instance)
    return None if environment is None else {"do": command, "environment": environment, "models": list(instance.models)}


def show(found: Mapping[str, Any], console: Console) -> None:
    """Print `status`: the instance, each model with its replicas, and who else uses the cluster."""
    listing = Listing(console)
    record = ("instance", found["instance"], found["state"], found["url"], found["api_key_file"] or "")
    listing.say(
        f"{found['instance']}: {found['state']} at {found['url']}", record, style=STYLES.get(found["state"], "")
    )
    if found["message"]:
        listing.say(found["message"], ("message", found["message"]), style="yellow")
    for model in found["models"]:
        _show_model(listing, model)
    for route in found.get("routes", ()):
        _show_route(listing, route)
    if found["routers"]:
        listing.say("routers", ())
        _show_replicas(listing, "router", found["routers"])
    _show_others(listing, found)
    if found["api_key_file"]:
        listing.say(f"API key in {found['api_key_file']}", ())


def _show_route(listing: Listing, route: Mapping[str, Any]) -> None:
    """A name, and the models behind it."""
    whole = sum(target["weight"] for target in route["targets"])
    parts = [f"{target['model']} {target['weight'] / whole:.1%}" for target in route["targets"]]
    parts += [f"fallback {model}" for model in route["fallbacks"]]
    if route["shadow"] is not None:
        parts.append(f"shadow {route['shadow']['model']} {route['shadow']['share']:.1%}")
    listing.flow([f"name {route['name']}", *parts], ("name", route["name"], *parts))


def _show_model(listing: Listing, model: Mapping[str, Any]) -> None:
    running = f"{sum(replica['state'] == 'RUNNING' for replica in model['replicas'])}/{model['target']}"
    load = ["" if model[what] is None else str(model[what]) for what in ("ongoing", "waiting")]
    parts = [model["name"], f"{model['state']} {running}"]
    parts += [f"{count} {what}" for count, what in zip(load, ("ongoing", "waiting"), strict=True) if count]
    why = "" if model["why"] == FIXED else model["why"]
    listing.flow(parts, ("model", model["name"], model["deployment"], model["state"], running, *load, why))
    _show_replicas(listing, "replica", model["replicas"], (model["name"],))
    if why:
        listing.say(f"{model['target']} wanted: {why}", (), indent=1)
    if model.get("advised") is not None:
        listing.say(f"{model['advised']} advised: {model['advice']}", (), indent=1)


def _show_replicas(
    listing: Listing, kind: str, replicas: Sequence[Mapping[str, Any]], under: Sequence[str] = ()
) -> None:
    columns = ("replica", "state", "node", "start")
    rows = [(one["id"], one["state"], one.get("address") or one["node"], _step(one)) for one in replicas]
    listing.table(kind, columns, rows, under=under, headed=False, indent=1)


def _step(replica: Mapping[str, Any]) -> str:
    """How far a replica's start or its drain is."""
    if (drain := replica.get("drain")) is not None:
        if drain["ended"]:
            return "has ended; another one is to start"
        return f"{drain['running']} requests run, moved in {drain['left_s']:.0f} s: {drain['why']}"
    start = replica.get("start")
    return "" if start is None else start_text(start)


def _show_others(listing: Listing, found: Mapping[str, Any]) -> None:
    """What the cluster holds beside the application, and who has its CPUs and GPUs."""
    others = found.get("other_applications", ())
    if others:
        listing.say("other applications of Serve", ())
        rows = [(one["name"], one["state"], one["route"]) for one in others]
        listing.table("application", ("name", "state", "route"), rows, headed=False, indent=1)
    for name, amounts in found.get("resources", {}).items():
        if amounts["total"]:
            used = f"{amounts['used']:g}"
            total = f"{amounts['total']:g}"
            listing.say(f"{used} of {total} {name}s are held", ("resource", name, used, total))
    held = [(one["kind"], one["owner"], f"{one['CPU']:g}", f"{one['GPU']:g}") for one in found.get("holders", ())]
    listing.table("holder", ("held by", "owner", "CPUs", "GPUs"), held, indent=1)


def down(state: InstanceState) -> bool:
    """End the instance, also one started by another program, and print the steps. Returns whether any of its processes
    ran.

    A living `up` is asked to end the instance, and awaited; processes left after that, or left by a dead owner, are
    ended here: first through Serve, then by signals.
    """
    instance = state.read()
    if instance is None:
        return False
    ran = bool(marked(instance.mark))
    pid = instance.supervisor_pid
    if pid is not None and state.owned_elsewhere() and _supervised(instance):
        print("Asking the process that runs it to end")
        ask_to_end(pid, instance.supervisor_ticks, SUPERVISOR_STOP_S)
    if state.owned_elsewhere():
        print("Ending its processes; the program that owns it goes on")
        end_marked(instance.mark, TERM_GRACE_S)
        return ran
    state.acquire()
    try:
        if marked(instance.mark):
            _shut_down_serve(state, instance)
            print("Ending what is left")
        clean_up(state)
    finally:
        state.release()
    return ran


def _shut_down_serve(state: InstanceState, instance: Instance) -> None:
    order = _order("shutdown", state, instance)
    if order is not None:
        print("Ending the application")
        try:
            ask(order, SHUTDOWN_QUESTION_S)
        except Unavailable as error:
            print(f"Serve could not be asked to end ({error.message})")


def _supervised(instance: Instance) -> bool:
    """Whether the recorded `up` process still lives."""
    pid = instance.supervisor_pid
    return pid is not None and instance.supervisor_ticks == start_ticks(pid)
