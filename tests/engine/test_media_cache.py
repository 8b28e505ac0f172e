"""An engine's processed media stay in front of EngineCore."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.requires import requires

requires("vllm")

from vllm.multimodal.cache import factories  # noqa: E402

from serve_app.engine.vllm_adapter.media_cache import keep_in_front  # noqa: E402


@pytest.mark.parametrize("chosen", ["lru", "shm"])
def test_neither_engine_core_nor_a_worker_has_a_cache_of_media(chosen: str) -> None:
    media = SimpleNamespace(mm_processor_cache_gb=0.1, mm_processor_cache_type=chosen)
    model = SimpleNamespace(
        supports_multimodal_inputs=True, multimodal_config=media, get_multimodal_config=lambda: media
    )
    parallel = SimpleNamespace(_api_process_count=1, data_parallel_size=1, data_parallel_external_lb=False)
    config: Any = SimpleNamespace(model_config=model, parallel_config=parallel)
    keep_in_front(config)
    assert type(factories.processor_cache_from_config(config)).__name__ == "MultiModalProcessorOnlyCache"
    assert factories.engine_receiver_cache_from_config(config) is None
    assert factories.worker_receiver_cache_from_config(config, None) is None


def test_a_model_that_reads_text_alone_has_nothing_to_keep() -> None:
    config = SimpleNamespace(model_config=SimpleNamespace(multimodal_config=None))
    keep_in_front(config)
    assert config.model_config.multimodal_config is None
