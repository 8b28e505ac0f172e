"""The owner's side of a driver in a child process (`serve_app.cluster.local.driver_process`).

Invariant: the owner never waits for Ray: a thread reads the events, and the child can be ended at any moment.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from serve_app.cluster.local.node import usable_environment
from serve_app.errors import Unavailable
from serve_app.names import MARK

END_S = 5.0  # a child that was asked to end, or has answered, ends well within this time
SERVE_SHUTDOWN_S = 20.0  # engines need seconds to end; streams running then are cut
DEFAULT_QUESTION_S = 30.0  # importing Ray and connecting takes 2 s, ten times that on a loaded machine
SHUTDOWN_QUESTION_S = SERVE_SHUTDOWN_S + DEFAULT_QUESTION_S


class RemoteDriver:
    """The child process; `order`: its task, see `driver_process.ORDERS`. `module`: run instead of `driver_process`."""

    def __init__(
        self, order: Mapping[str, Any], log: Path | None = None, module: str = "serve_app.cluster.local.driver_process"
    ) -> None:
        with (log or Path(os.devnull)).open("ab") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                # the token is sent through the pipe; the mark makes the child one of the instance's processes;
                # only instances of this machine have a mark
                env=usable_environment(os.environ) | {MARK: order["environment"].get(MARK, "")},
                start_new_session=True,
            )
        self._events: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True, name="driver events")
        self._reader.start()
        self.send(order)

    def send(self, command: Mapping[str, Any]) -> None:
        """Send a command; no effect if the child has ended."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError, ValueError):
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()

    def event(self, timeout_s: float) -> dict[str, Any] | None:
        """The next event, None if there is none within `timeout_s`. The last one is `{"event": "end"}`."""
        try:
            return self._events.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def wait(self, timeout_s: float) -> bool:
        """Whether the child ended by itself within `timeout_s`."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def close(self) -> None:
        """End the child."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.terminate()
        if not self.wait(END_S):
            self._process.kill()
            self._process.wait()
        self._reader.join(END_S)  # it reads to the end of the child's output, which has come

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as answers:
            for line in answers:
                self._events.put(json.loads(line))
        self._events.put({"event": "end"})


def answers(order: Mapping[str, Any], timeout_s: float = DEFAULT_QUESTION_S) -> Iterator[dict[str, Any]]:
    """Let a child execute one order; its answers, until it has ended.

    Raises:
        Unavailable: the order failed, or there was nothing new within `timeout_s`.
    """
    with contextlib.closing(RemoteDriver(order)) as remote:
        while (event := remote.event(timeout_s)) is not None:
            kind = event.pop("event")
            if kind == "error":
                raise Unavailable(event["message"], code="cluster_failed")
            if kind == "end":
                return
            yield event
    raise Unavailable(f"no answer from the cluster within {timeout_s:.0f} s", code="cluster_failed")


def ask(order: Mapping[str, Any], timeout_s: float = DEFAULT_QUESTION_S) -> dict[str, Any]:
    """The last one of the `answers`, an empty one for an order without any. Raises Unavailable: as `answers`."""
    answer: dict[str, Any] = {}
    for found in answers(order, timeout_s):
        answer = found
    return answer
