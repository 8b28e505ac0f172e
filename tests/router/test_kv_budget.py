"""A request's KV tokens: whole blocks, asked for before they are needed, and never more than it can come to use."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from serve_app.core.kv_budget import KV_REQUEST_BLOCKS, LEAD_STEPS, KvBudget
from serve_app.core.queue import Arrival
from serve_app.router import RequestRuns
from serve_app.transport import EngineInfo, TokenUsage
from serve_app.types import RequestClass

BLOCK = 16
POOL = 100_000
INFO = EngineInfo("model", ["generate"], 4096, 8, POOL, POOL * 100, kv_block_tokens=BLOCK)


def asked_for(budget: KvBudget, *made: int) -> list[int]:
    """What is asked for while the engine makes so many tokens each time."""
    return [more for tokens in made if (more := budget.on_output(tokens))]


def arrival(prompt: int, output: int, slots: int = 1) -> Arrival:
    return Arrival("r", RequestClass.NORMAL, "t", slots, cost_tokens=prompt + output, prompt_tokens=prompt)


def test_more_is_asked_for_some_steps_before_it_is_needed() -> None:
    budget = KvBudget(arrival(16, 48), INFO)
    assert asked_for(budget, 48 - LEAD_STEPS) == []
    assert asked_for(budget, 1) == [KV_REQUEST_BLOCKS * BLOCK]
    assert budget.tokens == 64 + KV_REQUEST_BLOCKS * BLOCK


def test_the_tokens_until_the_next_request_are_known_before() -> None:
    budget = KvBudget(arrival(16, 48), INFO)
    for _ in range(5):
        until = budget.until_request
        assert asked_for(budget, *[1] * (until - 1)) == []
        assert len(asked_for(budget, 1)) == 1


def test_a_request_that_is_given_all_it_asks_for_never_asks_for_more() -> None:
    budget = KvBudget(arrival(10, 100), INFO, max_output_tokens=100)
    assert asked_for(budget, *[1] * 100) == []


def test_it_grows_up_to_its_bound_and_no_further() -> None:
    budget = KvBudget(arrival(16, 16), INFO, max_output_tokens=200)
    asked = asked_for(budget, *[1] * 200)
    assert budget.tokens == 224
    assert sum(asked) == 224 - 32


def test_what_was_asked_for_once_is_not_asked_for_again() -> None:
    budget = KvBudget(arrival(16, 16), INFO)
    made = 16 + KV_REQUEST_BLOCKS * BLOCK - LEAD_STEPS
    assert asked_for(budget, *[1] * made) == [KV_REQUEST_BLOCKS * BLOCK]


def test_a_continued_run_begins_with_prompt_and_output_so_far_and_counts_only_its_own() -> None:
    within = KvBudget(replace(arrival(16, 480), produced_tokens=160), INFO)
    assert within.tokens == 16 + 480  # the estimate still covers the whole answer
    assert asked_for(within, 320 - LEAD_STEPS) == []
    assert within.output_tokens == 320 - LEAD_STEPS
    beyond = KvBudget(replace(arrival(16, 16), produced_tokens=160), INFO)
    assert beyond.tokens == 16 + 160
    assert asked_for(beyond, 1) == [KV_REQUEST_BLOCKS * BLOCK]


@given(
    st.integers(0, 3000),
    st.integers(0, 3000),
    st.integers(1, 8),
    st.lists(st.integers(1, 400), max_size=50),
    st.none() | st.integers(0, 6000),
)
def test_tokens_cover_what_was_made_ahead_of_it_while_the_bound_is_kept(
    prompt: int, output: int, slots: int, made: list[int], most: int | None
) -> None:
    budget = KvBudget(arrival(prompt, output, slots), INFO, None if most is None else max(most, output))
    bound = None if most is None else prompt + max(most, output)
    total = 0
    for tokens in made:
        if bound is not None and prompt + total + tokens > bound:
            break
        total += tokens
        budget.on_output(tokens)
        assert budget.tokens % BLOCK == 0
        assert budget.tokens >= min(prompt + total, INFO.max_model_len * slots)
        assert bound is None or budget.tokens <= max(bound, 1) + (slots + 1) * BLOCK


def test_a_prompt_that_is_longer_than_its_estimate_is_asked_for_as_soon_as_it_is_counted() -> None:
    budget = KvBudget(arrival(16, 48), INFO, max_output_tokens=48)
    budget.correct_prompt(1600)
    first, *later = asked_for(budget, *[1] * 48)
    assert first >= 1600 - 64
    assert first + sum(later) == 1600 - 16
    assert budget.tokens == 1600 + 48
    budget.correct_prompt(1600)
    assert asked_for(budget, 0) == []


def test_a_prompt_that_is_shorter_than_its_estimate_leaves_the_rest_to_the_output() -> None:
    budget = KvBudget(arrival(1600, 16), INFO)
    budget.correct_prompt(16)
    assert asked_for(budget, *[1] * 1000) == []


def test_a_continued_run_is_bounded_by_the_prompt_as_the_engine_of_the_first_run_has_counted_it() -> None:
    """The prompt was estimated at 21 tokens and counted as 1,600: bounded by the estimate, the second run asked for
    nothing, whatever it produced."""
    runs = RequestRuns()
    first = arrival(21, 16)
    stopped: Any = SimpleNamespace(prompt=TokenUsage(1600), tokens=80)
    runs.to_continue = stopped
    budget = KvBudget(replace(runs.with_counted_prompt(first), produced_tokens=stopped.tokens), INFO, 200)
    asked_for(budget, *[1] * 120)
    assert 1600 + 200 <= budget.tokens < 1600 + 200 + BLOCK
