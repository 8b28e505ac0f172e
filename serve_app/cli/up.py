"""`serve-app up`: starts an instance, keeps it in the foreground, stops it.

The process that deploys and watches the application (the driver) is started again when it ends, and finds what runs;
with `--restart` everything is started again when the cluster ends.

Invariant: no process of the instance is left when it returns: after Ctrl-C in any phase, an application that does not
start, or a cluster that dies.
"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests
from rich.console import Console
from rich.live import Live
from rich.text import Text

from serve_app.cli import keys
from serve_app.cli.command_line import EXIT_FAILED, EXIT_INTERRUPTED
from serve_app.cli.endpoint import Endpoint, session
from serve_app.cli.layout import say
from serve_app.cli.progress import Progress, replica_states
from serve_app.cluster.local import LOOPBACK, InstanceState, LocalCluster, RemoteDriver, clean_up, require_free
from serve_app.errors import ServeAppError, Unavailable
from serve_app.names import LOG_FORMAT
from serve_app.settings import Settings, application
from serve_app.system import Tls

DEFAULT_PORT = 8000
LAST_LINE = "Ctrl-C ends everything."  # of what is printed once it serves; `--detach` waits for it
TICK_S = 0.25  # the period of checks of the progress and of the driver
READY_S = 120.0  # from Serve's "running" to the first 200 of /ready: HAProxy reloads within seconds
READY_REQUEST_S = 5.0
SHUTDOWN_S = 25.0  # for Serve's end; above the driver's own bound
# Before a driver that has ended is started again, and twice as long each time: its start costs 2 s of a core.
DRIVER_RETRY_S = 1.0
MAX_DRIVER_RETRY_S = 30.0
STEADY_S = 60.0  # who has run for so long has come back: the waits begin anew
RESTARTS = 5  # of `--restart`, one after the other without such a time between them
RESTART_S = 10.0  # before the first, and twice as long each time; as in deploy/serve-app.service


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Within the context each SIGINT, SIGTERM or SIGHUP raises KeyboardInterrupt, also repeatedly. Main thread only."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, signal.default_int_handler) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass(frozen=True, slots=True)
class UpOptions:
    """Options of `up`."""

    settings: Settings
    instance: str
    port: int = DEFAULT_PORT
    host: str = LOOPBACK
    state_dir: str | None = None
    num_cpus: int | None = None
    dashboard: bool = False
    restart: bool = False


def up(options: UpOptions, console: Console) -> int:
    """Run until interrupted.

    Returns the exit status: 0 after Ctrl-C while serving, 1 for a failure, 130 for an interrupted start or a forced
    end.

    Raises:
        ServeAppError: nothing was started: wrong settings, port taken, instance running.
    """
    with interruptible():
        attempt = _Attempt(options, console)
        code = _run(attempt, console)
        restarts = 0
        served_s = attempt.served_s
        while code == EXIT_FAILED and options.restart and (restarts or attempt.serving):
            restarts = 1 if served_s >= STEADY_S else restarts + 1
            if restarts > RESTARTS:
                break
            wait_s = RESTART_S * 2.0 ** (restarts - 1)
            served_s = 0.0
            console.print(f"Everything is started again in {wait_s:g} s ({restarts} of {RESTARTS}).")
            try:
                time.sleep(wait_s)
                attempt = _Attempt(options, console)
            except KeyboardInterrupt:
                return EXIT_INTERRUPTED
            except ServeAppError as error:
                console.print(Text(f"error: {error.message}", "red"), soft_wrap=True)
            else:
                code = _run(attempt, console)
                served_s = attempt.served_s
        return code


def _run(attempt: _Attempt, console: Console) -> int:
    """One run from its start to its end; the exit status. An error that nobody expects is raised after the end."""
    try:
        code = attempt.run()
    except KeyboardInterrupt:
        code = 0 if attempt.serving else EXIT_INTERRUPTED
    finally:
        is_forced = _end(attempt, console)
    return EXIT_INTERRUPTED if is_forced else code


def _end(attempt: _Attempt, console: Console) -> bool:
    """End all processes in order, and kill them if that is interrupted or fails; returns whether it was interrupted."""
    try:
        attempt.take_down()
    except BaseException as error:
        console.print("Killing what is left.")
        attempt.kill()
        if not isinstance(error, KeyboardInterrupt):
            raise
        return True
    return False


class _Attempt:
    """One run of `up`. `served_s`: how long it had served when it failed."""

    def __init__(self, options: UpOptions, console: Console) -> None:
        self.serving = False
        self.served_s = self._serving_since = 0.0
        self._options = options
        self._console = console
        self._state = InstanceState(options.instance, options.state_dir)
        self._progress = Progress(console)
        self._cluster: LocalCluster | None = None
        self._driver: RemoteDriver | None = None  # None while it is to be started again, too
        self._driver_began = self._driver_due = 0.0
        self._driver_retry_s = DRIVER_RETRY_S
        self._deployed = False
        self._state.require_unowned()
        # else its own leftovers may hold the port: they are ended before the port is checked
        if self._state.read() is None:
            require_free(options.host, options.port)
        self._state.create()
        self._keys = keys.resolve(options.settings, self._state)

    def run(self) -> int:
        """Start, announce, watch; returns only with a failure's exit status."""
        try:
            with self._progress:
                cluster = self._start_cluster()
                self._start_application(cluster)
                self._wait_ready(cluster)
            self.serving = True
            self._serving_since = time.monotonic()
            self._announce(cluster)
            self._watch()
        except ServeAppError as error:
            if self.serving:
                self.served_s = time.monotonic() - self._serving_since
            message = with_kept_logs(error.message, self._state)
            self._console.print(Text(f"error: {message}", "red"), soft_wrap=True)
        return 1

    def take_down(self) -> None:
        """End all processes in order, with progress."""
        if self._cluster is None:
            # a failed start cleans up, unless a second Ctrl-C interrupts it; then it has released the lock
            if not self._state.owned_elsewhere():
                self.kill()
            return
        with self._progress as progress:
            if self._driver is None and self._deployed and self._cluster.alive:
                try:
                    self._driver = self._new_driver(self._cluster.watch_order())
                except Unavailable as error:
                    say(self._console, f"The application is not ended in order: {error.message}")
            if self._driver is not None and self._deployed:
                progress.begin("Ending the application (Ctrl-C again to force)")
                self._driver.send({"do": "shutdown"})
                self._driver.wait(SHUTDOWN_S)
            progress.begin("Ending Ray")
            if self._driver is not None:
                self._driver.close()
            self._cluster.stop()
        self._console.print(
            f"Everything of {self._options.instance!r} has ended. Logs: {self._state.logs}", soft_wrap=True
        )

    def kill(self) -> None:
        """Kill all processes now."""
        clean_up(self._state, grace_s=0.0)

    def _start_cluster(self) -> LocalCluster:
        options = self._options
        tls = options.settings.http.tls
        logs = options.settings.logs
        self._progress.begin("Starting a Ray of its own")
        self._cluster = LocalCluster.start(
            options.instance,
            options.port,
            host=options.host,
            num_cpus=options.num_cpus,
            dashboard=options.dashboard,
            state_dir=options.state_dir,
            models=[model.name for model in options.settings.models],
            supervised=True,
            api_key_file=str(self._keys.file) if self._keys.file else None,
            tls=None if tls is None else Tls.at(tls.certificate, tls.key),
            extra_environment={LOG_FORMAT: logs.format} if logs.format != "text" else None,
        )
        keys.keep(self._keys)
        return self._cluster

    def _start_application(self, cluster: LocalCluster) -> None:
        """Deploy, and wait until Serve reports the whole application as running."""
        self._progress.begin("Deploying the application")
        order = cluster.serve_order(application(self._keys.settings))
        self._driver = self._new_driver(order)
        loading = opening = False
        while True:
            status = self._next_status()
            if status is None:
                continue
            if not loading:
                loading = True
                self._progress.begin("Loading " + ", ".join(cluster.instance.models))
            if not opening and status["models"] and all(model["state"] == "healthy" for model in status["models"]):
                opening = True
                self._progress.begin("Opening the endpoint")
            if status["state"] == "failed":
                raise Unavailable(f"the application did not start: {status['message']}", code="application_failed")
            if status["state"] == "running":
                return
            self._progress.detail(state_line(status, with_state=False))

    def _wait_ready(self, cluster: LocalCluster) -> None:
        """Wait until the endpoint answers through HAProxy."""
        endpoint = Endpoint(cluster.url, self._keys.key, cluster.instance.certificate)
        # without a key, a 401 is enough: only a running router asks for a key
        wanted = {"200"} if self._keys.key else {"200", "401"}
        deadline = time.monotonic() + READY_S
        answer = "nothing"
        while time.monotonic() < deadline:
            try:
                with session(endpoint) as http:
                    answer = str(http.get(f"{endpoint.url}/ready", timeout=READY_REQUEST_S).status_code)
            except requests.RequestException as error:
                answer = type(error).__name__
            if answer in wanted:
                return
            self._progress.detail(f"/ready answers {answer}")
            self._next_status()
        raise Unavailable(f"/ready still answers {answer} after {READY_S:.0f} s", code="application_failed")

    def _next_status(self) -> dict[str, Any] | None:
        """The next state of the application, or None if there is no new one yet.

        Raises:
            Unavailable: the cluster has ended, or the driver before it had deployed the application.
        """
        assert self._cluster is not None
        if self._driver is None:
            time.sleep(TICK_S)
            event = None
        else:
            event = self._driver.event(TICK_S)
        if not self._cluster.alive:
            raise Unavailable("the local cluster ended unexpectedly", code="cluster_failed")
        if self._driver is None and time.monotonic() >= self._driver_due:
            try:
                self._driver = self._new_driver(self._cluster.watch_order())
            except Unavailable as error:
                self._plan_driver(error.message)
        if event is None or event["event"] == "phase":
            return None
        if self._deployed and (event["event"] == "end" or (event["event"] == "error" and self.serving)):
            why = f" ({event['message']})" if event.get("message") else ""
            self._plan_driver(f"The process that watches the application has ended{why}")
            return None
        if event["event"] == "error":
            raise Unavailable(event["message"], code="application_failed")
        if event["event"] == "end":
            raise Unavailable("the process that deploys the application ended unexpectedly", code="cluster_failed")
        self._deployed = True
        status = {key: value for key, value in event.items() if key != "event"}
        self._state.write_status(status)
        return status

    def _new_driver(self, order: Mapping[str, Any]) -> RemoteDriver:
        """Raises Unavailable: the machine has no memory, process or file left for it."""
        assert self._cluster is not None
        self._driver_began = time.monotonic()
        try:
            return RemoteDriver(order, log=Path(self._cluster.instance.run_dir) / "driver.log")
        except (OSError, RuntimeError) as error:  # of its process, or of the thread that reads what that says
            activity = "deploys" if "serve" in order else "watches"
            message = f"the process that {activity} the application cannot be started ({error})"
            raise Unavailable(message, code="cluster_failed") from error

    def _plan_driver(self, message: str) -> None:
        """There is no driver, for this reason, and what it deployed runs on: another one is to follow that."""
        if self._driver is not None:
            self._driver.close()
        self._driver = None
        now = time.monotonic()
        if now - self._driver_began >= STEADY_S:
            self._driver_retry_s = DRIVER_RETRY_S
        self._driver_due = now + self._driver_retry_s
        say(self._console, f"{message[:1].upper()}{message[1:]}. Another starts in {self._driver_retry_s:g} s.")
        self._driver_retry_s = min(2.0 * self._driver_retry_s, MAX_DRIVER_RETRY_S)

    def _announce(self, cluster: LocalCluster) -> None:
        keys = self._keys
        is_shown = keys.generated and self._console.is_terminal  # elsewhere it would stay in a log
        if keys.key is None:
            key = "as configured (only digests are known here)"
        elif is_shown:
            key = f"{keys.key}  (kept in {keys.file})"
        else:
            key = f"in {keys.file}" + ("" if keys.generated else "  (from the configuration)")
        lines = [
            f"Serving {', '.join(cluster.instance.models)} at {cluster.url}",
            f"API key   {key}",
            f"Try       {curl_line(cluster.url, keys.key if is_shown else keys.file, self._options.settings)}",
        ]
        if cluster.instance.dashboard_url:
            lines.append(f"Dashboard {cluster.instance.dashboard_url}  (token in {self._state.token_file})")
        for line in [*lines, LAST_LINE]:
            say(self._console, line)

    def _watch(self) -> None:
        """Show the state until an exception ends it."""
        began = time.monotonic()
        shown = ""
        with contextlib.ExitStack() as stack:
            live = None
            if self._console.is_terminal:
                live = stack.enter_context(Live(console=self._console, auto_refresh=False, transient=True))
            while True:
                status = self._next_status()
                if status is None:
                    continue
                line = state_line(status)
                if live is not None:
                    live.update(Text(f"{line}  up {duration(time.monotonic() - began)}", "dim"), refresh=True)
                elif line != shown:
                    say(self._console, line)
                shown = line


