"""The step model of an engine (`profiles`), fitted to what was measured on it. Pure.

Slopes are medians of the slopes between all pairs of measurements (Theil, 1950; Sen, 1968), so that a few that somebody
disturbed change nothing. What a sequence costs and what its context costs are fitted by turns, until both stand.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from serve_app.errors import BadRequest

ROUNDS = 20  # of fitting by turns: after a handful nothing moves any more
LEAST_STEP_S = 1e-6


class PrefillSample(NamedTuple):
    """A request that ran alone: its prompt, and the seconds until its first token."""

    prompt_tokens: int
    first_token_s: float


class DecodeSample(NamedTuple):
    """So many sequences at once, each with so many tokens in the mean, and the seconds between two tokens of one."""

    sequences: int
    context_tokens: float
    gap_s: float


@dataclass(frozen=True, slots=True)
class StepModel:
    """What was fitted; see `EngineProfile`. `error`: the median part by which a measured gap differs from it."""

    step_s: float
    sequence_s: float
    kv_token_s: float
    prefill_tokens_per_s: float
    error: float

    def gap_s(self, sequences: int, context_tokens: float) -> float:
        """Seconds between two tokens of one of so many sequences."""
        return self.step_s + sequences * (self.sequence_s + context_tokens * self.kv_token_s)


def fitted(prefills: Sequence[PrefillSample], decodes: Sequence[DecodeSample]) -> StepModel:
    """The model of these measurements.

    Raises:
        BadRequest: too few of them differ, or long prompts took no longer than short ones.
    """
    prompt_s = _slope([(sample.prompt_tokens, sample.first_token_s) for sample in prefills], "prompt lengths")
    if prompt_s <= 0.0:
        raise BadRequest(
            "long prompts took no longer than short ones: other requests ran, or the prompts were cached",
            param="prompt_tokens",
        )
    kv_token_s = 0.0
    for _ in range(ROUNDS):
        plain = [
            (sample.sequences, sample.gap_s - sample.sequences * sample.context_tokens * kv_token_s)
            for sample in decodes
        ]
        sequence_s = max(0.0, _slope(plain, "numbers of sequences"))
        step_s = max(LEAST_STEP_S, median(gap_s - count * sequence_s for count, gap_s in plain))
        kv_token_s = _kv_token_s(decodes, sequence_s)
    model = StepModel(step_s, sequence_s, kv_token_s, 1.0 / prompt_s, 0.0)
    error = median(abs(model.gap_s(one.sequences, one.context_tokens) / one.gap_s - 1.0) for one in decodes)
    return StepModel(step_s, sequence_s, kv_token_s, 1.0 / prompt_s, error)


def _kv_token_s(decodes: Sequence[DecodeSample], sequence_s: float) -> float:
    """What a token of context costs, by how the gaps grow with all tokens in the cache; 0: contexts did not differ."""
    points = [
        (sample.sequences * sample.context_tokens, sample.gap_s - sample.sequences * sequence_s) for sample in decodes
    ]
    lengths = {sample.context_tokens for sample in decodes}
    return max(0.0, _slope(points, "contexts")) if len(lengths) > 1 else 0.0


def _slope(points: Sequence[tuple[float, float]], of_what: str) -> float:
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in itertools.combinations(points, 2) if a[0] != b[0]]
    if not slopes:
        raise BadRequest(f"the measurements have fewer than two {of_what}", param=of_what.split()[-1])
    return median(slopes)
