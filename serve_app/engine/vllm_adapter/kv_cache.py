"""The size of vLLM's KV cache in bytes; vLLM reports blocks and tokens only.

A block holds keys and values (one latent for both with MLA) of its tokens, in every attention layer, on every rank. For
a model whose layers differ (sliding windows, state spaces), the result assumes that all layers are alike.
"""

from __future__ import annotations

from vllm.config import VllmConfig
from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype


def block_bytes(config: VllmConfig) -> int:
    """Bytes of one block, over all ranks."""
    model = config.model_config
    parallel = config.parallel_config
    cache = config.cache_config
    vectors = (1 if model.use_mla else 2) * model.get_num_kv_heads(parallel)
    number_bytes = int(kv_cache_dtype_str_to_dtype(cache.cache_dtype, model).itemsize)
    of_layer = cache.block_size * vectors * model.get_head_size() * number_bytes
    layers = model.get_total_num_hidden_layers()  # a stage of a pipeline has a part of them
    return of_layer * layers * parallel.tensor_parallel_size
