"""The blocks of prompts that a simulated engine holds: what is found, what goes first, and what it spares an engine."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoscaling.simulator.engine import SimulatedBatch, SimulatedSequence
from autoscaling.simulator.prefix_cache import BLOCK_TOKENS, PrefixCache
from autoscaling.simulator.profiles import EngineProfile
from tests.effort import examples

PROFILE = EngineProfile("small", "of the tests", 4, 20 * BLOCK_TOKENS, 0.01, 0.0, 0.0, 10_000.0, 5.0, 100_000)
PROMPTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), max_size=40)


def blocks_of(path: list[int]) -> tuple[str, ...]:
    """Hashes of blocks, each with all before it."""
    return tuple("/".join(map(str, path[: end + 1])) for end in range(len(path)))


@settings(max_examples=examples(200))
@given(prompts=PROMPTS, most=st.integers(0, 12))
def test_what_is_found_was_used_and_is_never_more_than_the_cache_holds(prompts: list[list[int]], most: int) -> None:
    cache = PrefixCache(most * BLOCK_TOKENS)
    used: set[str] = set()
    for prompt in map(blocks_of, prompts):
        found = cache.cached_tokens(prompt) // BLOCK_TOKENS
        assert used.issuperset(prompt[:found])
        cache.add(prompt)
        assert cache.cached_tokens(prompt) == min(len(prompt), most) * BLOCK_TOKENS
        used.update(prompt)
        assert len(cache) <= most


@settings(max_examples=examples(100))
@given(prompts=PROMPTS)
def test_a_cache_with_room_for_all_finds_every_block_that_was_used(prompts: list[list[int]]) -> None:
    cache = PrefixCache(10_000 * BLOCK_TOKENS)
    used: set[str] = set()
    for prompt in map(blocks_of, prompts):
        known = next((place for place, block in enumerate(prompt) if block not in used), len(prompt))
        assert cache.cached_tokens(prompt) == known * BLOCK_TOKENS
        cache.add(prompt)
        used.update(prompt)


def test_the_prompt_that_was_used_least_recently_goes_first_and_its_end_before_its_beginning() -> None:
    cache = PrefixCache(4 * BLOCK_TOKENS)
    first = blocks_of([0, 0])
    second = blocks_of([1, 1])
    for prompt in (first, second, first):
        cache.add(prompt)
    cache.add(blocks_of([2]))
    assert [cache.cached_tokens(prompt) // BLOCK_TOKENS for prompt in (first, second)] == [2, 1]


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_an_engine_computes_a_shared_beginning_once(prefix_cache: bool) -> None:
    engine = SimulatedBatch(replace(PROFILE, prefix_cache=prefix_cache))
    taken = []
    for last in (0, 1):
        now = 100.0 * last
        sequence = SimulatedSequence(4 * BLOCK_TOKENS, 2, prefix_blocks=blocks_of([7, 7, 7, last]))
        engine.add(sequence, now)
        engine.advance(now)
        assert engine.due is not None
        taken.append(engine.due - now)
        while engine.due is not None:
            engine.advance(engine.due)
    spared = 3 * BLOCK_TOKENS if prefix_cache else 0
    assert taken[0] - taken[1] == pytest.approx(spared / PROFILE.prefill_tokens_per_s)
    assert engine.cached_tokens == spared


def test_one_token_of_a_known_prompt_is_computed() -> None:
    engine = SimulatedBatch(PROFILE)
    for at in (0.0, 100.0):
        engine.add(SimulatedSequence(2 * BLOCK_TOKENS, 1, prefix_blocks=blocks_of([3, 3])), at)
        while engine.due is not None:
            engine.advance(engine.due)
    assert engine.cached_tokens == 2 * BLOCK_TOKENS - 1


def test_a_stopped_request_finds_what_it_had_computed() -> None:
    engine = SimulatedBatch(PROFILE)
    first = SimulatedSequence(1000, 50, mark=20, request="r")
    engine.add(first, 0.0)
    now = 0.0
    for _ in range(3):  # its prompt, its first token, its mark
        now = engine.due or 0.0
        engine.advance(now)
    engine.cancel(first, now)
    assert first.produced >= 20
    again = SimulatedSequence(1000, 50, produced=first.produced, request="r")
    engine.add(again, now)
    while engine.due is not None:
        engine.advance(engine.due)
    assert again.has_ended
    assert engine.cached_tokens == 1000 + first.produced - 1


def test_of_stopped_requests_the_first_makes_room() -> None:
    cache = PrefixCache(100)
    for request in ("a", "b", "c"):
        cache.keep(request, 40)
    assert [cache.take(request) for request in ("a", "b", "c", "c")] == [0, 40, 40, 0]
