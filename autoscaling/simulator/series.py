"""A run over time: arrivals, replicas, waiting requests and first tokens by step; and what its missed requests met.

Decides: why a request has missed its level (`Obstacle`), by what its model had when it came.
Invariant: every request that has ended is counted in one step, that of its arrival.
"""

from __future__ import annotations

import enum
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from autoscaling.policies import Cause
from autoscaling.simulator.requests import RequestEnd
from autoscaling.simulator.simulation import Simulation
from autoscaling.simulator.summary import TimeHistogram
from serve_app.core.limits import LimitReason
from serve_app.types import Outcome, RequestClass

LOOK_S = 5.0  # between looks at replicas: a start takes several of them
STEPS_S = (5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0, 14_400.0, 86_400.0)
MOST_STEPS = 180  # of a chart: with more the noise of single requests hides the course
LIMIT_REASONS = frozenset(reason.value for reason in LimitReason)


class Obstacle(enum.StrEnum):
    """Why a request has missed its level."""

    LIMITS = "limits"  # its tenant's
    FAILED = "failed"  # it lost its replicas
    GPUS = "gpus"  # a replica had no place
    MAX_GPUS = "max_gpus"  # it waited, and all models together had as many GPUs as they may
    MAX_REPLICAS = "max_replicas"  # it waited, and as many replicas as may be were there
    STARTS = "starts"  # it waited while a replica started
    DECISION = "decision"  # it waited, and no further replica was started
    ENGINE = "engine"  # it hardly waited: the replica needed the time for its prompt


class Look(NamedTuple):
    """A model at one moment. `starting`: replicas with and without a place that do not run yet."""

    running: int
    starting: int
    unplaced: int
    waiting: int
    is_full: bool
    is_over_budget: bool  # the bound of all models together has kept it from more replicas

    @property
    def placed(self) -> int:
        """Replicas that have GPUs, but those that end."""
        return self.running + self.starting - self.unplaced


class Miss(NamedTuple):
    """A kind of missed request: of a model, whose look of this number came next."""

    request_class: RequestClass
    model: str
    look: int
    why: Obstacle | None  # None: it waited, and the look says for what


@dataclass(slots=True)
class Step:
    """The requests that have arrived in one step: their number and their first tokens, by class."""

    arrivals: Counter[RequestClass] = field(default_factory=Counter)
    first_tokens: defaultdict[RequestClass, TimeHistogram] = field(default_factory=lambda: defaultdict(TimeHistogram))

    def quantile(self, request_class: RequestClass, share: float) -> float | None:
        """Of a class's first tokens; None: there was none."""
        found = self.first_tokens.get(request_class)
        return None if found is None else found.quantile(share)


def step_for(span_s: float) -> float:
    """The least step with which so long a load has at most `MOST_STEPS`."""
    return next((step for step in STEPS_S if span_s / step <= MOST_STEPS), STEPS_S[-1])


class RunSeries:
    """See the module. `watch` first, then `add` each end. `step_s`: a multiple of `LOOK_S`."""

    def __init__(self, step_s: float) -> None:
        self.step_s = step_s
        self.began_s = 0.0
        self.steps: dict[int, Step] = defaultdict(Step)
        self.looks: dict[str, list[Look]] = {}
        self._misses: Counter[Miss] = Counter()

    def watch(self, simulation: Simulation) -> None:
        """Look at the replicas of a run from now on. O(replicas) for each look."""
        self.began_s = simulation.began_s
        self.looks = {scaling.plan.name: [] for scaling in simulation.scalings}

        def look() -> None:
            for scaling in simulation.scalings:
                model = scaling.plan.name
                counts = simulation.fleet.counts(model)
                present = counts.running + counts.starting
                waiting = sum(router.queue.pending.count(model) for router in simulation.routers)
                is_full = present >= scaling.plan.scaling.max_replicas
                is_over_budget = scaling.cause is Cause.MAX_GPUS
                found = Look(counts.running, counts.starting, counts.unplaced, waiting, is_full, is_over_budget)
                self.looks[model].append(found)

        look()
        simulation.clock.every(LOOK_S, look)

    def add(self, end: RequestEnd) -> None:
        """A request has ended."""
        if end.outcome is Outcome.BAD_REQUEST:
            return
        offered_s = end.offered_s - self.began_s
        step = self.steps[int(offered_s / self.step_s)]
        step.arrivals[end.request_class] += 1
        if end.first_s is not None:
            step.first_tokens[end.request_class].add(end.first_s - end.offered_s)
        if not end.is_in_time:
            look = int(offered_s / LOOK_S) + 1
            self._misses[Miss(end.request_class, end.model, look, _obstacle(end))] += 1

    @property
    def count(self) -> int:
        """Steps so far: those of arrivals, and those of looks."""
        looks = max(map(len, self.looks.values()), default=0)
        return max([0, *(step + 1 for step in self.steps), int((looks - 1) * LOOK_S / self.step_s) + 1])

    def looks_by_step(self, model: str) -> Iterator[list[Look]]:
        """The looks of each step, in order; a step without one has those of the step before."""
        per_step = round(self.step_s / LOOK_S)
        looks = self.looks[model]
        for step in range(self.count):
            yield looks[step * per_step : (step + 1) * per_step] or looks[-1:]

    def obstacles(self, request_class: RequestClass) -> Counter[tuple[Obstacle, str]]:
        """The missed requests of a class, by why and by model."""
        found: Counter[tuple[Obstacle, str]] = Counter()
        for miss, count in self._misses.items():
            if miss.request_class is request_class:
                found[miss.why or self._waited_for(miss), miss.model] += count
        return found

    def _waited_for(self, miss: Miss) -> Obstacle:
        looks = self.looks[miss.model]
        look = looks[min(miss.look, len(looks) - 1)]
        if look.unplaced:
            return Obstacle.GPUS
        if look.starting:
            return Obstacle.STARTS
        if look.is_over_budget:
            return Obstacle.MAX_GPUS
        return Obstacle.MAX_REPLICAS if look.is_full else Obstacle.DECISION


def _obstacle(end: RequestEnd) -> Obstacle | None:
    """Why a request has missed its level, as far as that is seen from its end; None: it waited."""
    if end.refused in LIMIT_REASONS:
        return Obstacle.LIMITS
    if end.outcome in (Outcome.ENGINE_FAILED, Outcome.INTERNAL_ERROR):
        return Obstacle.FAILED
    if end.granted_s is None:
        return None
    until_s = end.ended_s if end.first_s is None else end.first_s
    return Obstacle.ENGINE if end.granted_s - end.offered_s < until_s - end.granted_s else None
