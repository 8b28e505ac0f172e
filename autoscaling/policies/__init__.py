"""Scaling policies: how many replicas a model should have.

Decides: the number of replicas from signals, bounds and delays.
In: `Signals`, with the time in them. Out: a `Decision` with its reason.
Never: reads a clock or asks Ray; standard library only.
"""

from autoscaling.policies.ongoing_requests import Ongoing, within_room
from autoscaling.policies.signals import Decision, Room, Signals

__all__ = ["Decision", "Ongoing", "Room", "Signals", "within_room"]
