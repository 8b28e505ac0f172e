"""What a request is taken to cost: the client's bound until something was learned, and from then on what was."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given

from serve_app.core.estimate import EstimateSource, Estimator, ObservedUse
from serve_app.core.estimate.estimate import MIN_SEEN
from serve_app.http import request_size
from serve_app.http.request_size import RequestCost
from serve_app.types import Operation
from tests.http.test_request_size import bodies, operations

TENANT = "tenant"
MODEL = "model"


def taught(output_tokens: int, *, cut: bool = False, prompt_tokens: int = 50) -> Estimator:
    """Prompts of 100 bytes, answers of so many tokens."""
    costs = Estimator(0.8)
    for _ in range(MIN_SEEN):
        costs.observe(ObservedUse(TENANT, MODEL, 100, prompt_tokens, output_tokens, is_cut_off=cut))
    return costs


def estimated(costs: Estimator, **body: Any) -> RequestCost:
    """Of a completion."""
    return request_size.estimate(costs, Operation.COMPLETION, {"prompt": "x" * 100} | body, TENANT, MODEL, 100)


@pytest.mark.parametrize(
    ("operation", "body", "tokens", "most"),
    [
        (Operation.COMPLETION, {"prompt": "x" * 400, "max_tokens": 50}, 150, 50),
        (Operation.COMPLETION, {"prompt": "x" * 400, "max_tokens": 5000}, 5100, 5000),
        (Operation.COMPLETION, {"prompt": ["x" * 400] * 2, "max_tokens": 50, "n": 3}, 500, 300),
        (Operation.COMPLETION, {"prompt": "x" * 401}, 101 + 256, None),
        (Operation.COMPLETION, {"prompt": "", "max_tokens": -(10**30)}, 1, 0),
        (Operation.COMPLETION, {"prompt": "x" * 400, "max_tokens": -50}, 100, 0),
        (Operation.EMBEDDING, {"input": "x" * 400, "max_tokens": 50}, 100, 0),
        (Operation.RERANK, {"query": "x" * 40, "documents": ["x" * 160, "x" * 200], "max_tokens": 50}, 100, 0),
    ],
)
def test_before_anything_was_learned_a_request_is_given_what_it_asks_for(
    operation: Operation, body: dict[str, Any], tokens: int, most: int | None
) -> None:
    size = request_size.prompt_bytes(operation, body)
    cost = request_size.estimate(Estimator(0.8), operation, body, TENANT, MODEL, size)
    assert (cost.tokens, cost.max_output_tokens, cost.source) == (tokens, most, EstimateSource.PRIOR)


def test_a_bound_above_the_model_s_longest_sequence_bounds_nothing() -> None:
    """A row with `max_tokens` of a billion would wait for all KV tokens of an engine, and everybody behind it."""
    body = {"prompt": "x" * 400, "max_tokens": 10**9}
    cost = request_size.estimate(Estimator(0.8), Operation.COMPLETION, body, TENANT, MODEL, 400, longest=4096)
    assert (cost.output_tokens, cost.max_output_tokens) == (4096, 4096)


def test_what_was_learned_replaces_a_wide_bound_and_not_a_narrow_one() -> None:
    costs = taught(40)
    wide, narrow, none = (estimated(costs, **body) for body in ({"max_tokens": 900}, {"max_tokens": 7}, {}))
    assert 37 <= wide.output_tokens == none.output_tokens <= 44
    assert (narrow.output_tokens, wide.max_output_tokens, none.max_output_tokens) == (7, 900, None)
    assert wide.source is EstimateSource.TENANT
    assert 46 <= wide.prompt_tokens <= 55  # two bytes a token here, where English has four


def test_each_of_several_answers_is_given_what_one_needs() -> None:
    costs = taught(40)
    assert estimated(costs, n=3).output_tokens == 3 * estimated(costs).output_tokens


def test_answers_that_were_all_cut_off_teach_nothing_but_the_bound() -> None:
    cost = estimated(taught(40, cut=True), max_tokens=900)
    assert (cost.output_tokens, cost.source) == (900, EstimateSource.PRIOR)


def test_another_quantile_holds_for_what_comes_next() -> None:
    costs = Estimator(0.8)
    for tokens in range(1, 101):
        costs.observe(ObservedUse(TENANT, MODEL, 100, 25, tokens))
    before = estimated(costs).output_tokens
    costs.configure(0.3)
    assert estimated(costs).output_tokens < before / 2


@given(operations, bodies)
def test_any_body_costs_something_and_never_more_than_it_bounds(operation: Operation, body: dict[str, Any]) -> None:
    for costs in (Estimator(0.8), taught(40)):
        size = request_size.prompt_bytes(operation, body)
        cost = request_size.estimate(costs, operation, body, TENANT, MODEL, size)
        assert cost.tokens >= 1
        assert cost.max_output_tokens is None or cost.output_tokens <= cost.max_output_tokens