def with_kept_logs(message: str, state: InstanceState) -> str:
    """The message with the paths that log files will have once the instance has ended."""
    instance = state.read()
    if instance is None or not instance.run_dir:
        return message
    return re.sub(re.escape(instance.run_dir) + r"/ray/session_[^/]+/logs", str(state.logs / "ray"), message)


def curl_line(url: str, key: str | Path | None, settings: Settings) -> str:
    """A curl command with a request to the first model; it can be pasted into a shell unchanged.

    Args:
        key: itself, or the file with it; None: neither is known.
    """
    model = settings.models[0]
    body: dict[str, Any] | None = None
    if model.task == "embed":
        path = "/v1/embeddings"
        body = {"model": model.name, "input": "Hello"}
    elif model.task == "classify":
        path = "/classify"
        body = {"model": model.name, "input": "Hello"}
    elif model.task == "transcribe":
        path = "/v1/audio/transcriptions"
    else:
        messages = [{"role": "user", "content": "Hello"}]
        path = "/v1/chat/completions"
        body = {"model": model.name, "messages": messages, "max_tokens": 32}
    if isinstance(key, str):
        bearer = shlex.quote(f"Authorization: Bearer {key}")
    else:
        shown = "$API_KEY" if key is None else f"$(cat {shlex.quote(str(key))})"
        bearer = f'"Authorization: Bearer {shown}"'
    if body is None:
        return f"curl {url}{path} -H {bearer} -F model={shlex.quote(model.name)} -F file=@speech.wav"
    return f"curl {url}{path} -H {bearer} -H 'Content-Type: application/json' -d {shlex.quote(json.dumps(body))}"


def state_line(status: Mapping[str, Any], *, with_state: bool = True) -> str:
    parts = [status["state"] if with_state else "", replica_states(status), status["message"]]
    return "  ".join(part for part in parts if part)


def duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{rest:02}s"
