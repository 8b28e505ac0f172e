"""Classes, pooling and Cohere's embeddings of real models are those that the `transformers` library computes."""

from __future__ import annotations

import base64
import struct
from pathlib import Path
from typing import Any

import pytest

from serve_app.engine import ensure_tiny_model
from tests.e2e import one_engine, prompts
from tests.e2e.reference import Reference
from tests.e2e.small_models import LABELS, write_classifier
from tests.requires import requires

PROMPTS = 4
NEAR = 1e-3  # as in test_embeddings
SETTINGS = {"dtype": "float32", "max_model_len": 2048, "kv_cache_gb": 0.25}
LONG = " ".join(prompts.text(number) for number in range(12))  # more than a block of vLLM's prefix cache


@pytest.mark.long
def test_classes_are_the_library_s_and_pooling_gives_the_same_numbers(tmp_path: Path) -> None:
    requires("vllm")
    head = write_classifier(tmp_path / "classifier")
    reference = Reference(ensure_tiny_model())
    asked = [reference.encode(prompts.text(number)) for number in range(PROMPTS)]
    chat = {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}
    order = {
        "settings": {"name": "c", "path": str(tmp_path / "classifier"), "task": "classify"} | SETTINGS,
        "asked": [
            ("classify", {"input": asked}, "a"),
            ("pooling", {"input": asked}, "a"),
            ("classify", chat, "a"),
            ("classify", {"input": 5}, "a"),
            ("embedding", {"input": "a"}, "a"),
            *(("classify", {"input": LONG}, salt) for salt in ("b", "c", "c", "b")),
        ],
    }
    answer = one_engine.run_alone(order)
    assert "classify" in answer["info"][1]
    classes, pooled, of_chat, wrong, embedded, *salted = answer["answered"]
    assert [one[0] for one in answer["answered"]] == [200, 200, 200, 400, 400, 200, 200, 200, 200]
    wanted = [reference.probabilities(prompt, head) for prompt in asked]
    for number, (found, right) in enumerate(zip(classes[1]["data"], wanted, strict=True)):
        assert found["probs"] == pytest.approx(right, abs=NEAR)
        assert (found["label"], found["index"]) == (LABELS[right.index(max(right))], number)
    assert [one["data"] for one in pooled[1]["data"]] == [pytest.approx(right, abs=NEAR) for right in wanted]
    assert classes[1]["usage"]["prompt_tokens"] == classes[2] == pooled[2] == sum(map(len, asked))
    assert sum(of_chat[1]["data"][0]["probs"]) == pytest.approx(1, abs=NEAR)
    assert wrong[1]["error"]["param"] == "input"
    assert embedded[1]["error"]["message"] == "this model does not support embeddings"
    check_salts([cached for *_, cached in salted])


@pytest.mark.long
def test_cohere_s_embeddings_are_openai_s_in_each_type() -> None:
    requires("vllm")
    texts = [prompts.text(number) for number in range(PROMPTS)]
    types = ["float", "base64", "binary", "ubinary"]
    order = {
        "settings": {"name": "e", "task": "embed"} | SETTINGS,
        "asked": [
            ("embedding", {"input": texts}, "a"),
            ("embed", {"texts": texts, "embedding_types": types}, "a"),
            ("pooling", {"input": texts}, "a"),
            ("embed", {"inputs": [{"content": [{"type": "text", "text": "a"}]}]}, "a"),
            ("embed", {"texts": "a"}, "a"),
            ("embed", {"texts": [LONG], "truncate": "NONE", "max_tokens": 8}, "a"),
            ("embed", {"texts": ["a"], "input_type": "poem"}, "a"),
            *(("embed", {"texts": [LONG]}, salt) for salt in ("b", "c", "c", "b")),
        ],
    }
    answered: list[Any] = one_engine.run_alone(order)["answered"]
    openai, cohere, pooled, mixed, wrong, too_long, unknown, *salted = answered
    assert [one[0] for one in answered] == [200, 200, 200, 200, 400, 400, 400, 200, 200, 200, 200]
    vectors = [entry["embedding"] for entry in openai[1]["data"]]
    assert [entry["data"] for entry in pooled[1]["data"]] == [pytest.approx(vector, abs=NEAR) for vector in vectors]
    found = cohere[1]["embeddings"]
    assert found["float"] == [pytest.approx(vector, abs=NEAR) for vector in vectors]
    for text, vector in zip(found["base64"], found["float"], strict=True):
        assert struct.unpack(f"<{len(vector)}f", base64.b64decode(text)) == pytest.approx(vector, abs=NEAR)
    assert [[one - 128 for one in row] for row in found["ubinary"]] == found["binary"]
    assert cohere[1]["texts"] == texts
    assert cohere[1]["meta"]["billed_units"]["input_tokens"] == cohere[2] == openai[2]
    assert len(mixed[1]["embeddings"]["float"]) == 1
    assert wrong[1]["error"]["param"] == "texts"
    assert too_long[1]["error"]["param"] == "max_tokens"
    assert unknown[1]["error"]["param"] == "input_type"
    check_salts([cached for *_, cached in salted])


def check_salts(cached: list[int]) -> None:
    """What each of two tenants finds: nothing of the other's, and its own."""
    first, other, again, back = cached
    assert (first, other) == (0, 0)
    assert min(again, back) > 0
