"""A child process that looks at the application by Serve's controller again and again, so that its owner stays free of
Ray.

It reads one JSON object (with `environment`, of the cluster) and prints one a look, until its input ends. The moment
`at` is that of the answer, in seconds of this machine's monotonic clock, which is the same in every process.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

from serve_app.cluster.local import RemoteDriver

Look = Callable[[Any, dict[str, Any]], dict[str, Any]]  # of `autoscaling.operations.application` and what was read


class LookingChild:
    """Its owner's end: a context manager. `module`: what runs in the child."""

    def __init__(self, module: str, environment: Mapping[str, str], **more: Any) -> None:
        self._child = RemoteDriver({"environment": dict(environment), **more}, module=module)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._child.close()


def look_until_input_ends(look: Look, period_s: float) -> int:
    """The child's `main`."""
    from autoscaling.operations import application
    from serve_app.cluster.local import driver

    out = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what Ray prints is no look
    order = json.loads(sys.stdin.readline())
    driver.connect(order["environment"])
    ended = threading.Event()

    def until_input_ends() -> None:
        sys.stdin.read()
        ended.set()

    threading.Thread(target=until_input_ends, daemon=True, name="input").start()
    while not ended.wait(period_s):
        seen = look(application, order)
        print(json.dumps({"at": time.monotonic(), **seen}), file=out, flush=True)
    driver.disconnect()
    return 0
