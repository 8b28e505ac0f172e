"""`serve-app status` and `serve-app down`: for instances started anywhere on this machine by this user.

Invariant: `down` leaves no process of the instance and may be repeated.
"""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from serve_app.cluster.local import (
    FIXED,
    SHUTDOWN_QUESTION_S,
    TERM_GRACE_S,
    Instance,
    InstanceState,
    ask,
    clean_up,
)
from serve_app.errors import Unavailable
from serve_app.system import ask_to_end, end_marked, marked, start_ticks

STATUS_FRESH_S = 12.0  # `up` writes its state every 5 s; if it is older than this, Serve is asked
SUPERVISOR_STOP_S = 75.0  # above all waits of `up` when it ends


def status(state: InstanceState) -> dict[str, Any] | None:
    """The instance as `status --json` prints it; None when nothing runs.

    Keys: instance, state, message, url, api_key_file, dashboard_url, routers [{id, state, node}], models [{name,
    deployment, state, message, replicas [{id, state, node}], target, ongoing, waiting, why}], unready {deployment:
    state}.
    """
    instance = state.read()
    if instance is None or not marked(instance.mark):
        return None
    return {
        "instance": instance.name,
        "url": instance.url,
        "api_key_file": instance.api_key_file,
        "dashboard_url": instance.dashboard_url,
        **(state.read_status(STATUS_FRESH_S) or _driver_status(state, instance)),
    }


def _driver_status(state: InstanceState, instance: Instance) -> dict[str, Any]:
    nothing: dict[str, Any] = {"state": "starting", "message": "", "models": [], "routers": [], "unready": {}}
    order = _order("status", state, instance)
    if order is None or (_supervised(instance) and state.read_status() is None):
        return nothing
    try:
        return nothing | ask(order)
    except Unavailable as error:
        return nothing | {"state": "unreachable", "message": error.message}


def _order(what: str, state: InstanceState, instance: Instance) -> dict[str, Any] | None:
    """An order to a driver; None: Ray has not started."""
    environment = state.driver_environment(instance)
    return None if environment is None else {"do": what, "environment": environment, "models": list(instance.models)}


def show(found: dict[str, Any], console: Console) -> None:
    """`status` as a table."""
    console.print(f"{found['instance']}: {found['state']} at {found['url']}", markup=False, highlight=False)
    if found["message"]:
        console.print(found["message"], markup=False, highlight=False, soft_wrap=True)
    table = Table("model", "deployment", "state", "ongoing", "waiting", "replica", "", "node")
    for model in found["models"]:
        running = sum(replica["state"] == "RUNNING" for replica in model["replicas"])
        state = f"{model['state']} {running}/{model['target']}"
        counts = ("-" if model[what] is None else str(model[what]) for what in ("ongoing", "waiting"))
        first = (model["name"], model["deployment"], state, *counts)
        for index, replica in enumerate(model["replicas"] or [{"id": "-", "state": "-", "node": "-"}]):
            table.add_row(
                *(first if index == 0 else ("",) * len(first)), replica["id"], replica["state"], replica["node"][:12]
            )
    for replica in found["routers"]:
        table.add_row("", "Router", "", "", "", replica["id"], replica["state"], replica["node"][:12])
    if table.row_count:
        console.print(table)
    for model in found["models"]:
        if model["why"] != FIXED:
            why = f"{model['name']}: {model['target']} replicas: {model['why']}"
            console.print(why, markup=False, highlight=False, soft_wrap=True)
    if found["api_key_file"]:
        console.print(f"API key in {found['api_key_file']}", markup=False, highlight=False, soft_wrap=True)


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
