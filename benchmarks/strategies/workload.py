"""The requests: lengths from the Azure trace, and when they come.

Invariant: everything that is drawn comes from the seed; no two prompts share a first block, so nothing is cached.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import msgspec

from benchmarks.common.traces import azure

OUTPUT_DIVISOR = 4  # the issue's: a mean of 53 tokens, so that a run takes minutes on a CPU
PROMPT_DIVISOR = 16  # a mean of 72 tokens: both sides of the 100 at which the field calls a prompt long
MAX_MODEL_LEN = 2048  # of the engine; nothing of the trace is above it after division
TOKEN_IDS = (16, 240)  # of plain bytes in the built-in model's vocabulary


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


def at_once(lengths: Sequence[Lengths]) -> list[Ask]:
    return [Ask(number, 0.0, prompt, output) for number, (prompt, output) in enumerate(lengths)]


def prompt_ids(ask: Ask, seed: int) -> list[int]:
    """A prompt of its own for each request of a seed."""
    draw = random.Random(f"prompt {seed} {ask.number}")
    return [draw.randrange(*TOKEN_IDS) for _ in range(ask.prompt)]
