"""A quota actor whose GCS stands still, on a Ray of its own. `python -m tests.e2e.gcs_still PORT FOLDER`."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

import psutil
import ray

from serve_app.core.memory import EngineReport, Rank
from serve_app.errors import Unavailable
from serve_app.quota import QuotaActor
from serve_app.settings import QuotaSettings
from tests.e2e.plain_serve import start_ray
from tests.waiting import wait_until

ANSWER_S = 60.0  # against hanging: a call fails or succeeds by itself within five
BACK_S = 60.0  # for the first answer after the GCS goes on


def answer_of(actor: Any, report: EngineReport) -> str:
    """What comes of an engine's report: `granted`, or the code of the refusal."""
    try:
        return "granted" if ray.get(actor.engine.remote(report), timeout=ANSWER_S).may_load else "waits"
    except Unavailable as error:
        return error.code


def main() -> None:
    start_ray(sys.argv[2])
    try:
        (gcs,) = (one for one in psutil.Process().children(recursive=True) if one.name() == "gcs_server")
        actor = QuotaActor(QuotaSettings()).actor.find()
        first = EngineReport("e1", "m", (Rank(ray.get_runtime_context().get_node_id(), 0),), 100, 100, measures=False)
        # an actor that has just begun may let the first one wait for a moment
        granted = lambda: answer_of(actor, first)  # noqa: E731
        before = wait_until(granted, BACK_S, "the first has its grant", wanted="granted", poll_s=0.2).found
        gcs.suspend()
        try:
            known = answer_of(actor, replace(first, holds=ray.get(actor.engine.remote(first), timeout=ANSWER_S).holds))
            new = answer_of(actor, replace(first, owner="e2"))
        finally:
            gcs.resume()
        again = lambda: answer_of(actor, replace(first, owner="e2"))  # noqa: E731
        after = wait_until(again, BACK_S, "the second has its grant", wanted="granted", poll_s=0.2).found
        print(json.dumps({"before": before, "known": known, "new": new, "after": after}))
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
