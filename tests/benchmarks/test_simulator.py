"""The benchmark of the simulator's speed measures what it says."""

from __future__ import annotations

import pytest

from benchmarks import simulator


def test_a_run_is_measured_and_its_time_is_shared_out() -> None:
    speed = simulator.measure(2, 0.3, 60, seed=1)
    assert (speed.replicas, speed.requests) == (2, 60)
    assert speed.requests_per_minute > 0
    assert 0 < speed.in_time <= 1
    parts = simulator.shares(2, 0.3, 60, seed=1)
    assert sum(parts.values()) == pytest.approx(1.0, abs=0.02)
    assert {"shared queue", "engines", "simulator"} <= parts.keys()
