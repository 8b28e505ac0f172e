"""Scaling policies: the number of replicas for a model.

Decides: the number of replicas from signals, bounds and delays.
In: `Signals`, with the time in them. Out: a `Decision` with its reason.
Never: reads a clock or asks Ray; standard library only.
"""

from autoscaling.policies.gpu_budget import BudgetedModel, within_gpu_budget
from autoscaling.policies.ongoing_requests import OngoingRequestsPolicy, within_scale_up_limit
from autoscaling.policies.predictive import PredictivePolicy
from autoscaling.policies.registry import POLICIES, ReplicaPolicy
from autoscaling.policies.signals import STALE_INTERVALS, Cause, ClassSignals, Decision, ScaleUpLimit, Signals, merged
from autoscaling.policies.slo import HighestSince, SloPolicy

__all__ = [
    "POLICIES",
    "STALE_INTERVALS",
    "BudgetedModel",
    "Cause",
    "ClassSignals",
    "Decision",
    "HighestSince",
    "OngoingRequestsPolicy",
    "PredictivePolicy",
    "ReplicaPolicy",
    "ScaleUpLimit",
    "Signals",
    "SloPolicy",
    "merged",
    "within_gpu_budget",
    "within_scale_up_limit",
]
