"""Small worlds for the tests, and what became of their requests."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from autoscaling.simulator import ModelPlan, NodePlan, ScalingPlan, SimulatedRequest, Simulation, World
from autoscaling.simulator.profiles import GB, EngineProfile
from autoscaling.simulator.requests import RequestEnd
from serve_app.core.queue import QueuePolicy
from serve_app.types import RequestClass

MODEL = "m"
STEP_S = 0.02
# An answer of 50 tokens takes a second, however many run beside it.
PROFILE = EngineProfile("small", "of the tests", 4, 8_000, STEP_S, 0.0, 0.0, 100_000.0, 5.0)
POLICY = QueuePolicy(max_queued=1000, max_wait_s=600.0, no_replica_wait_s=600.0)
NODES = NodePlan(gpus=8, gpu_bytes=GB)


def world(scaling: ScalingPlan = ScalingPlan(1, 1), **changes: Any) -> World:  # noqa: B008 - a frozen value
    """A world of one model."""
    model = ModelPlan(MODEL, changes.pop("profile", PROFILE), changes.pop("queue", POLICY), scaling)
    return replace(World((model,), NODES, routers=2), **changes)


def request(
    at_s: float, output: int = 50, level: RequestClass = RequestClass.NORMAL, prompt: int = 20, **changes: Any
) -> SimulatedRequest:
    return replace(SimulatedRequest(at_s, "t", level, MODEL, prompt, output), **changes)


def simulated(plan: World, requests: Iterable[SimulatedRequest]) -> tuple[Simulation, list[RequestEnd]]:
    """A run to the end of all requests, by their numbers."""
    ends: list[RequestEnd] = []
    simulation = Simulation(plan, requests, ends.append)
    simulation.run()
    return simulation, sorted(ends)
