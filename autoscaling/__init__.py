"""Scaling of engine replicas by signals of the routers.

Decides: nothing itself: it reads the signals, asks a policy, and has Serve start replicas where memory is reserved.
In: numbers that routers and engines report to Serve. Out: replica counts for Serve's controller.
Never: blocks the controller; the quota actor is asked from a thread.
"""

from autoscaling import readings
from autoscaling.readings import RouterCounts

__all__ = ["RouterCounts", "readings"]
