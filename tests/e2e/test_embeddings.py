"""A pooling model embeds as the `transformers` library does: the last token's hidden state, normalised. A score of two
texts is the cosine of their embeddings."""

from __future__ import annotations

import math
from typing import Any

import pytest

from serve_app.engine import ensure_tiny_model
from tests.e2e import one_engine, prompts
from tests.e2e.reference import Reference
from tests.requires import requires

PROMPTS = 6
LONG = [16 + number % 224 for number in range(160)]  # ten blocks of vLLM's prefix cache
NEAR = 1e-3  # of each component of a unit vector; float32 sums in another order agree to 1e-6


@pytest.mark.long
def test_embeddings_equal_the_librarys_and_scores_are_their_cosines() -> None:
    requires("vllm")
    reference = Reference(ensure_tiny_model())
    asked = [reference.encode(prompts.text(number)) for number in range(PROMPTS)]
    settings = {"name": "e", "task": "embed", "dtype": "float32", "max_model_len": 2048, "kv_cache_gb": 0.25}
    texts = [prompts.text(number) for number in range(PROMPTS)]
    scores: list[tuple[Any, ...]] = [
        ({"queries": texts[0], "documents": texts[1:]}, "a"),
        ({"queries": texts[:3], "items": texts[3:]}, "a"),
        ({"query": texts[0], "documents": texts, "top_n": 2}, "a"),
        ({"queries": texts[0], "documents": texts[1:]}, "a", True),
        ({"query": texts[0], "documents": texts, "top_n": 2}, "a", True),
    ]
    parts: list[Any] = [{"type": "text", "text": "a"}, {"type": "text", "text": 5}, {"type": "none"}, 5, None]
    bodies = [{"messages": [{"role": "user", "content": [part]}]} for part in parts]
    order = {"settings": settings, "prompts": asked, "max_tokens": 1, "scores": scores, "bodies": bodies}
    answer = one_engine.run_alone(order)
    assert answer["statuses"] == [200, 400, 400, 400, 400]
    assert "embed" in answer["info"][1]
    for prompt, embedding in zip(asked, answer["embeddings"], strict=True):
        assert math.isclose(math.hypot(*embedding), 1.0, abs_tol=NEAR)
        assert embedding == pytest.approx(reference.embedding(prompt), abs=NEAR)
    check_scores(answer["embeddings"], answer["scored"], [len(prompt) for prompt in asked])


def check_scores(embeddings: list[list[float]], scored: list[Any], lengths: list[int]) -> None:
    def cosine(first: int, other: int) -> float:
        return sum(a * b for a, b in zip(embeddings[first], embeddings[other], strict=True))

    each, pairs, best, *later = scored
    assert [status for status, *_ in scored] == [200] * 5
    of_first = [cosine(0, number) for number in range(PROMPTS)]
    assert [row["score"] for row in each[1]["data"]] == pytest.approx(of_first[1:], abs=NEAR)
    assert [row["score"] for row in pairs[1]["data"]] == pytest.approx([cosine(n, n + 3) for n in range(3)], abs=NEAR)
    ranked = sorted(range(PROMPTS), key=lambda number: -of_first[number])[:2]
    assert [row["index"] for row in best[1]["results"]] == ranked
    assert [row["relevance_score"] for row in best[1]["results"]] == pytest.approx(
        [of_first[n] for n in ranked], abs=NEAR
    )
    assert each[1]["usage"]["prompt_tokens"] == each[2] == sum(lengths), "each text is read once"
    assert pairs[2] == sum(lengths)
    assert best[2] == sum(lengths) + lengths[0]
    for whole, part in zip((each, best), later, strict=True):
        assert part[2] == part[1]["usage"]["prompt_tokens"] == part[1]["usage"]["total_tokens"]
        assert part[2] == whole[2] - lengths[0], "an earlier part has counted the query"
        same = [{**one[1], "id": "", "created": 0, "usage": {}} for one in (whole, part)]
        assert same[0] == same[1]


@pytest.mark.long
def test_embeddings_and_scores_find_the_prefix_of_their_own_tenant_cached_and_no_other_s() -> None:
    """Each has a salt of its own; without one the first call of a tenant would find what another has embedded."""
    requires("vllm")
    settings = {"name": "e", "task": "embed", "dtype": "float32", "max_model_len": 2048, "kv_cache_gb": 0.25}
    text = " ".join(prompts.text(number) for number in range(12))  # more than a block of vLLM's prefix cache
    bodies = {"queries": "who?", "documents": [text]}, {"query": "who?", "documents": [text]}
    scores = [(body, salt) for body in bodies for salt in ("c", "d", "d", "c")]
    order = {"settings": settings, "prompts": [LONG], "max_tokens": 1, "salts": ["a", "b", "b", "a"], "scores": scores}
    answer = one_engine.run_alone(order)
    first, other, again, back = answer["cached"]
    assert (first, other) == (0, 0)
    assert min(again, back) > 0
    cached = [found for *_, found in answer["scored"]]
    assert cached[:2] == [0, 0]
    assert min(cached[2:]) > 0, "the texts that a tenant has scored, it finds when it reranks"
