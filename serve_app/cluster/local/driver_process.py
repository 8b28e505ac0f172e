"""A driver of an instance's Serve in a process of its own, which `serve_app.cluster.local.remote_driver` starts and
ends.

It reads one JSON object a line, first its order and then commands, and answers with one JSON object a line:
`{"event": "status", ...}` as long as it lives, `{"event": "error", "message": ...}` before it ends because of an error.
It ends with its input.
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
from serve_app.cluster.local.status import built, describe
from serve_app.errors import ServeAppError, Unavailable

STARTING_PERIOD_S = 0.5  # how often the state is looked at while the application starts
RUNNING_PERIOD_S = 5.0  # and then: a look costs the controller some milliseconds of CPU


def _say(event: str, **fields: Any) -> None:
    print(json.dumps({"event": event, **fields}), file=_answers, flush=True)


def _commands() -> queue.SimpleQueue[dict[str, Any]]:
    """The lines of our input as they come; its end is a shutdown without more ado."""
    commands: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            commands.put(json.loads(line))
        commands.put({"do": "leave"})

    threading.Thread(target=read, daemon=True, name="commands").start()
    return commands


def _told(commands: queue.SimpleQueue[dict[str, Any]], timeout_s: float) -> dict[str, Any] | None:
    """The next command; None: none in time."""
    try:
        return commands.get(timeout=timeout_s)
    except queue.Empty:
        return None


def _serve(order: Mapping[str, Any], commands: queue.SimpleQueue[dict[str, Any]]) -> None:
    """Declare the application of `order`, then report its state until told otherwise."""
    _say("phase", phase="application")
    driver.declare(order["application"], **order["serve"])
    while True:
        status = driver.look(order["models"], order["name"])
        _say("status", **status)
        command = _told(commands, RUNNING_PERIOD_S if status["state"] == "running" else STARTING_PERIOD_S)
        if command is not None:
            if command["do"] == "shutdown":
                driver.shut_down()
            return


def _declare(order: Mapping[str, Any], commands: queue.SimpleQueue[dict[str, Any]]) -> None:
    """Change a running application; report its state until it runs or has failed, or until told otherwise.

    Raises:
        Unavailable: Serve cannot make deployments from it. Those that run go on, but Serve would neither show nor scale
            them from then on: so what was declared before is declared again.
    """
    entry = order["application"]
    name = entry["name"]
    before = driver.declare(entry, **order["serve"])
    while (made := built(driver.details(), name)) is None:
        if _told(commands, STARTING_PERIOD_S) is not None:
            return
    if not made:
        why = describe(driver.details(), order["models"], name)["message"]
        if before is not None:
            driver.declare(before, **order["serve"])
            why += "; what was declared before is declared again"
        raise Unavailable(f"Serve cannot build the application: {why}", code="deploy_failed")
    _say("phase", phase="declared")
    while order["wait"]:
        status = driver.look(order["models"], name)
        _say("status", **status)
        if status["state"] in ("running", "failed") or _told(commands, STARTING_PERIOD_S) is not None:
            return


ORDERS: dict[str, Callable[[Mapping[str, Any], queue.SimpleQueue[dict[str, Any]]], None]] = {
    "serve": _serve,
    "declare": _declare,
    "status": lambda order, commands: _say("status", **driver.look(order["models"], order["name"])),
    "quota": lambda order, commands: _say("quota", **driver.asked_of_quota("figures")),
    "defrag": lambda order, commands: _say("defrag", plan=driver.asked_of_quota("defrag", order["begin"])),
    "shutdown": lambda order, commands: driver.shut_down(),
    "release": lambda order, commands: _say("released", nodes=driver.release_others()),
}


def main() -> int:
    commands = _commands()
    order = commands.get()
    try:
        driver.connect(order["environment"])
        ORDERS[order["do"]](order, commands)
    except ServeAppError as error:
        _say("error", message=error.message)
        return 1
    except Exception as error:  # noqa: BLE001 - the border of the process: whatever it is goes to the owner
        _say("error", message=f"{type(error).__name__}: {error}")
        return 1
    return 0


_answers = sys.stdout

if __name__ == "__main__":
    # whatever Ray or an application prints goes to the log, not between our answers
    _answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    sys.exit(main())
