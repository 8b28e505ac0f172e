"""The application's replicas by Serve's controller, with their processes, also while the controller itself is killed: a
child process does the looking (`python -m benchmarks.batch_crash.watch`), so that its owner stays free of Ray.

The child reads one JSON object (environment) and prints one a look, until its input ends; a look that the controller
did not answer has `"running": null`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

from benchmarks.common.looks import LookingChild, look_until_input_ends
from serve_app.names import APPLICATION

PERIOD_S = 0.3  # a look costs the controller some milliseconds
FIRST_S = 60.0  # of the child's start: Ray is imported and joined


class ReplicaWatch(LookingChild):
    """The processes of the running replicas, by deployment. Use as a context manager."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        super().__init__("benchmarks.batch_crash.watch", environment)
        self._last: dict[str, dict[str, int]] = {}
        self._at = 0.0

    def running(self, since: float = 0.0) -> dict[str, dict[str, int]]:
        """By deployment, the process of each running replica, by a look after `since`.

        Raises:
            TimeoutError: the child has said nothing for `FIRST_S`.
        """
        deadline = time.monotonic() + FIRST_S
        while (event := self._child.event(0.0 if self._at > since else max(0.0, deadline - time.monotonic()))) or (
            self._at <= since
        ):
            if event is None or event.get("event") == "end":
                raise TimeoutError("nothing is told of the replicas")
            if event["running"] is not None:
                self._last = event["running"]
                self._at = event["at"]
        return self._last


def running_of(details: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    """By deployment, the processes of its running replicas, by the replica's id."""
    deployments = (details["applications"].get(APPLICATION) or {}).get("deployments", {})
    return {
        name: {
            one["replica_id"]: one["pid"]
            for one in deployment["replicas"]
            if str(getattr(one["state"], "value", one["state"])) == "RUNNING" and one.get("pid")
        }
        for name, deployment in deployments.items()
    }


def look(application: Any, _: dict[str, Any]) -> dict[str, Any]:
    from ray.exceptions import RayError
    from ray.serve.exceptions import RayServeException

    try:
        return {"running": running_of(application.details())}
    except (RayError, RayServeException, TimeoutError) as error:
        print(f"no look: {error!r}", file=sys.stderr)
        return {"running": None}


if __name__ == "__main__":
    sys.exit(look_until_input_ends(look, PERIOD_S))
