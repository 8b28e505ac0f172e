"""Where an engine keeps the media that it has processed: in front alone, from where each request has them.

By default vLLM sends a medium to EngineCore with the first request that has it, and then only its hash: it relies on
the order in which requests were rendered. Here a request may wait after that: for its grammar, its turn, or while what
it has produced elsewhere is made again. Another one with the same medium could reach EngineCore before it, and fail.
"""

from __future__ import annotations

from typing import Any

FRONT = "processor_only"  # vLLM's name of that cache, which it takes by itself where it has several front halves


def keep_in_front(config: Any) -> None:
    """Set this in vLLM's `VllmConfig`; without effect on a model that reads no media."""
    media = config.model_config.multimodal_config
    if media is not None:
        media.mm_processor_cache_type = FRONT
