"""The requests that fairness is measured with: lengths of a real trace, Poisson arrivals, clients by a rule. Seeded.

`two_clients`: the second asks twice as often as the first. `skewed`: 27 clients, of which the k-th has a part of the
requests proportional to k to the power of -1.2. VTC's real trace (Chatbot Arena, a model as a client) is not public in
whole; in two stretches of the responses in its artifact (some 80 requests each) the five busiest clients have 48, 17,
11, 7 and 7% and 31, 20, 10, 7 and 6%; this rule gives 33, 14, 9, 6 and 5%.

Invariant: the same seed gives the same requests; every one of them fits into the engine.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common.traces import Request, azure, request

LIGHT = "light"
HEAVY = "heavy"
DEMANDS = {LIGHT: 1.0, HEAVY: 2.0}
CLIENTS = 27
EXPONENT = 1.2
# VTC's loads over what is served: 4.5 requests/s where 1.7 are served; 753 s to serve the 600 s of its trace
BACKLOG = 2.6
SKEW = 1.25
MAX_TOKENS = 8192  # prompt and output: what the engine is made for; 0.1% of the trace has more


@dataclass(frozen=True, slots=True)
class Lengths:
    """Prompt and output tokens of one request."""

    prompt: int
    output: int


def azure_lengths(folder: Path) -> list[Lengths]:
    """Those of the Azure conversation trace. TraceMissingError: it is not in the folder."""
    found = [Lengths(max(1, one.prompt_tokens), max(1, one.output_tokens)) for one in azure(folder, random.Random(0))]
    return [one for one in found if one.prompt + one.output <= MAX_TOKENS]


def zipf(clients: int = CLIENTS, exponent: float = EXPONENT) -> dict[str, float]:
    """How often each client asks, relative to the others; the first most."""
    return {f"client-{rank:02}": rank**-exponent for rank in range(1, clients + 1)}


def arrivals(
    seed: int, lengths: Sequence[Lengths], demands: dict[str, float], rate: float, length_s: float
) -> list[Request]:
    """Requests of all clients in order of arrival.

    Args:
        lengths: that are drawn from, for all alike.
        demands: by client, relative to each other.
        rate: requests per second of all together, in the mean.
        length_s: until when they come.
    """
    draw = random.Random(seed)
    clients = list(demands)
    weights = list(demands.values())
    found: list[Request] = []
    at_s = draw.expovariate(rate)
    while at_s < length_s:
        shape = draw.choice(lengths)
        found.append(request(draw, at_s, draw.choices(clients, weights)[0], shape.prompt, shape.output))
        at_s += draw.expovariate(rate)
    return found


def two_clients(seed: int, lengths: Sequence[Lengths], rate: float, length_s: float) -> list[Request]:
    """Two clients, demand 1 to 2."""
    return arrivals(seed, lengths, DEMANDS, rate, length_s)


def skewed(seed: int, lengths: Sequence[Lengths], rate: float, length_s: float) -> list[Request]:
    """Twenty-seven clients; see the module."""
    return arrivals(seed, lengths, zipf(), rate, length_s)
