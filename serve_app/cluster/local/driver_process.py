"""A driver of an instance's Serve in a process of its own, which `serve_app.cluster.local.remote_driver` starts and
ends.

It reads one JSON object per line, first its order and then commands, and writes one JSON object per line:
`{"event": "status", ...}` as long as it lives, `{"event": "error", "message": ...}` before it ends because of an error.
It ends at the end of its input.
"""

from __future__ import annotations

import io
import json
import os
import select
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from autoscaling.operations import DrainTarget, application, draining, node_logs, ray_drains, status
from autoscaling.rollout import AuditWriter, Order, carry_out, declaration, declare, exclusive
from serve_app.cluster.local import driver
from serve_app.core.times import STATUS_PERIOD_S
from serve_app.errors import ServeAppError
from serve_app.store import AuditAction
from serve_app.system import LogFilter, set_up_log

STARTING_PERIOD_S = 0.5  # the polling period of the state while the application starts
LOGS_PERIOD_S = 1.0


def _send(event: str, **fields: Any) -> None:
    print(json.dumps({"event": event, **fields}), file=_output, flush=True)


def _next_command(timeout_s: float | None = None) -> dict[str, Any] | None:
    """The next command; None: none within `timeout_s`. The end of the input is a command to leave."""
    if not select.select([_input], [], [], timeout_s)[0]:
        return None
    line = _input.readline()
    return json.loads(line) if line else {"do": "leave"}


def _serve(order: Mapping[str, Any]) -> None:
    """Declare the application of `order`, then report its state until a command arrives."""
    _send("phase", phase="application")
    before = declare(order["application"], **order["serve"])
    _audit.deployed(AuditAction.DEPLOY, status.declared(before), order["application"])
    _watch(order)


def _watch(order: Mapping[str, Any]) -> None:
    """Report the state of the application that runs until a command arrives."""
    while True:
        state = application.application_status(order["models"])
        _send("status", **state)
        command = _next_command(STATUS_PERIOD_S if state["state"] == "running" else STARTING_PERIOD_S)
        if command is not None:
            if command["do"] == "shutdown":
                driver.shut_down()
            return


def _declare(order: Mapping[str, Any]) -> None:
    """Change a running application; report its state, and the deployments in it that are waited for, until each of
    these is ready or one has failed, or until a command arrives: see `carry_out`, which raises.

    Raises:
        DeployConflict: another deployment is under way.
    """
    names = ("serve", "wait", "roll_back")
    change = Order(order["application"], tuple(order["models"]), **{name: order[name] for name in names})
    with exclusive():
        carry_out(change, _audit, _send, lambda seconds: _next_command(seconds) is not None)


def _defrag(order: Mapping[str, Any]) -> None:
    """Plan, and with `begin` begin, to free memory for the first waiting engine."""
    plan = application.ask_quota("defrag", order["begin"])
    unrecorded = ""
    if order["begin"] and plan is not None:
        steps = [step["owner"] for step in plan["steps"]]
        target = plan["waits"]["owner"]
        unrecorded = _audit.changed(AuditAction.DEFRAG, target, declaration(), restarts=steps).result()
    _send("defrag", plan=plan, addresses=application.addresses(), unrecorded=unrecorded)


def _logs(order: Mapping[str, Any]) -> None:
    """The last lines of the logs of every node; with `follow` also new ones, until a command arrives."""
    readers = list(node_logs.log_readers(LogFilter(**order["wanted"])).values())
    last: int | None = order["lines"]
    while True:
        _send(
            "logs",
            parts=[asdict(part) for part in node_logs.answers_of([reader.read.remote(last) for reader in readers])],
        )
        last = None
        if not order["follow"] or _next_command(LOGS_PERIOD_S) is not None:
            return


def _drain(order: Mapping[str, Any]) -> None:
    """Drain what `name` stands for, or the node at `ip`: its engines' progress whenever it changes, and at the end."""
    within_s = order.get("within_s")

    def tell(rows: list[dict[str, Any]]) -> None:
        _send("drains", rows=rows)

    if "ip" in order:
        target = DrainTarget(driver.node_at(order["ip"]), is_node=True)
    else:
        target = application.drain_target(order["name"])
    declared = declaration()
    target_id = target.target_id
    recorded = _audit.changed(AuditAction.DRAIN, target_id, declared, is_node=target.is_node, within_s=within_s)
    rows = draining.follow(ray_drains.RayDrains(), target, within_s, tell)
    _send("drained", target=target_id, rows=rows, unrecorded=recorded.result())


ORDERS: dict[str, Callable[[Mapping[str, Any]], None]] = {
    "serve": _serve,
    "watch": _watch,
    "declare": _declare,
    "status": lambda order: _send("status", **application.application_status(order["models"])),
    "deployed": lambda order: _send("deployed", **driver.deployed()),
    "quota": lambda order: _send("quota", **application.ask_quota("figures"), addresses=application.addresses()),
    "defrag": _defrag,
    "logs": _logs,
    "shutdown": lambda order: driver.shut_down(),
    "drain": _drain,
    "release": lambda order: _send("released", nodes=driver.release_others()),
}


def main() -> int:
    order = _next_command() or {}
    try:
        driver.connect(order["environment"])
        set_up_log("driver")
        ORDERS[order["do"]](order)
    except Exception as error:  # noqa: BLE001 - the boundary of the process: any error goes to the owner
        reason = str(error) if isinstance(error, ServeAppError) else f"{type(error).__name__}: {error}"
        _send("error", message=reason)
        return 1
    return 0


_audit = AuditWriter()
_input = io.FileIO(0, closefd=False)  # standard input; a buffer would hide its lines from `select`
_output = sys.stdout

if __name__ == "__main__":
    # output of Ray or an application goes to the log, not between the events
    _output = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    sys.exit(main())
