"""`serve-app deploy` and `serve-app export`: send the configuration to a running cluster, or print Serve's form of it.

Invariant: an invalid configuration is refused before any change; models that a change does not name continue
undisturbed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from autoscaling.operations import FAILED
from serve_app.cli import keys
from serve_app.cli.layout import say
from serve_app.cli.progress import Progress, replica_states
from serve_app.cluster.local import InstanceState, RemoteDriver
from serve_app.errors import ConfigError, Unavailable
from serve_app.names import MARK
from serve_app.settings import DEFAULT_KEY_FILE, ProxyLocation, Settings, application, with_variables
from serve_app.system import TLS_VARIABLES, Tls, marked

TICK_S = 0.25
# At Serve's default, 127.0.0.1, HAProxy reaches no router on another machine, and clients reach no router at all.
ON_A_CLUSTER: dict[str, Any] = {"http_options": {"host": "0.0.0.0"}, "proxy_location": "EveryNode"}


@dataclass(frozen=True, slots=True)
class Target:
    """A running Ray cluster: the environment of a driver, and the instance if the cluster is one of this machine."""

    environment: dict[str, str]
    state: InstanceState | None


def find(address: str | None, state: InstanceState) -> Target:
    """The cluster at `address` (or in RAY_ADDRESS), else the local instance.

    Raises:
        Unavailable: no instance of this name runs.
    """
    address = address or os.environ.get("RAY_ADDRESS")
    if address is None:
        instance = state.read()
        environment = None if instance is None else state.driver_environment(instance)
        if instance is None or environment is None or not marked(instance.mark):
            raise Unavailable(
                f"{state.name}: nothing runs; start it with `serve-app up`, or name a cluster with --address",
                code="not_running",
            )
        return Target(environment, state)
    # the mark, if a node's supervisor deploys: processes that it starts must end with the node
    passed_on = {name: value for name, value in os.environ.items() if name.startswith("RAY_AUTH_") or name == MARK}
    return Target({"RAY_ADDRESS": address, **passed_on}, None)


def deploy(
    settings: Settings, target: Target, *, wait: bool, roll_back: bool, timeout_s: float, console: Console
) -> int:
    """Declare the application there. Returns the exit status: 1 when it did not come up, with the reason shown.

    Args:
        roll_back: declare the previous configuration again if a deployment of this one fails while it is waited for.

    Raises:
        ConfigError: `http.tls` is not what runs there.
        Unavailable: the cluster cannot be reached, or Serve cannot build the application (then nothing has changed);
            or the application does not run in time.
    """
    instance = target.state.read() if target.state is not None else None
    require_same_tls(settings, None if instance is None else instance.certificate)
    resolved = keys.resolve(settings, target.state or DEFAULT_KEY_FILE)
    order: dict[str, Any] = {
        "do": "declare",
        "environment": target.environment,
        "application": application(resolved.settings),
        "serve": ON_A_CLUSTER if instance is None else instance.serve_options(),
        "wait": wait,
        "roll_back": roll_back,
        "models": [model.name for model in settings.models],
    }

    undo = contextlib.ExitStack()

    def declared() -> None:
        """Record the declared application for `status` and `chat`; from now on it runs or is being started."""
        if instance is not None and target.state is not None:
            file = str(resolved.file) if resolved.file else None
            target.state.write(dataclasses.replace(instance, models=tuple(order["models"]), api_key_file=file))
            undo.callback(target.state.write, instance)
            undo.callback(keys.keep(resolved))

    with Progress(console) as progress:
        progress.begin("Declaring the application")
        status = _follow(order, timeout_s, progress, declared)
    if resolved.generated:
        say(console, f"API key in {resolved.file}")
    if status is not None and status.get("rolled_back"):
        status["message"] += "; the previous declaration is declared again"
        undo.close()
    if status is not None:
        line = f"{status['state']}  {replica_states(status)}  {status['message']}".rstrip()
        say(console, line)
        left = {name: state for name, state in status["unready"].items() if name not in status["waits"]}
        more = {name: count for name, count in status["more"].items() if name in left}
        others = {name: state for name, state in left.items() if name not in more}
        for why, found in (("not ready before, not changed and", others), ("replicas that only load wants are", more)):
            if found:
                names = ", ".join(f"{name} ({state})" for name, state in found.items())
                say(console, f"{why} not waited for: {names}")
    return 0 if not wait or (status is not None and not status["waits"]) else 1


def require_same_tls(settings: Settings, certificate: str | None) -> None:
    """The endpoint's port cannot change between HTTP and TLS, and nobody may believe that it did.

    Args:
        certificate: of the endpoint that runs; None: it has none, or is a cluster's.

    Raises:
        ConfigError: `http.tls` names another certificate.
    """
    tls = settings.http.tls
    if tls is not None and str(Tls.at(tls.certificate, tls.key).certificate) != certificate:
        raise ConfigError(
            "http.tls: is read when an instance starts (serve-app up), and a new certificate goes into the same files; "
            f"on a cluster {' and '.join(TLS_VARIABLES)} name the files of each machine",
            param="http.tls",
        )


def _follow(
    order: dict[str, Any], timeout_s: float, progress: Progress, declared: Callable[[], None]
) -> dict[str, Any] | None:
    """Let a driver execute the order; returns the last state it reported, None without `wait`."""
    status: dict[str, Any] | None = None
    is_declared = False
    deadline = time.monotonic() + timeout_s
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "driver.log"
        with contextlib.closing(RemoteDriver(order, log)) as driver:
            while time.monotonic() < deadline:
                event = driver.event(TICK_S)
                if event is None:
                    continue
                if event["event"] == "error":
                    raise Unavailable(event["message"], code="deploy_failed")
                if event["event"] == "end":
                    if is_declared and (not order["wait"] or (status is not None and _is_final(status))):
                        return status
                    output = log.read_text(errors="replace").strip().splitlines() or ["without a word"]
                    raise Unavailable(f"the process that deploys it has ended: {output[-1]}", code="deploy_failed")
                if event["event"] == "phase":
                    is_declared = True
                    declared()
                    progress.begin("Waiting until it runs" if order["wait"] else "Declared")
                else:
                    status = event
                    progress.detail(replica_states(status))
            left = "does not run" if is_declared else "is not declared"
            raise Unavailable(f"it {left} after {timeout_s:.0f} s; `serve-app status` says more", code="deploy_failed")


def _is_final(status: Mapping[str, Any]) -> bool:
    """Whether the driver reports nothing more."""
    return not status["waits"] or FAILED in status["waits"].values()


def export(settings: Settings, *, host: str | None, port: int | None, proxy_location: ProxyLocation) -> str:
    """Serve's form of the configuration as YAML, for `serve deploy` and Serve's REST interface.

    Raises:
        ConfigError: no key is configured; clients of the cluster would not know a key generated here. Or `http.tls` is.
    """
    if not settings.auth.keys:
        raise ConfigError(
            "auth.keys: give at least one key (or its digest): an exported configuration makes none", param="auth.keys"
        )
    require_same_tls(settings, None)
    entry = with_variables(application(settings.without_secrets()), settings)
    config: dict[str, Any] = {"applications": [entry], "proxy_location": proxy_location}
    http = {name: value for name, value in (("host", host), ("port", port)) if value is not None}
    if http:  # what is not given is left as the running Serve has it, or to Serve's defaults
        config["http_options"] = http
    return yaml.safe_dump(config, sort_keys=False)
