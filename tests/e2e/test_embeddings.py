"""A pooling model embeds as the `transformers` library does: the last token's hidden state, normalised."""

from __future__ import annotations

import math

import pytest

from serve_app.engine import ensure_tiny_model
from tests.e2e import one_engine, prompts
from tests.e2e.reference import Reference
from tests.requires import requires

PROMPTS = 6
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
