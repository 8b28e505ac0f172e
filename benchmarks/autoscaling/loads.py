"""The loads: two traces, synthetic clients, steps, and a short day that comes back, each at a rate that keeps eight
replicas busy in the mean."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from autoscaling.simulator import CHAT, PROFILES, EngineProfile, SimulatedRequest, SyntheticLoad
from benchmarks.common.traces import AZURE_FILE, DATA, MODEL, MOONCAKE_FILE, recorded
from serve_app.types import RequestClass

MEAN_REPLICAS = 8.0
SLOTS = 8
SPAN_S = 2700.0
SEEDS = (1, 2, 3)
STEP_RATES = (0.5, 2.0, 4.0, 5.0, 1.0, 3.0)
JITTER_S = 10.0  # between the copies of a request
FLAP_S = 60.0
WARM_S = 300.0
SEASON_S = 900.0
SPIKE_S = (420.0, 600.0)  # of a season
SPIKE_RATE = 4.0  # over what comes otherwise
SEASONAL = "seasonal"
CONSTANT = "constant"
FLAPPING = "flapping"


@dataclass(frozen=True, slots=True)
class Load:
    """A load.

    Args:
        slo_s: the level of its first tokens.
        season_s: after which it comes back; None: never.
        warm_s: not measured.
    """

    name: str
    profile: EngineProfile
    slo_s: float
    requests: tuple[SimulatedRequest, ...]
    season_s: float | None = None
    warm_s: float = WARM_S

    def run_s(self, request: SimulatedRequest) -> float:
        """How long a request runs where half of the slots are taken."""
        profile = self.profile
        step_s = profile.step_s + profile.slots / 2 * profile.sequence_s
        return request.prompt_tokens / profile.prefill_tokens_per_s + request.output_tokens * step_s


def _profile(name: str) -> EngineProfile:
    """With few slots, as an operator has it who promises a first token: otherwise eight replicas would serve hundreds
    of requests a second."""
    return replace(PROFILES[name], slots=SLOTS, start_sigma=0.0)


def _scaled(name: str, profile: EngineProfile, slo_s: float, requests: Sequence[SimulatedRequest]) -> Load:
    """Each request once, not at all or several times, so that `MEAN_REPLICAS` are busy in the mean."""
    found = [request for request in requests if request.at_s < SPAN_S]
    load = Load(name, profile, slo_s, ())
    busy = sum(map(load.run_s, found)) / SPAN_S / profile.slots
    draw = random.Random(name)
    copies = [
        replace(request, at_s=request.at_s + (draw.uniform(0.0, JITTER_S) if copy else 0.0))
        for request in found
        for copy in range(int(MEAN_REPLICAS / busy + draw.random()))
    ]
    return replace(load, requests=tuple(sorted(copies, key=lambda request: request.at_s)))


def _steps() -> Iterator[SimulatedRequest]:
    """Poisson arrivals at rates that change every seven and a half minutes."""
    draw = random.Random("steps")
    for number, rate in enumerate(STEP_RATES):
        step_s = SPAN_S / len(STEP_RATES)
        at_s = number * step_s
        while (at_s := at_s + draw.expovariate(rate)) < (number + 1) * step_s:
            yield SimulatedRequest(at_s, "steps", RequestClass.NORMAL, MODEL, *CHAT.draw(draw))


def _constant() -> Iterator[SimulatedRequest]:
    """The same request at equal distances."""
    for number in range(int(SPAN_S * 4)):
        yield SimulatedRequest(number / 4, "constant", RequestClass.NORMAL, MODEL, 1000, 200)


def _flapping() -> Iterator[SimulatedRequest]:
    """One a second and five a second, by turns of a minute."""
    draw = random.Random("flapping")
    at_s = 0.0
    while (at_s := at_s + draw.expovariate(5.0 if at_s // FLAP_S % 2 else 1.0)) < SPAN_S:
        yield SimulatedRequest(at_s, "flapping", RequestClass.NORMAL, MODEL, *CHAT.draw(draw))


def _seasonal() -> Iterator[SimulatedRequest]:
    """Three seasons with a spike each."""
    draw = random.Random("seasonal")
    at_s = 0.0
    while (at_s := at_s + draw.expovariate(SPIKE_RATE)) < SPAN_S:
        if SPIKE_S[0] <= at_s % SEASON_S < SPIKE_S[1] or draw.random() < 1.0 / SPIKE_RATE:
            yield SimulatedRequest(at_s, "seasonal", RequestClass.NORMAL, MODEL, *CHAT.draw(draw))


def loads(data: Path = DATA) -> dict[str, Load]:
    """By name. TraceMissingError: a trace is not in the folder."""
    small = _profile("8b-l4")
    large = _profile("8b-a100")
    found = [
        _scaled("azure", small, 5.0, recorded(data, AZURE_FILE)),
        _scaled("mooncake", large, 10.0, recorded(data, MOONCAKE_FILE)),
        _scaled("step", small, 5.0, list(_steps())),
        _scaled(CONSTANT, small, 5.0, list(_constant())),
        _scaled(FLAPPING, small, 5.0, list(_flapping())),
    ]
    seasonal = _scaled(SEASONAL, small, 5.0, list(_seasonal()))
    found.append(replace(seasonal, season_s=SEASON_S, warm_s=SEASON_S))
    for seed in SEEDS:
        # one class: what is compared is the number of replicas, not the order of service
        synthetic = SyntheticLoad(
            MODEL, 4.0, SPAN_S, day_s=SPAN_S, classes={RequestClass.NORMAL: 1.0}, seed=seed
        ).requests()
        found.append(_scaled(f"clients-{seed}", small, 5.0, list(synthetic)))
    return {load.name: load for load in found}
