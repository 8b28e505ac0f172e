"""A pooling model embeds as the `transformers` library does: the last token's hidden state, normalised."""

from __future__ import annotations

import math

import pytest

from serve_app.engine import ensure_tiny_model
from tests.e2e import one_engine, prompts
from tests.e2e.reference import Reference
from tests.requires import requires

PROMPTS = 6
LONG = [16 + number % 224 for number in range(160)]  # ten blocks of vLLM's prefix cache
NEAR = 1e-3  # of each component of a unit vector; float32 sums in another order agree to 1e-6


@pytest.mark.long
def test_embeddings_equal_the_librarys() -> None:
    requires("vllm")
    reference = Reference(ensure_tiny_model())
    asked = [reference.encode(prompts.text(number)) for number in range(PROMPTS)]
    settings = {"name": "e", "task": "embed", "dtype": "float32", "max_model_len": 2048, "kv_cache_gb": 0.25}
    answer = one_engine.run_alone({"settings": settings, "prompts": asked, "max_tokens": 1})
    assert "embed" in answer["info"][1]
    for prompt, embedding in zip(asked, answer["embeddings"], strict=True):
        assert math.isclose(math.hypot(*embedding), 1.0, abs_tol=NEAR)
        assert embedding == pytest.approx(reference.embedding(prompt), abs=NEAR)


@pytest.mark.long
def test_embeddings_find_the_prefix_of_their_own_tenant_cached_and_no_other_s() -> None:
    """Each has a salt of its own; without one the first call of a tenant would find what another has embedded."""
    requires("vllm")
    settings = {"name": "e", "task": "embed", "dtype": "float32", "max_model_len": 2048, "kv_cache_gb": 0.25}
    order = {"settings": settings, "prompts": [LONG], "max_tokens": 1, "salts": ["a", "b", "b", "a"]}
    first, other, again, back = one_engine.run_alone(order)["cached"]
    assert (first, other) == (0, 0)
    assert min(again, back) > 0
