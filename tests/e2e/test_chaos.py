"""Every process behind the endpoint is hit under load, and no accepted request fails, hangs, repeats or loses a token.

What depends on the machine's speed (how long a stream pauses, how many move) is the benchmark's, not the test's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from benchmarks.chaos.figures import KEYS
from benchmarks.chaos.plan import BARS
from tests.requires import requires
from tests.waiting import patient

requires("linux")

QUICK_S = 400.0  # 75 s on two idle cores
LONG_S = 2400.0  # twenty minutes of load, the start, and what was hit last is back


def chaos(*arguments: str, bound_s: float) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.chaos", *arguments]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=patient(bound_s), check=False
    )
    shown = done.stderr[-6000:]
    assert done.stdout, shown
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert tuple(result) == KEYS
    assert {name: result[name] for name in BARS} == BARS, shown
    return result


def test_no_accepted_request_notices_that_a_process_has_died() -> None:
    result = chaos("--quick", "--engine", "simulated", bound_s=QUICK_S)
    assert result["kills"] >= 3
    assert result["migrations"] > 0


@pytest.mark.long
@pytest.mark.parametrize("engine", ["simulated", "vllm"])
def test_nor_in_many_minutes(engine: str) -> None:
    if engine == "vllm":
        requires("vllm")
    result = chaos("--engine", engine, bound_s=LONG_S)
    assert result["kills"] >= 20
    assert result["migrations"] >= 20
    assert result["near_tie"] <= 0.005 * result["requests"]
