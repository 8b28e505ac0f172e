"""How much memory an engine requests, and the KV pool that fits into its grant: pure functions of the settings.

What a rank needs beside its KV pool is estimated from the model's shape before its first start. Later starts ask for
what was measured (`engine.start.memory_history`).

Invariant: weights, KV pool and vLLM's overhead fit into the grant, for each rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from serve_app.engine.start.engine_args import kv_cache_bytes
from serve_app.engine.start.environment import GRAMMAR_CACHE_MB, Platform
from serve_app.errors import ConfigError
from serve_app.settings import GB, ModelSettings

GIB = 2**30
# Besides weights and KV on a GPU: CUDA context, NCCL and graphs; and the least with activations of a step, for a model
# whose shape is not known.
GPU_BASE_BYTES = 2 * GIB
GPU_OVERHEAD_BYTES = 3 * GIB
# Compiled grammars, and the process that compiles each of them first (0.3 GiB resident).
GRAMMAR_BYTES = GRAMMAR_CACHE_MB * 2**20 + 320 * 2**20
# Besides weights and KV: two Python processes with torch and vLLM in each (2.0 GiB resident measured, tiny model).
CPU_OVERHEAD_BYTES = int(2.5 * GIB) + GRAMMAR_BYTES
# The same for a model whose shape is known, and of each entry of its vocabulary: tokenizers in two processes and what
# grammars are compiled with in three. Measured with eight shallow models, see docs/explanation/memory.md.
CPU_BASE_BYTES = int(1.9 * GB) + GRAMMAR_CACHE_MB * 2**20
VOCABULARY_ENTRY_BYTES = 6_600
COMPILER_BYTES = int(0.4 * GB)  # of a C++ compiler, at the first start on a machine: torch compiles its kernels there
SIMULATED_BYTES = GIB // 4  # the process of a simulated engine; `memory_gb` sets the memory of the engine it simulates
# Tokens of a step where `max_num_batched_tokens` is not set: vLLM's own default, of a GPU of 70 GB and more.
STEP_TOKENS: Mapping[Platform, int] = {"cpu": 2048, "gpu": 8192}
ELEMENT_BYTES: Mapping[Any, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
MEASURED_MARGIN = 1.03  # of a measured need: pages that come and go between two measurements


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """What a rank needs beside its KV pool, in bytes. `measured`: in an earlier run; else it is an estimate."""

    fixed_bytes: int
    measured: bool = False

    def __str__(self) -> str:
        return f"{self.fixed_bytes / GB:.2f} GB ({'measured' if self.measured else 'estimated'})"


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the memory of a step depends on, of a model's `config.json`. Widths and the vocabulary are in elements."""

    vocabulary: int
    hidden: int
    inner: int  # of the MLP that a token passes through
    stored_bytes: int  # of one element of the weights
    loaded_bytes: int  # of one element as it is computed with

    @classmethod
    def of(cls, config: Mapping[str, Any], dtype: str) -> ModelShape | None:
        """The shape; None: the configuration does not say it. `dtype`: the model's setting."""
        text = config.get("text_config")
        found = text if isinstance(text, Mapping) else config
        vocabulary = found.get("vocab_size")
        hidden = found.get("hidden_size")
        if not (isinstance(vocabulary, int) and isinstance(hidden, int)):
            return None
        experts = found.get("num_experts_per_tok")
        inner = found.get("moe_intermediate_size") if isinstance(experts, int) else None
        inner = inner or found.get("intermediate_size") or 4 * hidden
        names = (found.get("dtype"), found.get("torch_dtype"), config.get("dtype"), config.get("torch_dtype"))
        stored = next((ELEMENT_BYTES[name] for name in names if name in ELEMENT_BYTES), 2)
        quantized = found.get("quantization_config") or config.get("quantization_config")
        loaded = stored if quantized else ELEMENT_BYTES.get(dtype, stored)
        return cls(vocabulary, hidden, int(inner) * (experts if isinstance(experts, int) else 1), stored, loaded)

    def weights_bytes(self, stored_bytes: int) -> int:
        """Of all weights in memory, by their bytes in files."""
        return stored_bytes * self.loaded_bytes // self.stored_bytes

    def vocabulary_bytes(self) -> int:
        """Of embedding and head: vLLM's CPU build keeps a second copy of both, also where they are one in the files."""
        return 2 * self.vocabulary * self.hidden * self.loaded_bytes

    def step_bytes(self, tokens: int) -> int:
        """Activations of a step of so many tokens: in a layer, its residual, inputs and outputs, and its MLP."""
        return tokens * (8 * self.hidden + 4 * self.inner) * self.loaded_bytes

    def logits_bytes(self, sequences: int) -> int:
        """Of a step that samples for so many sequences: logits, probabilities and a sorted copy, in float32."""
        return 3 * 4 * sequences * self.vocabulary


