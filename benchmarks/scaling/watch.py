"""What Serve's controller says of the application, ten times a second, and what happened when: a child process does the
looking (`python -m benchmarks.scaling.watch`), so that its owner stays free of Ray.

The child reads one JSON object (environment, models) and prints one a look, until its input ends. A look's
moment is that of the answer, in seconds of this machine's monotonic clock, which is the same in every process.

Invariant: a moment found here is late by no more than a look's period and duration, never early.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.common.looks import LookingChild, look_until_input_ends

PERIOD_S = 0.1  # a look costs the controller about 2 ms


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


def read(status: Mapping[str, Any]) -> dict[str, Look]:
    """What the child told, by model."""
    return {
        model["name"]: Look(
            at=status["at"],
            target=model["target"],
            replicas={one["id"]: (one["state"], bool(one["node"])) for one in model["replicas"]},
            ongoing=model["ongoing"],
            waiting=model["waiting"],
            why=model["why"],
        )
        for model in status["models"]
    }


def first(looks: Sequence[Look], since: float, condition: Callable[[Look], bool]) -> Look | None:
    """The first look from `since` on for which the condition holds."""
    return next((look for look in looks if look.at >= since and condition(look)), None)


class Watch(LookingChild):
    """The looks at the application since the start. Use as a context manager."""

    def __init__(self, environment: Mapping[str, str], models: Sequence[str]) -> None:
        super().__init__("benchmarks.scaling.watch", environment, models=list(models))
        self._looks: dict[str, list[Look]] = {model: [] for model in models}
        self._over = False

    def looks(self, model: str) -> list[Look]:
        """All looks at a model, oldest first."""
        while self._take(0.0):
            pass
        return list(self._looks[model])

    def until(self, model: str, condition: Callable[[Look], bool], bound_s: float, since: float | None = None) -> Look:
        """Wait for a look after `since` (default: now) for which the condition holds; returns the first.

        Raises:
            TimeoutError: none within `bound_s`, with the last look.
        """
        since = time.monotonic() if since is None else since
        deadline = time.monotonic() + bound_s
        checked = 0
        while True:
            looks = self.looks(model)
            found = first(looks[checked:], since, condition)
            if found is not None:
                return found
            checked = len(looks)
            if self._over or not self._take(max(0.0, deadline - time.monotonic())):
                raise TimeoutError(f"{model}: not within {bound_s:g} s; last seen: {looks[-1] if looks else None}")

    def _take(self, timeout_s: float) -> bool:
        """Write the next look down; whether one came in time."""
        event = None if self._over else self._child.event(timeout_s)
        if event is None:
            return False
        if event.get("event") == "end":
            self._over = True
            return False
        for model, look in read(event).items():
            self._looks.setdefault(model, []).append(look)
        return True


def look(application: Any, order: dict[str, Any]) -> dict[str, Any]:
    return {"models": application.application_status(order["models"])["models"]}


if __name__ == "__main__":
    sys.exit(look_until_input_ends(look, PERIOD_S))
