"""What the benchmarks in virtual time share: a world of fixed replicas, and a run of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from autoscaling.simulator import (
    EngineProfile,
    ModelPlan,
    NodePlan,
    RequestEnd,
    ScalingPlan,
    SimulatedRequest,
    Simulation,
    World,
)
from benchmarks.common.traces import MODEL
from serve_app.core.queue import QueuePolicy

PROGRESS_S = 0.5  # between the counts of a request's tokens: as often as a router tells the quota actor
NEVER_S = 1e9
# As shipped, save for the bounds that refuse: who is refused has no wait to be measured.
PATIENT = QueuePolicy(max_queued=10**9, max_wait_s=NEVER_S, no_replica_wait_s=NEVER_S)


def one_model(profile: EngineProfile, queue: QueuePolicy = PATIENT, replicas: int = 1, **changes: Any) -> World:
    """Replicas of one model, as many as there are, behind three routers. `changes`: of `World`'s fields."""
    model = ModelPlan(MODEL, profile, queue, ScalingPlan(replicas, replicas))
    return replace(World((model,), NodePlan(gpus=max(8, replicas)), progress_s=PROGRESS_S), **changes)


def play_all(world: World, requests: Iterable[SimulatedRequest]) -> tuple[Simulation, list[RequestEnd]]:
    """A run until every request has ended; their ends in order of arrival."""
    ends: list[RequestEnd] = []
    simulation = Simulation(world, requests, ends.append)
    simulation.run()
    return simulation, sorted(ends)
