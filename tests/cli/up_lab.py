"""Stand-ins for the driver of `serve-app up` and for its terminal; signals and processes are real."""

from __future__ import annotations

import io
import os
import signal
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.common.arms import free_port
from serve_app.cli.up import UpOptions, up
from serve_app.cluster.local import InstanceState
from serve_app.settings import Settings
from tests.waiting import during, wait_until

SEEN_S = 60.0  # for a line to appear, which takes less than a second


def status(state: str, message: str = "", replica: str = "RUNNING") -> dict[str, Any]:
    healthy = "healthy" if replica == "RUNNING" else "updating"
    replicas = [{"id": "r", "state": replica, "node": "n"}]
    model = {
        "name": "tiny",
        "deployment": "engine-tiny",
        "state": healthy,
        "message": "",
        "replicas": replicas,
        "target": 1,
    }
    return {"event": "status", "state": state, "message": message, "models": [model], "routers": replicas}


LOADING = [{"event": "phase", "phase": "application"}, status("starting", replica="STARTING")]


class FakeDriver:
    """Gives the scripted events, and answers /ready in the router's place."""

    events: list[dict[str, Any]] = []
    ready = 200
    end_s = 0.0  # how long the orderly end takes
    made: list[FakeDriver] = []

    def __init__(self, order: dict[str, Any], log: Path | None = None) -> None:
        self.order = order
        self.sent: list[dict[str, Any]] = []
        self._events = list(type(self).events)
        ready = type(self).ready

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(ready if self.path == "/ready" else 404)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                """Nothing into the test's output."""

        # one that follows another answers nobody: by then the endpoint was seen to answer
        port = order["serve"]["http_options"]["port"] if "serve" in order else 0
        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        self.made.append(self)

    def die(self, *last: dict[str, Any]) -> None:
        self._events += [*last, {"event": "end"}]

    def event(self, timeout_s: float) -> dict[str, Any] | None:
        if self._events:
            return self._events.pop(0)
        time.sleep(0.01)  # bound: far below any caller's `timeout_s`, so that its loop looks at its own deadlines
        return None

    def send(self, command: dict[str, Any]) -> None:
        self.sent.append(command)

    def wait(self, timeout_s: float) -> bool:
        for _ in during(type(self).end_s):
            # in small steps, as `Popen.wait` does: a signal just before a long sleep would wait it out; bound: `end_s`
            time.sleep(0.01)
        return True

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class Terminal:
    """Runs `up` in this thread, as signals need, and acts on what it prints from another one."""

    def __init__(self, folder: Path) -> None:
        self.is_real = False  # whether what prints takes it for a terminal
        self.state = InstanceState("one", folder)
        self.mark = ""
        self._text = io.StringIO()

    @property
    def text(self) -> str:
        return self._text.getvalue()

    def run(self, settings: Settings, *acts: tuple[str, Callable[[], None]], restart: bool = False) -> int:
        """`acts`: each action is taken once its text has been printed, one after the other."""
        folder = str(self.state.folder.parent)
        with_port = UpOptions(settings, "one", free_port(), state_dir=folder, restart=restart)
        actor = threading.Thread(target=self._act, args=(acts,))
        actor.start()
        try:
            return up(with_port, Console(file=self._text, width=200, force_terminal=self.is_real, color_system=None))
        finally:
            actor.join()

    def _act(self, acts: tuple[tuple[str, Callable[[], None]], ...]) -> None:
        for text, action in acts:
            try:
                self.wait_for(text)
            finally:  # else `up` would never end
                instance = self.state.read()
                self.mark = instance.mark if instance else self.mark
                action()

    def wait_for(self, text: str, times: int = 1) -> None:
        """Until this was printed so often."""
        prints = lambda: self.text.count(text) >= times  # noqa: E731
        wait_until(prints, SEEN_S, f"{text!r} is printed", seen=lambda: self.text)


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)
