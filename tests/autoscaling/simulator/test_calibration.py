"""A fitted step model is that of the engine that was measured, whatever disturbed a few measurements."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoscaling.simulator import DecodeSample, PrefillSample, StepModel, fitted
from serve_app.errors import BadRequest
from tests.effort import examples

COUNTS = (1, 2, 4, 8, 16)
CONTEXTS = (100.0, 1000.0)


def measured(truth: StepModel, noise: float = 0.0, seed: int = 1) -> tuple[list[PrefillSample], list[DecodeSample]]:
    """What an engine of this model shows. `noise`: a part by which each measurement is off."""
    draw = random.Random(seed)

    def off(seconds: float) -> float:
        return seconds * (1.0 + draw.uniform(-noise, noise))

    prefills = [
        PrefillSample(tokens, off(0.01 + truth.step_s + tokens / truth.prefill_tokens_per_s))
        for tokens in (128, 512, 2048)
        for _ in range(3)
    ]
    decodes = [
        DecodeSample(count, context, off(truth.gap_s(count, context)))
        for count, context in itertools.product(COUNTS, CONTEXTS)
    ]
    return prefills, decodes


@given(
    step_s=st.floats(1e-3, 0.1),
    sequence_s=st.floats(1e-5, 1e-2),
    kv_token_s=st.floats(1e-8, 1e-6),
    prefill=st.floats(100.0, 50_000.0),
)
@settings(max_examples=examples(60))
def test_without_noise_it_is_the_engines(step_s: float, sequence_s: float, kv_token_s: float, prefill: float) -> None:
    truth = StepModel(step_s, sequence_s, kv_token_s, prefill, 0.0)
    found = fitted(*measured(truth))
    assert found.prefill_tokens_per_s == pytest.approx(prefill, rel=1e-6)
    assert found.error < 0.05
    for count, context in itertools.product((1, 12, 32), (50.0, 500.0)):
        assert found.gap_s(count, context) == pytest.approx(truth.gap_s(count, context), rel=0.1)


def test_a_few_measurements_that_somebody_disturbed_change_little() -> None:
    truth = StepModel(0.02, 5e-4, 0.0, 8000.0, 0.0)
    prefills, decodes = measured(truth, noise=0.02)
    prefills[4] = prefills[4]._replace(first_token_s=9.0)
    decodes[3] = decodes[3]._replace(gap_s=0.9)
    found = fitted(prefills, decodes)
    assert found.prefill_tokens_per_s == pytest.approx(8000.0, rel=0.1)
    assert found.step_s == pytest.approx(0.02, rel=0.1)
    assert found.gap_s(16, 100.0) == pytest.approx(truth.gap_s(16, 100.0), rel=0.1)
    assert found.error < 0.05


def test_what_differs_too_little_is_refused_with_what_lacks() -> None:
    prefills, decodes = measured(StepModel(0.02, 5e-4, 0.0, 8000.0, 0.0))
    with pytest.raises(BadRequest, match="fewer than two prompt lengths"):
        fitted(prefills[:3], decodes)
    with pytest.raises(BadRequest, match="fewer than two numbers of sequences"):
        fitted(prefills, decodes[:2])
    with pytest.raises(BadRequest, match="long prompts took no longer"):
        fitted([PrefillSample(128, 0.5), PrefillSample(2048, 0.4)], decodes)


def test_with_one_length_of_context_its_cost_is_with_the_sequences() -> None:
    truth = StepModel(0.02, 5e-4, 1e-6, 8000.0, 0.0)
    prefills, decodes = measured(truth)
    found = fitted(prefills, [sample for sample in decodes if sample.context_tokens == CONTEXTS[1]])
    assert found.kv_token_s == 0.0
    assert found.sequence_s == pytest.approx(5e-4 + 1e-6 * CONTEXTS[1], rel=1e-3)
