"""The bytes of vLLM's KV cache, as computed from its configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.requires import requires

requires("vllm")

from vllm.engine.arg_utils import AsyncEngineArgs  # noqa: E402

from serve_app.engine.tiny_model import HEAD_SIZE, KV_HEADS, LAYERS, ensure_tiny_model  # noqa: E402
from serve_app.engine.vllm_adapter.kv_cache import block_bytes  # noqa: E402

TOKENS = 16  # of a block


@pytest.fixture(scope="module")
def model() -> Path:
    return ensure_tiny_model()


def bytes_with(model: Path, **more: Any) -> int:
    arguments = {"model": str(model), "dtype": "float32", "block_size": TOKENS, "max_model_len": 512}
    return block_bytes(AsyncEngineArgs(**(arguments | more)).create_engine_config())


def test_a_block_has_keys_and_values_of_its_tokens_in_every_layer(model: Path) -> None:
    assert bytes_with(model) == TOKENS * 2 * LAYERS * KV_HEADS * HEAD_SIZE * 4


def test_half_the_bytes_for_numbers_of_half_the_size(model: Path) -> None:
    assert bytes_with(model, dtype="bfloat16") * 2 == bytes_with(model)


def test_ranks_share_the_heads(model: Path) -> None:
    assert bytes_with(model, tensor_parallel_size=2) == bytes_with(model)
