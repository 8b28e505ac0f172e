"""What Serve's controller says of an application, ten times a second, and what happened when: a child process does the
looking (`python -m benchmarks.watch`), so that its owner stays free of Ray.

The child reads one JSON object (environment, models, application) and prints one a look, until its input ends. A look's
moment is that of the answer, in seconds of this machine's monotonic clock, which is the same in every process.

Invariant: a moment found here is late by no more than a look's period and duration, never early.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType

PERIOD_S = 0.1  # a look costs the controller about 2 ms
END_S = 10.0  # the child ends with its input; disconnecting from Ray takes about a second


@dataclass(frozen=True, slots=True)
class Look:
    """One model at one moment. `replicas` by id: Serve's state, and whether its process is there (has a node)."""

    at: float
    target: int
    replicas: Mapping[str, tuple[str, bool]]
    ongoing: int | None
    waiting: int | None
    why: str

    @property
    def running(self) -> frozenset[str]:
        return frozenset(name for name, (state, _) in self.replicas.items() if state == "RUNNING")

    @property
    def placed(self) -> frozenset[str]:
        return frozenset(name for name, (_, placed) in self.replicas.items() if placed)


def read(line: str) -> dict[str, Look]:
    """A line of the child's, by model."""
    told = json.loads(line)
    return {
        model["name"]: Look(
            at=told["at"],
            target=model["target"],
            replicas={one["id"]: (one["state"], bool(one["node"])) for one in model["replicas"]},
            ongoing=model["ongoing"],
            waiting=model["waiting"],
            why=model["why"],
        )
        for model in told["models"]
    }


def first(looks: Sequence[Look], since: float, condition: Callable[[Look], bool]) -> Look | None:
    """The first look from `since` on for which the condition holds."""
    return next((look for look in looks if look.at >= since and condition(look)), None)


class Watch:
    """The looks at an application since the start. Use as a context manager."""

    def __init__(self, environment: Mapping[str, str], models: Sequence[str], application: str) -> None:
        order = {"environment": dict(environment), "models": list(models), "application": application}
        self._looks: dict[str, list[Look]] = {model: [] for model in models}
        self._news = threading.Condition()
        self._over = False
        self._child = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.watch"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps(order) + "\n")
        self._child.stdin.flush()
        self._reader = threading.Thread(target=self._read, daemon=True, name="watch")
        self._reader.start()

    def __enter__(self) -> Watch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._child.stdin is not None
        self._child.stdin.close()
        try:
            self._child.wait(END_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        self._reader.join(END_S)

    def looks(self, model: str) -> list[Look]:
        """All looks at a model, oldest first."""
        with self._news:
            return list(self._looks[model])

    def until(self, model: str, condition: Callable[[Look], bool], bound_s: float, since: float | None = None) -> Look:
        """Wait for a look after `since` (default: now) for which the condition holds; returns the first.

        Raises:
            TimeoutError: none within `bound_s`, with the last look.
        """
        since = time.monotonic() if since is None else since
        deadline = time.monotonic() + bound_s
        checked = 0
        with self._news:
            while True:
                looks = self._looks[model]
                found = first(looks[checked:], since, condition)
                if found is not None:
                    return found
                checked = len(looks)
                left_s = deadline - time.monotonic()
                if left_s <= 0 or self._over:
                    raise TimeoutError(f"{model}: not within {bound_s:g} s; last seen: {looks[-1] if looks else None}")
                self._news.wait(left_s)

    def _read(self) -> None:
        assert self._child.stdout is not None
        with self._child.stdout as lines:
            for line in lines:
                with self._news:
                    for model, look in read(line).items():
                        self._looks.setdefault(model, []).append(look)
                    self._news.notify_all()
        with self._news:
            self._over = True
            self._news.notify_all()


def main() -> int:
    from serve_app.local import driver

    out = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what Ray prints is no look
    order = json.loads(sys.stdin.readline())
    driver.connect(order["environment"])
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True, name="input").start()
    while not ended.wait(PERIOD_S):
        seen = driver.look(order["models"], order["application"])
        print(json.dumps({"at": time.monotonic(), "models": seen["models"]}), file=out, flush=True)
    driver.disconnect()
    return 0


if __name__ == "__main__":
    sys.exit(main())
