"""A synthetic load by client, as public studies of production services describe it. Seeded, and read as it comes.

About fifty clients: one has 30% of the requests, the first five 65%, the others the rest alike. Most clients are steady
(gaps of a Gamma distribution with a coefficient of variation of 1.2), some are bursty (5), a few are on and off (15:
bursts of some 125 requests at twenty times their rate, then a pause). Lengths are lognormal. A daily curve lies over
all of it: time runs faster at noon.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from autoscaling.simulator.requests import SimulatedRequest
from serve_app.errors import ConfigError
from serve_app.types import RequestClass

HEAVIEST = 0.30  # of the requests
TOP_FIVE = 0.65
STEADY_CV = 1.2
BURSTY_CV = 5.0
STEADY_SHARE = 0.80  # of the clients
BURSTY_SHARE = 0.15  # the rest is on and off
ON_RATE = 20.0  # of a client that is on, times its mean
PAUSE_SHARE = 0.008  # of its gaps that are pauses: a coefficient of variation of 15
STEP_S = 60.0  # of the daily curve
CLASSES: Mapping[RequestClass, float] = {RequestClass.HIGH: 0.2, RequestClass.NORMAL: 0.5, RequestClass.LOW: 0.3}


@dataclass(frozen=True, slots=True)
class LengthPlan:
    """Lognormal lengths in tokens; `most_tokens`: of prompt and output, each."""

    prompt_mu: float
    prompt_sigma: float
    output_mu: float
    output_sigma: float
    most_tokens: int = 16_384

    def draw(self, rng: random.Random) -> tuple[int, int]:
        """Prompt and output tokens of one request."""
        prompt = rng.lognormvariate(self.prompt_mu, self.prompt_sigma)
        output = rng.lognormvariate(self.output_mu, self.output_sigma)
        return self._bounded(prompt), self._bounded(output)

    def _bounded(self, tokens: float) -> int:
        return min(self.most_tokens, max(1, round(tokens)))


CHAT = LengthPlan(6.63, 0.99, 5.02, 0.86)
CODE = LengthPlan(7.00, 1.36, 2.79, 0.85)


@dataclass(frozen=True, slots=True)
class SyntheticLoad:
    """A load.

    Args:
        rate: requests a second, in the mean of a day.
        day_swing: the part by which the rate at noon is above its mean, and at midnight below; 0: no daily curve.
        starts_at_s: the moment of the day at which it begins.
        classes: their shares of the clients; a client has one class.

    Raises:
        ConfigError: a figure out of range.
    """

    model: str
    rate: float
    span_s: float
    lengths: LengthPlan = CHAT
    clients: int = 50
    day_swing: float = 0.5
    day_s: float = 86_400.0
    starts_at_s: float = 0.0
    classes: Mapping[RequestClass, float] = field(default_factory=lambda: CLASSES)
    seed: int = 1

    def __post_init__(self) -> None:
        for name in ("rate", "span_s", "day_s"):
            if not 0.0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} is {getattr(self, name)}, not above 0", param=name)
        if self.clients < 6:
            raise ConfigError(f"clients is {self.clients}; five have most of the load", param="clients")
        if not 0.0 <= self.day_swing < 1.0:
            raise ConfigError(f"day_swing is {self.day_swing}, not from 0 to below 1", param="day_swing")

    def requests(self) -> Iterator[SimulatedRequest]:
        """All requests, in order."""
        draw = random.Random(self.seed)
        rest = (1.0 - TOP_FIVE) / (self.clients - 5)
        shares = [HEAVIEST, *[(TOP_FIVE - HEAVIEST) / 4] * 4, *[rest] * (self.clients - 5)]
        levels = draw.choices(list(self.classes), list(self.classes.values()), k=self.clients)
        kinds = [draw.random() for _ in shares]
        streams = [
            self._client(at, share, kinds[at], levels[at], random.Random(f"{self.seed} client {at}"))
            for at, share in enumerate(shares)
        ]
        return heapq.merge(*streams, key=lambda request: request.at_s)

    def _client(
        self, number: int, share: float, kind: float, level: RequestClass, draw: random.Random
    ) -> Iterator[SimulatedRequest]:
        mean_s = 1.0 / (self.rate * share)
        worked_s = draw.uniform(0.0, mean_s)  # in a time in which the rate is constant
        for began_s, speed in self._curve():
            while worked_s < speed * STEP_S:
                at_s = began_s + worked_s / speed
                if at_s >= self.span_s:
                    return
                prompt, output = self.lengths.draw(draw)
                yield SimulatedRequest(at_s, f"client-{number:02}", level, self.model, prompt, output)
                worked_s += gap_s(draw, mean_s, kind)
            worked_s -= speed * STEP_S

    def _curve(self) -> Iterator[tuple[float, float]]:
        """The steps of the daily curve: when each begins, and its rate over the mean."""
        for step in itertools.count():
            began_s = step * STEP_S
            if began_s >= self.span_s:
                return
            of_day = (self.starts_at_s + began_s + STEP_S / 2) / self.day_s
            yield began_s, 1.0 - self.day_swing * math.cos(2.0 * math.pi * of_day)


def gap_s(draw: random.Random, mean_s: float, kind: float) -> float:
    """Seconds until a client's next request. `kind`: from 0 to 1, in the order of the shares of kinds."""
    if kind >= STEADY_SHARE + BURSTY_SHARE:
        on_s = mean_s / ON_RATE
        off_s = (mean_s - (1.0 - PAUSE_SHARE) * on_s) / PAUSE_SHARE
        return draw.expovariate(1.0 / (off_s if draw.random() < PAUSE_SHARE else on_s))
    shape = (STEADY_CV if kind < STEADY_SHARE else BURSTY_CV) ** -2
    return draw.gammavariate(shape, mean_s / shape)
