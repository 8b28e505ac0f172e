"""What is done to an instance's Serve: connect, deploy, look, shut down. The one module here that imports Ray.

Used in two ways: by a program in its own process (`LocalCluster.run`), and as a child process of the command line
(`python -m serve_app.local.driver`), so that Ray can neither block nor end the process that owns the instance.

The child reads one JSON object a line and answers with one JSON object a line: `{"event": "status", ...}` as long as it
lives, `{"event": "error", "message": ...}` before it ends because of an error. It ends with its input.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import queue
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from serve_app.local.processes import MARK
from serve_app.local.view import describe

STARTING_PERIOD_S = 0.5  # how often the state is looked at while the application starts
RUNNING_PERIOD_S = 5.0  # and then: a look costs the controller some milliseconds of CPU
SERVE_SHUTDOWN_S = 20.0  # engines need seconds to end; streams still running then are cut
NO_DETAILS: dict[str, Any] = {"applications": {}, "proxies": {}}
NAMESPACE = "serve_app"
FORBIDDEN = {
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "1",
}  # and the harmless value

Application = Any  # ray.serve.Application


def connect(environment: Mapping[str, str]) -> dict[str, str | None]:
    """Connect this process as a driver; `environment` is `LocalCluster.environment()`.

    Returns what these variables were before, for `restore`.

    Raises:
        RuntimeError: this process is connected to another cluster, or has a variable set that a driver must not have.
    """
    for name, wanted in FORBIDDEN.items():
        if os.environ.get(name, wanted) != wanted:
            raise RuntimeError(
                f"{name}={os.environ[name]}: synchronous handle calls would fail in this process; unset it"
            )
    address = environment["RAY_ADDRESS"]
    # without the mark: what this process starts is not to end with the cluster
    ours = {name: value for name, value in environment.items() if name not in ("RAY_ADDRESS", MARK)}
    import ray

    if ray.is_initialized():
        if ray.get_runtime_context().gcs_address == address:
            return {}
        raise RuntimeError("this process is connected to another Ray cluster; call ray.shutdown() first")
    before = {name: os.environ.get(name) for name in ours}
    os.environ.update(ours)
    _read_environment_again()
    try:
        ray.init(address=address, namespace=NAMESPACE, logging_level=logging.ERROR, log_to_driver=False)
    except BaseException:
        restore(before)
        raise
    return before


def restore(before: Mapping[str, str | None]) -> None:
    """Put the environment back as it was before `connect`."""
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    _read_environment_again()


def _read_environment_again() -> None:
    """Ray reads these variables when it is imported, which may be long past, and the token once."""
    from ray._private import ray_constants
    from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

    ray_constants.ENABLE_RAY_CLUSTER = os.environ.get(ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR) != "0"
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


def start_serve(host: str, port: int) -> None:
    """Start Serve with its endpoint at host:port; router replicas bind the same host."""
    from ray import serve

    serve.start(http_options={"host": host, "port": port}, proxy_location="HeadOnly")


def deploy(application: Application, name: str, *, wait: bool) -> Any:
    """Deploy; with `wait` until it runs. Returns the handle of its ingress.

    Raises:
        RuntimeError: with `wait`: the application could not be started; the message holds the replica's error.
    """
    from ray import serve

    target = serve.RunTarget(application, name=name, route_prefix="/")
    return serve.run_many([target], wait_for_ingress_deployment_creation=wait, wait_for_applications_running=wait)[0]


def look(models: Sequence[str], name: str) -> dict[str, Any]:
    """The application as `serve_app.local.view.describe` puts it; private in Serve, and the only call that has replica
    ids and nodes without Ray's dashboard."""
    from ray.serve.context import _get_global_client
    from ray.serve.exceptions import RayServeException

    try:
        client: Any = _get_global_client()
    except RayServeException:
        return describe(NO_DETAILS, models, name)  # Serve was never started
    return describe(client.get_serve_details(), models, name)


def shut_down(timeout_s: float = SERVE_SHUTDOWN_S) -> None:
    """End Serve and its replicas, bounded, and disconnect."""
    from ray.serve.context import _get_global_client
    from ray.serve.exceptions import RayServeException

    try:
        client: Any = _get_global_client()
        client.shutdown(timeout_s=timeout_s)  # serve.shutdown() is the same with 30 s
    except RayServeException:
        return  # Serve was never started
    finally:
        disconnect()


def disconnect() -> None:
    """Leave a cluster that is gone, without asking it anything."""
    import ray
    from ray.serve.context import _disconnect

    _disconnect()  # type: ignore[no-untyped-call]
    ray.shutdown()


def load_application(import_path: str, arguments: Mapping[str, Any]) -> Application:
    """`module:function` called with the arguments."""
    module, _, function = import_path.partition(":")
    return getattr(importlib.import_module(module), function)(dict(arguments))


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


def _serve(order: Mapping[str, Any], commands: queue.SimpleQueue[dict[str, Any]]) -> None:
    """Deploy the application of `order`, then report its state until told otherwise."""
    _say("phase", phase="application")
    start_serve(order["host"], order["port"])
    deploy(load_application(order["import_path"], order["arguments"]), order["name"], wait=False)
    while True:
        status = look(order["models"], order["name"])
        _say("status", **status)
        try:
            command = commands.get(timeout=RUNNING_PERIOD_S if status["state"] == "running" else STARTING_PERIOD_S)
        except queue.Empty:
            continue
        if command["do"] == "shutdown":
            shut_down()
        return


ORDERS: dict[str, Callable[[Mapping[str, Any], queue.SimpleQueue[dict[str, Any]]], None]] = {
    "serve": _serve,
    "status": lambda order, commands: _say("status", **look(order["models"], order["name"])),
    "shutdown": lambda order, commands: shut_down(),
}


def main() -> int:
    commands = _commands()
    order = commands.get()
    try:
        connect(order["environment"])
        ORDERS[order["do"]](order, commands)
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
