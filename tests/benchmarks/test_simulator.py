"""The benchmark of the simulator's speed measures what it says."""

from __future__ import annotations

from benchmarks import simulator


def test_a_run_is_measured() -> None:
    speed = simulator.measure(2, 0.3, 60, seed=1)
    assert (speed.replicas, speed.requests) == (2, 60)
    assert speed.requests_per_minute > 0
    assert 0 < speed.in_time <= 1
