"""One simulator of clusters: discrete events in virtual time, on the code that decides in production.

Decides: nothing that production decides. It drives the queues of routers and quota actor, the ledger, the replica
choice, limits, estimates, rows in flight and scaling policies, and models what is around them: engines by a measured
step model, nodes, starts, failures, clients, batches, and Serve's delays.
In: a `World`, a load of `SimulatedRequest`, a policy. Out: a `RequestEnd` for each request, targets, GPU hours,
a `RunSeries`.
Never: reads a clock, a file or the machine's randomness; one seed gives one history.
"""

from autoscaling.simulator.calibration import DecodeSample, PrefillSample, StepModel, fitted
from autoscaling.simulator.clock import Clock
from autoscaling.simulator.exchange import RouterLink, VirtualActor
from autoscaling.simulator.profiles import PROFILES, EngineProfile
from autoscaling.simulator.requests import RequestEnd, SimulatedRequest
from autoscaling.simulator.series import Obstacle, RunSeries, step_for
from autoscaling.simulator.serve_delays import AT_ONCE, ServeDelays
from autoscaling.simulator.simulation import SETTLE_S, Simulation
from autoscaling.simulator.summary import Summary
from autoscaling.simulator.synthetic import CHAT, SyntheticLoad
from autoscaling.simulator.traces import read_trace
from autoscaling.simulator.world import BatchPlan, ClassPlan, ModelPlan, NodePlan, ScalingPlan, World

__all__ = [
    "AT_ONCE",
    "CHAT",
    "PROFILES",
    "SETTLE_S",
    "BatchPlan",
    "ClassPlan",
    "Clock",
    "DecodeSample",
    "EngineProfile",
    "ModelPlan",
    "NodePlan",
    "Obstacle",
    "PrefillSample",
    "RequestEnd",
    "RouterLink",
    "RunSeries",
    "ScalingPlan",
    "ServeDelays",
    "SimulatedRequest",
    "Simulation",
    "StepModel",
    "Summary",
    "SyntheticLoad",
    "VirtualActor",
    "World",
    "fitted",
    "read_trace",
    "step_for",
]
