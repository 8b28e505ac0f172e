"""One simulator of clusters: discrete events in virtual time, on the code that decides in production.

Decides: nothing that production decides. It drives the queues of routers and quota actor, the ledger, the replica
choice, limits, estimates and scaling policies, and models what is around them: engines by a measured step model, nodes,
starts, failures, clients, and Serve's delays.
In: a `World`, a load of `SimulatedRequest`, a policy. Out: a `RequestEnd` for each request, targets, GPU hours.
Never: reads a clock, a file or the machine's randomness; one seed gives one history.
"""

from autoscaling.simulator.clock import Clock
from autoscaling.simulator.engine import SimulatedBatch, SimulatedSequence
from autoscaling.simulator.profiles import EngineProfile

__all__ = ["Clock", "EngineProfile", "SimulatedBatch", "SimulatedSequence"]
