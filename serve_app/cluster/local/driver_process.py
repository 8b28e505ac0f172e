"""A driver of an instance's Serve in a process of its own, which `serve_app.cluster.local.remote_driver` starts and
ends.

It reads one JSON object per line, first its order and then commands, and writes one JSON object per line:
`{"event": "status", ...}` as long as it lives, `{"event": "error", "message": ...}` before it ends because of an error.
It ends at the end of its input.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

from serve_app.cluster.local import driver
from serve_app.cluster.local.status import describe, is_built
from serve_app.errors import ServeAppError, Unavailable

STARTING_PERIOD_S = 0.5  # the polling period of the state while the application starts
RUNNING_PERIOD_S = 5.0  # and after that: a poll costs the controller some milliseconds of CPU


def _send(event: str, **fields: Any) -> None:
    print(json.dumps({"event": event, **fields}), file=_output, flush=True)


def _commands() -> queue.SimpleQueue[dict[str, Any]]:
    """The commands from standard input; its end becomes a shutdown command."""
    commands: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            commands.put(json.loads(line))
        commands.put({"do": "leave"})

    threading.Thread(target=read, daemon=True, name="commands").start()
    return commands


def _next_command(commands: queue.SimpleQueue[dict[str, Any]], timeout_s: float) -> dict[str, Any] | None:
    """The next command; None: none within `timeout_s`."""
    try:
        return commands.get(timeout=timeout_s)
    except queue.Empty:
        return None


def _serve(order: Mapping[str, Any], commands: queue.SimpleQueue[dict[str, Any]]) -> None:
    """Declare the application of `order`, then report its state until a command arrives."""
    _send("phase", phase="application")
    driver.declare(order["application"], **order["serve"])
    while True:
        status = driver.application_status(order["models"], order["name"])
        _send("status", **status)
        command = _next_command(commands, RUNNING_PERIOD_S if status["state"] == "running" else STARTING_PERIOD_S)
        if command is not None:
            if command["do"] == "shutdown":
                driver.shut_down()
            return


def _declare(order: Mapping[str, Any], commands: queue.SimpleQueue[dict[str, Any]]) -> None:
    """Change a running application; report its state until it runs or has failed, or until a command arrives.

    Raises:
        Unavailable: Serve cannot build deployments from it. Running deployments go on, but Serve would neither show nor
            scale them from then on, so the previous declaration is declared again.
    """
    entry = order["application"]
    name = entry["name"]
    before = driver.declare(entry, **order["serve"])
    while (made := is_built(driver.details(), name)) is None:
        if _next_command(commands, STARTING_PERIOD_S) is not None:
            return
    if not made:
        why = describe(driver.details(), order["models"], name)["message"]
        if before is not None:
            driver.declare(before, **order["serve"])
            why += "; the previous declaration is declared again"
        raise Unavailable(f"Serve cannot build the application: {why}", code="deploy_failed")
    _send("phase", phase="declared")
    while order["wait"]:
        status = driver.application_status(order["models"], name)
        _send("status", **status)
        if status["state"] in ("running", "failed") or _next_command(commands, STARTING_PERIOD_S) is not None:
            return


ORDERS: dict[str, Callable[[Mapping[str, Any], queue.SimpleQueue[dict[str, Any]]], None]] = {
    "serve": _serve,
    "declare": _declare,
    "status": lambda order, commands: _send("status", **driver.application_status(order["models"], order["name"])),
    "quota": lambda order, commands: _send("quota", **driver.ask_quota("figures")),
    "defrag": lambda order, commands: _send("defrag", plan=driver.ask_quota("defrag", order["begin"])),
    "shutdown": lambda order, commands: driver.shut_down(),
    "release": lambda order, commands: _send("released", nodes=driver.release_others()),
}


def main() -> int:
    commands = _commands()
    order = commands.get()
    try:
        driver.connect(order["environment"])
        ORDERS[order["do"]](order, commands)
    except Exception as error:  # noqa: BLE001 - the boundary of the process: any error goes to the owner
        reason = error.message if isinstance(error, ServeAppError) else f"{type(error).__name__}: {error}"
        _send("error", message=reason)
        return 1
    return 0


_output = sys.stdout

if __name__ == "__main__":
    # output of Ray or an application goes to the log, not between the events
    _output = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    sys.exit(main())
