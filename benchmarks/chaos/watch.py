"""The running replicas by Serve's controller, while the controller itself is killed: a child process does the looking
(`python -m benchmarks.chaos.watch`).

The child prints one JSON object a look; a look that the controller did not answer has `"running": null`.
"""

from __future__ import annotations

import sys
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from benchmarks.batch_crash.watch import running_of
from benchmarks.common.looks import look_until_input_ends

PERIOD_S = 0.3


def look(application: Any, _: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"running": running_of(application.details())}
    except (RayError, RayServeException, TimeoutError) as error:
        print(f"no look: {error!r}", file=sys.stderr)
        return {"running": None}


if __name__ == "__main__":
    sys.exit(look_until_input_ends(look, PERIOD_S))
