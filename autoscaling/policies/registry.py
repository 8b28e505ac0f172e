"""The policies by the names that users give."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from autoscaling.policies.ongoing_requests import OngoingRequestsPolicy
from autoscaling.policies.predictive import PredictivePolicy
from autoscaling.policies.signals import Decision, Signals
from autoscaling.policies.slo import SloPolicy


class ReplicaPolicy(Protocol):
    """A policy of one model: how many replicas, by its signals. `has_own_delays`: it decides when, too, so that Serve
    has to wait no longer."""

    has_own_delays: bool

    def decide(self, signals: Signals) -> Decision:
        """The number of replicas, with its reason."""


POLICIES: Mapping[str, Callable[[], ReplicaPolicy]] = {
    "ongoing": OngoingRequestsPolicy,
    "slo": SloPolicy,
    "predictive": PredictivePolicy,
}
