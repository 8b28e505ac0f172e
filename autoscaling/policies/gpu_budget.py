"""One bound of GPUs for all models together.

Rules
- No replica is taken from a model for another one: what has started stays until its own policy gives it up.
- What is free goes one replica after the other to the model that lacks the largest part of its number, for each GPU
  that a replica of it takes; of equal ones to the first by name.
- A replica that would not fit is passed over, so a smaller model may still get one.

Invariant: the numbers, or the targets where these are larger, take no more GPUs than the bound, unless the targets do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autoscaling.policies.signals import Cause, Decision

ROUNDING = 1e-9  # of sums of shares of GPUs


@dataclass(frozen=True, slots=True)
class BudgetedModel:
    """A model with its decision. `gpus`: of a replica."""

    name: str
    target: int
    decision: Decision
    gpus: float


def within_gpu_budget(models: Sequence[BudgetedModel], max_gpus: float) -> dict[str, Decision]:
    """The decisions by name, those that exceed the bound with fewer replicas and that as their reason."""
    given = {model.name: min(model.target, model.decision.replicas) for model in models}
    free = max_gpus - sum(model.target * model.gpus for model in models) + ROUNDING
    lacking = {model.name: model for model in models if model.decision.replicas > model.target}
    while True:
        fitting = [model for model in lacking.values() if model.gpus <= free]
        if not fitting:
            break
        chosen = min(fitting, key=lambda model: (-_lack(model, given[model.name]), model.name))
        given[chosen.name] += 1
        free -= chosen.gpus
        if given[chosen.name] == chosen.decision.replicas:
            del lacking[chosen.name]
    return {
        model.name: _bounded(model, given[model.name], max_gpus) if model.name in lacking else model.decision
        for model in models
    }


def _lack(model: BudgetedModel, given: int) -> float:
    """The part of its number that a model lacks, for each GPU of a replica."""
    return (1.0 - given / model.decision.replicas) / max(model.gpus, ROUNDING)


def _bounded(model: BudgetedModel, replicas: int, max_gpus: float) -> Decision:
    decision = model.decision
    short = decision.replicas - replicas
    reason = f"{decision.reason}; {short} not started: scaling.max_gpus is {max_gpus:g} for all models"
    return replace(decision, replicas=replicas, reason=reason, cause=Cause.MAX_GPUS)
