"""A rolling upgrade of model, settings and code, and the roll back of a bad model, under load: no request fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.requires import requires
from tests.waiting import patient

requires("linux")

RUN_S = 400.0  # 45 s on two idle cores


@pytest.mark.long
def test_nothing_fails_while_model_settings_and_code_are_replaced_and_a_bad_model_is_rolled_back() -> None:
    command = [sys.executable, "-m", "benchmarks.upgrade", "--quick", "--engine", "simulated"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=patient(RUN_S), check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["requests"] > 100
    assert result["failed"] == 0
    by_change = {name: {one.rpartition(":")[2] for one in step["replaced"]} for name, step in result["changes"].items()}
    assert by_change["code"] >= {"Router", "engine-tiny", "GpuMemoryQuota"}
    assert by_change["bad model"] == set()
