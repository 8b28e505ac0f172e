"""The figures of a comparison: frozen values, which `--json` prints as they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ClassResult:
    """Requests of one class in one arm.

    Args:
        level_s: to the first token, as the arm's configuration promises it; None: nothing is promised.
        attainment: the part of the offered requests that were answered with the first token within the level.
        ttft_p50_s, ttft_p99_s: None: no request had a first token.
        missed: the requests that missed the level, by what they met (`Obstacle`), with the model.
    """

    request_class: str
    level_s: float | None
    offered: int
    attainment: float | None
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    refused: int
    missed: tuple[MissedRequests, ...]


@dataclass(frozen=True, slots=True)
class MissedRequests:
    """So many requests have missed their level for one reason (`Obstacle`), at one model."""

    why: str
    model: str
    requests: int


@dataclass(frozen=True, slots=True)
class ModelResult:
    """One model in one arm. `replicas_peak`: those that ran or started, on GPUs. `changes`: of its target."""

    model: str
    gpus_per_replica: int
    start_s: float
    max_replicas: int
    replicas_mean: float
    replicas_peak: int
    gpu_hours: float
    cost: float
    changes: int


@dataclass(frozen=True, slots=True)
class SeriesResult:
    """An arm over time: a value for each step from the first arrival on; None: there was nothing to measure.

    Args:
        arrivals_per_minute: by class.
        running, starting, waiting: by model, the means of a step: replicas, replicas, requests.
        ttft_p50_s, ttft_p99_s: by class, of the requests that arrived in the step.
    """

    step_s: float
    arrivals_per_minute: Mapping[str, Sequence[float]]
    running: Mapping[str, Sequence[float]]
    starting: Mapping[str, Sequence[float]]
    waiting: Mapping[str, Sequence[float]]
    ttft_p50_s: Mapping[str, Sequence[float | None]]
    ttft_p99_s: Mapping[str, Sequence[float | None]]


@dataclass(frozen=True, slots=True)
class ArmResult:
    """One arm.

    Args:
        gpus_mean, gpus_peak: of all models together.
        cost: by the profiles' prices.
        meets: whether every class with a level reaches the wanted attainment; None: no class has a level.
    """

    name: str
    policy: str
    what_if: str
    replicas_mean: float
    replicas_peak: int
    gpus_mean: float
    gpus_peak: int
    gpu_hours: float
    cost: float
    refused: int
    changes: int
    meets: bool | None
    models: tuple[ModelResult, ...]
    classes: tuple[ClassResult, ...]
    series: SeriesResult


@dataclass(frozen=True, slots=True)
class TraceSummary:
    """The load. `span_s`: from its first to its last request, as it is simulated."""

    file: str
    requests: int
    span_s: float
    scale: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Recommendation:
    """The arm to take; None: none reaches the attainment, or no class has a level."""

    arm: str | None
    text: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """All that the command has found. `profiles`: the fields of each model's profile, as `EngineProfile` has them."""

    config: str
    trace: TraceSummary
    wanted_attainment: float
    profiles: Mapping[str, Mapping[str, Any]]
    notes: tuple[str, ...]
    arms: tuple[ArmResult, ...]
    recommendation: Recommendation
