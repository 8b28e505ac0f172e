"""Estimates: learned per tenant and model, unmoved by odd requests, in bounded memory, told to other routers."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.core.estimate import estimate
from serve_app.core.estimate.estimate import (
    MAX_MODELS,
    MAX_TENANTS,
    MIN_SEEN,
    PRIOR_OUTPUT_TOKENS,
    EstimateSource,
    Estimator,
    ObservedUse,
    RequestCost,
    size_class,
)

TOLERANCE = 0.1  # a bucket


def use(
    tenant: str = "t",
    model: str = "m",
    prompt: int = 100,
    per_token: float = 4.0,
    output: int = 100,
    answers: int = 1,
    cut: bool = False,
) -> ObservedUse:
    return ObservedUse(tenant, model, int(prompt * per_token), prompt, output, answers, cut)


def taught(*uses: ObservedUse, times: int = MIN_SEEN) -> Estimator:
    learner = Estimator()
    for _ in range(times):
        for use in uses:
            learner.observe(use)
    return learner


uses = st.builds(
    use,
    tenant=st.sampled_from("abc"),
    model=st.sampled_from("xy"),
    prompt=st.integers(0, 200_000),
    per_token=st.floats(0.0, 10.0),
    output=st.integers(0, 200_000),
    answers=st.integers(1, 4),
    cut=st.booleans(),
)


def test_with_nothing_learned_it_is_what_is_true_of_most() -> None:
    assert Estimator().estimate("t", "m", 1001) == RequestCost(251, PRIOR_OUTPUT_TOKENS, EstimateSource.PRIOR)


def test_the_tenants_own_answers_decide_once_there_are_enough() -> None:
    learner = taught(use(output=50), times=MIN_SEEN - 1)
    assert learner.estimate("t", "m", 400).source is EstimateSource.PRIOR
    learner.observe(use(output=50))
    found = learner.estimate("t", "m", 400)
    assert found.source is EstimateSource.TENANT
    assert found.output_tokens == pytest.approx(50, rel=TOLERANCE)


def test_a_new_tenant_gets_the_models_estimate_and_a_new_model_the_prior() -> None:
    learner = taught(use("t", output=800))
    found = learner.estimate("new", "m", 400)
    assert (found.source, found.output_tokens) == (EstimateSource.MODEL, pytest.approx(800, rel=TOLERANCE))
    assert learner.estimate("t", "other", 400) == RequestCost(100, PRIOR_OUTPUT_TOKENS, EstimateSource.PRIOR)


def test_tenants_do_not_decide_for_each_other() -> None:
    learner = taught(use("short", output=10), use("long", output=2000))
    assert learner.estimate("short", "m", 400).output_tokens < 12
    assert learner.estimate("long", "m", 400).output_tokens > 1800


def test_prompts_of_another_size_have_answers_of_their_own() -> None:
    learner = taught(use(prompt=100, output=10), use(prompt=10_000, output=1000))
    assert learner.estimate("t", "m", 400).output_tokens < 12
    assert learner.estimate("t", "m", 40_000).output_tokens > 900


def test_a_size_that_was_never_seen_is_answered_from_all_of_the_tenants() -> None:
    found = taught(use(prompt=100, output=70)).estimate("t", "m", 40_000)
    assert (found.source, found.output_tokens) == (EstimateSource.TENANT, pytest.approx(70, rel=TOLERANCE))


def test_the_answers_bound_caps_the_estimate_and_nothing_else() -> None:
    learner = taught(use(output=500))
    free = learner.estimate("t", "m", 400)
    assert learner.estimate("t", "m", 400, bound=30).output_tokens == 30
    assert learner.estimate("t", "m", 400, bound=10_000) == free._replace(max_output_tokens=10_000)
    assert learner.estimate("t", "m", 400, bound=-1).output_tokens == 0


def test_short_bounds_do_not_make_unbounded_answers_look_short() -> None:
    learner = Estimator(0.8)
    for number in range(200):
        learner.observe(use(output=16, cut=True) if number % 2 else use(output=400))
    assert learner.estimate("t", "m", 400).output_tokens == pytest.approx(400, rel=TOLERANCE)


def test_where_every_answer_was_cut_the_estimate_is_not_below_the_cut() -> None:
    found = taught(use(output=3000, cut=True)).estimate("t", "m", 400)
    assert (found.source, found.output_tokens) == (EstimateSource.PRIOR, pytest.approx(3000, rel=TOLERANCE))


def test_requests_that_never_began_teach_nothing_of_answers() -> None:
    assert taught(use(output=0, cut=True)).estimate("t", "m", 400).source is EstimateSource.PRIOR


def test_several_answers_of_a_request_are_one_of_their_mean() -> None:
    found = taught(use(output=400, answers=4)).estimate("t", "m", 400)
    assert found.output_tokens == pytest.approx(100, rel=TOLERANCE)


@pytest.mark.parametrize("per_token", [1.5, 3.1, 4.0, 5.5])
def test_bytes_per_token_are_learned(per_token: float) -> None:
    learner = taught(use(prompt=1000, per_token=per_token))
    assert learner.estimate("t", "m", int(2000 * per_token)).prompt_tokens == pytest.approx(2000, rel=TOLERANCE)
    assert learner.estimate("new", "m", int(2000 * per_token)).prompt_tokens == pytest.approx(2000, rel=TOLERANCE)


def test_a_few_prompts_are_no_ratio() -> None:
    learner = taught(use(prompt=1000, per_token=2.0), times=MIN_SEEN - 1)
    assert learner.estimate("t", "m", 4000).prompt_tokens == 1000
    learner.observe(use(prompt=1000, per_token=2.0))
    assert learner.estimate("t", "m", 4000).prompt_tokens == pytest.approx(2000, rel=TOLERANCE)


def test_odd_prompts_do_not_move_the_ratio() -> None:
    learner = Estimator()
    for number in range(300):  # every tenth: a picture counted as no bytes, or a blob that is all tokens
        odd = use(prompt=5000, per_token=0.02) if number % 20 else use(prompt=100_000, per_token=1.0)
        learner.observe(odd if number % 10 == 0 else use(prompt=900, per_token=4.2))
    assert learner.estimate("t", "m", 4200).prompt_tokens == pytest.approx(1000, rel=TOLERANCE)


def test_long_prompts_decide_the_ratio_more_than_short_ones() -> None:
    learner = Estimator()
    for _ in range(40):
        for _ in range(3):
            learner.observe(use(prompt=20, per_token=2.0))
        learner.observe(use(prompt=1000, per_token=4.0))
    assert learner.estimate("t", "m", 4000).prompt_tokens == pytest.approx(1000, rel=TOLERANCE)


def test_a_tenant_that_changes_is_followed() -> None:
    learner = taught(use(output=50), times=2000)
    for _ in range(2 * estimate.HALF_LIFE):
        learner.observe(use(output=900))
    assert learner.estimate("t", "m", 400).output_tokens > 800


@settings(deadline=None)
@given(st.lists(st.integers(1, 4000), min_size=50, max_size=200), st.sampled_from([0.5, 0.8, 0.95]))
def test_the_quantile_covers_its_share_of_what_was_seen(outputs: list[int], quantile: float) -> None:
    learner = Estimator(quantile)
    for output in outputs:
        learner.observe(use(output=output))
    found = learner.estimate("t", "m", 400).output_tokens
    weights = [2 ** (number / estimate.HALF_LIFE) for number in range(len(outputs))]
    seen = list(zip(outputs, weights, strict=True))
    below = sum(weight for output, weight in seen if output <= found * (1 + TOLERANCE)) / sum(weights)
    above = sum(weight for output, weight in seen if output >= found * (1 - TOLERANCE) - 1) / sum(weights)
    assert below >= quantile - 0.001
    assert above >= 1 - quantile - 0.001


@settings(deadline=None)
@given(st.lists(uses, max_size=60), st.integers(0, 10**9), st.none() | st.integers(0, 10**6))
def test_an_estimate_is_never_negative_or_above_the_bound_and_changes_nothing(
    seen: list[ObservedUse], prompt_bytes: int, bound: int | None
) -> None:
    learner = taught(*seen, times=1)
    found = learner.estimate("a", "x", prompt_bytes, bound)
    assert found.prompt_tokens >= 0
    assert found.output_tokens >= 0
    assert bound is None or found.output_tokens <= bound
    assert learner.estimate("a", "x", prompt_bytes, bound) == found


def test_the_least_recent_tenants_are_forgotten() -> None:
    learner = Estimator()
    for number in range(MAX_TENANTS):
        learner.observe(use(f"t{number}"))
    learner.observe(use("t0"))
    learner.observe(use("one more"))
    names = {tenant for _, tenant in learner.tenants}
    assert len(learner.tenants) == MAX_TENANTS
    assert {"t0", "one more"} <= names
    assert "t1" not in names


def test_models_are_bounded_too() -> None:
    learner = Estimator()
    for number in range(2 * MAX_MODELS):
        learner.observe(use(model=f"m{number}"))
    assert len(learner.models) == MAX_MODELS


def test_a_use_is_never_negative() -> None:
    for wrong in ({"output": -1}, {"prompt": -1}, {"answers": 0}):
        with pytest.raises(ValueError, match="out of range"):
            use(**wrong)  # type: ignore[arg-type]


def test_sizes_are_few_and_grow_with_the_prompt() -> None:
    sizes = [size_class(1 << octave) for octave in range(40)]
    assert sizes == sorted(sizes)
    assert set(sizes) == set(range(8))
    assert size_class(0) == 0
