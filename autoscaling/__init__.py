"""Scaling of engine replicas by signals of the routers.

Decides: nothing: it reads the signals, asks a policy, and makes Serve start replicas where memory is reserved.
In: numbers that routers and engines report to Serve. Out: replica counts for Serve's controller.
Never: blocks the controller; a thread calls the quota actor.
"""

from autoscaling import readings
from autoscaling.readings import RouterCounts

__all__ = ["RouterCounts", "readings"]
