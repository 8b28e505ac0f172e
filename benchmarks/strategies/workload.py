"""The requests: lengths from the Azure trace, and when they come.

Invariant: everything that is drawn comes from the seed; no two prompts share a first block, so nothing is cached.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean

import msgspec

from benchmarks.common.traces import azure

OUTPUT_DIVISOR = 4  # the issue's: a mean of 53 tokens, so that a run takes minutes on a CPU
PROMPT_DIVISOR = 16  # a mean of 72 tokens: both sides of the 100 at which the field calls a prompt long
MAX_MODEL_LEN = 2048  # of the engine; nothing of the trace is above it after division
TOKEN_IDS = (16, 240)  # of plain bytes in the built-in model's vocabulary
DOCUMENTS = 3  # of a score
# of bursts
PERIOD_S = 5.0
BURST_S = 1.0
# of the mean rate: BURST_S at one and the rest at the other is the mean
BURST_RATE = 3.0
CALM_RATE = 0.5
RAMP_FROM = 0.1  # of the rate at a ramp's end


class Ask(msgspec.Struct, frozen=True, array_like=True):
    """A request; `at_s` from the start of its run."""

    number: int
    at_s: float
    prompt: int
    output: int


Lengths = tuple[int, int]  # prompt and output tokens


def clipped(prompt: int, output: int, max_len: int = MAX_MODEL_LEN) -> Lengths:
    """At least one token each, and within the model's length; the answer is cut before the prompt."""
    prompt = min(max(1, prompt), max_len - 1)
    return prompt, min(max(1, output), max_len - prompt)


def azure_lengths(folder: Path, max_len: int = MAX_MODEL_LEN) -> list[Lengths]:
    """The trace's lengths over the divisors, in the trace's order."""
    return [
        clipped(one.prompt_tokens // PROMPT_DIVISOR, one.output_tokens // OUTPUT_DIVISOR, max_len)
        for one in azure(folder, random.Random(0))
    ]


def drawn(lengths: Sequence[Lengths], count: int, seed: int) -> list[Lengths]:
    """So many of them with replacement."""
    return random.Random(f"lengths {seed}").choices(lengths, k=count)


def levelled(lengths: Sequence[Lengths]) -> list[Lengths]:
    """As many, all of the mean length."""
    each = round(fmean(prompt for prompt, _ in lengths)), round(fmean(output for _, output in lengths))
    return [each] * len(lengths)


def at_once(lengths: Sequence[Lengths]) -> list[Ask]:
    return [Ask(number, 0.0, prompt, output) for number, (prompt, output) in enumerate(lengths)]


def steady(_: float) -> float:
    return 1.0


def bursts(at_s: float) -> float:
    return BURST_RATE if at_s % PERIOD_S < BURST_S else CALM_RATE


def ramp_over(length_s: float) -> Callable[[float], float]:
    """From `RAMP_FROM` of the rate to the rate, in a straight line."""
    return lambda at_s: RAMP_FROM + (1.0 - RAMP_FROM) * at_s / length_s


def poisson(shape: Callable[[float], float], rate: float, length_s: float, seed: int) -> list[float]:
    """Moments of a Poisson process of `rate` x `shape(at)` requests a second, by thinning (Lewis and Shedler, 1979)."""
    draw = random.Random(f"arrivals {seed}")
    most = max(shape(length_s * step / 1000) for step in range(1001))
    at_s = 0.0
    found = []
    while (at_s := at_s + draw.expovariate(rate * most)) < length_s:
        if draw.random() < shape(at_s) / most:
            found.append(at_s)
    return found


def prompt_ids(ask: Ask, seed: int) -> list[int]:
    """A prompt of its own for each request of a seed."""
    draw = random.Random(f"prompt {seed} {ask.number}")
    return [draw.randrange(*TOKEN_IDS) for _ in range(ask.prompt)]


def texts_of(ask: Ask, seed: int) -> list[str]:
    """A query and the documents to be scored against it, together of about as many tokens as the prompt."""
    draw = random.Random(f"texts {seed} {ask.number}")
    length = max(1, ask.prompt // (1 + DOCUMENTS))
    return ["".join(draw.choices(string.ascii_lowercase, k=length)) for _ in range(1 + DOCUMENTS)]