def memory_request(
    settings: ModelSettings, platform: Platform, need: MemoryNeed, device_bytes: int | None
) -> tuple[int, int]:
    """The memory to request for each rank, in bytes: the wanted and the least amount.

    With `memory_gb`: exactly that. Else with `kv_cache_gb`: weights, overhead and `kv_cache_gb`, at least
    `kv_cache_min_gb`. Else: the share `gpu_memory_utilization` of the device, as vLLM itself would take.

    Args:
        need: of a rank beside its KV pool.
        device_bytes: of one device; None: not known.

    Raises:
        ConfigError: no setting determines the amount.
    """
    if settings.memory_gb is not None:
        asked = round(settings.memory_gb * GB)
        return asked, asked
    if settings.engine == "simulated":
        return SIMULATED_BYTES, SIMULATED_BYTES
    fixed = need.fixed_bytes
    kv_bytes = kv_cache_bytes(settings, platform)
    if kv_bytes is not None:
        wanted = fixed + kv_bytes
    elif device_bytes is not None:
        wanted = int(device_bytes * settings.gpu_memory_utilization)
    else:
        raise ConfigError(
            f"memory_gb or kv_cache_gb of {settings.name}: set one of them, since the memory of its device is not "
            "known here",
            param="memory_gb",
        )
    least_gb = settings.kv_cache_min_gb
    return wanted, wanted if least_gb is None else min(wanted, fixed + round(least_gb * GB))


def estimated_need(
    settings: ModelSettings, platform: Platform, weights_bytes: int, config: Mapping[str, Any] | None
) -> MemoryNeed:
    """What a rank needs beside its KV pool, before any of it was measured.

    Args:
        weights_bytes: of the whole model, as stored.
        config: the model's `config.json`; None or empty: its shape is not known.
    """
    shape = None if settings.engine == "simulated" else ModelShape.of(config or {}, settings.dtype)
    if shape is None:
        overhead = CPU_OVERHEAD_BYTES if platform == "cpu" else GPU_OVERHEAD_BYTES
        return MemoryNeed(overhead + -(-weights_bytes // settings.ranks))
    tokens = settings.max_num_batched_tokens or STEP_TOKENS[platform]
    if platform == "gpu":
        step = shape.step_bytes(tokens) // settings.tensor_parallel_size + shape.logits_bytes(settings.engine_seqs)
        weights = -(-shape.weights_bytes(weights_bytes) // settings.ranks)
        return MemoryNeed(max(GPU_OVERHEAD_BYTES, GPU_BASE_BYTES + step) + weights)
    weights = shape.weights_bytes(weights_bytes) + shape.vocabulary_bytes()
    step = (weights + shape.step_bytes(tokens)) // settings.ranks + shape.logits_bytes(settings.engine_seqs)
    return MemoryNeed(CPU_BASE_BYTES + COMPILER_BYTES + step + VOCABULARY_ENTRY_BYTES * shape.vocabulary)


def kv_bytes_of(settings: ModelSettings, need: MemoryNeed, granted_bytes: int) -> int:
    """The KV pool of a rank with this grant, in bytes.

    Raises:
        ConfigError: the grant leaves no bytes for it.
    """
    left = granted_bytes - need.fixed_bytes
    if left <= 0:
        raise ConfigError(
            f"memory_gb of {settings.name}: {granted_bytes} bytes a rank leave nothing for the KV cache beside weights "
            f"and overhead ({need.fixed_bytes} bytes)",
            param="memory_gb",
        )
    return left
