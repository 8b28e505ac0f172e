"""How fast one engine replica computes, how long its start takes, and what its GPUs cost.

A measured step model: a step takes `step_s`, `sequence_s` for each sequence, `kv_token_s` for each token of their KV,
and the time of its prefill. Only `TINY_CPU` was measured (`benchmarks.overload`). **The others are estimates** from
data sheets, not measurements. Calibrate on your own engine before you plan with any of these.

- Decode is bound by memory bandwidth, of which an engine reaches about 0.8: a step reads the weights once and each
  sequence's KV.
- Prefill is bound by arithmetic, two operations for each parameter and token, of which an engine reaches about 0.45 on
  one GPU and 0.35 on four.
- A sequence costs its arithmetic and 20 us of host work.
- The KV cache is what 0.9 of the memory leaves beside weights and activations.
- Prices are on-demand list prices of large clouds in US dollars, rounded.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

GB = 10**9
HOST_SEQUENCE_S = 20e-6  # sampling, scheduling and detokenizing of one token


@dataclass(frozen=True, slots=True)
class EngineProfile:
    """One engine replica.

    Args:
        source: where the figures come from, in words.
        slots: sequences of its batch.
        kv_tokens: of its KV cache.
        step_s, sequence_s, kv_token_s: of a step, see the module.
        prefill_tokens_per_s: prompt tokens that a step computes.
        prefill_chunk_tokens: the most prompt tokens of one step, besides one for each sequence.
        start_s: the median of a start, from its place to its first request.
        start_sigma: of the start's lognormal distribution; 0: each takes `start_s`.
        gpus: that it takes as a whole, on one node.
        memory_bytes: that it takes of each of them.
        gpu_hour_price: of one GPU.
        prefix_cache: whether it keeps what it has computed of prompts.

    Raises:
        ValueError: a figure that no engine can have.
    """

    name: str
    source: str
    slots: int
    kv_tokens: int
    step_s: float
    sequence_s: float
    kv_token_s: float
    prefill_tokens_per_s: float
    start_s: float
    prefill_chunk_tokens: int = 2048
    start_sigma: float = 0.0
    gpus: int = 1
    memory_bytes: int = GB
    gpu_hour_price: float = 0.0
    prefix_cache: bool = True

    def __post_init__(self) -> None:
        for name in ("slots", "kv_tokens", "step_s", "prefill_tokens_per_s", "prefill_chunk_tokens", "gpus"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} of profile {self.name!r} is {getattr(self, name)}, not above 0")
        for name in ("sequence_s", "kv_token_s", "start_s", "start_sigma", "gpu_hour_price"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} of profile {self.name!r} is {getattr(self, name)}, below 0")

    def draw_start_s(self, draw: random.Random) -> float:
        """How long one start takes."""
        return self.start_s * draw.lognormvariate(0.0, self.start_sigma) if self.start_sigma else self.start_s


def _estimate(
    name: str,
    *,
    source: str,
    weights_bytes: float,
    kv_token_bytes: float,
    bytes_per_s: float,
    tokens_per_s: float,
    kv_bytes: float,
    link_s: float = 0.0,
    start_s: float,
    gpus: int = 1,
    memory_bytes: int,
    gpu_hour_price: float,
) -> EngineProfile:
    """A profile from a data sheet; all bytes are those of one GPU. `link_s`: that its GPUs exchange in a step."""
    return EngineProfile(
        name,
        f"estimate: {source}",
        slots=256,
        kv_tokens=int(kv_bytes / kv_token_bytes),
        step_s=weights_bytes / bytes_per_s + link_s,
        sequence_s=1.0 / tokens_per_s + HOST_SEQUENCE_S,
        kv_token_s=kv_token_bytes / bytes_per_s,
        prefill_tokens_per_s=tokens_per_s,
        start_s=start_s,
        start_sigma=0.15,  # starts of one image on one kind of node differ by about that
        gpus=gpus,
        memory_bytes=memory_bytes,
        gpu_hour_price=gpu_hour_price,
    )


TINY_CPU = EngineProfile(
    "tiny-cpu",
    "measured: the built-in model, three times as deep, on one CPU core (benchmarks.overload)",
    slots=8,
    kv_tokens=64 * 2048,
    step_s=2.6e-3,
    sequence_s=0.55e-3,
    kv_token_s=0.0,
    prefill_tokens_per_s=1 / 45e-6,
    start_s=25.0,
    memory_bytes=GB,
)
LLAMA_8B_L4 = _estimate(
    "8b-l4",
    source="8 billion parameters in bf16 on an NVIDIA L4: 300 GB/s, 121 TFLOPS dense, 24 GB",
    weights_bytes=16.1e9,
    kv_token_bytes=131_072,  # 32 layers, 8 KV heads of 128, keys and values
    bytes_per_s=0.8 * 300e9,
    tokens_per_s=0.45 * 121e12 / 16.1e9,
    kv_bytes=0.9 * 24e9 - 16.1e9 - 1.5e9,
    start_s=90.0,
    memory_bytes=21 * GB,
    gpu_hour_price=0.8,
)
LLAMA_8B_A100 = _estimate(
    "8b-a100",
    source="8 billion parameters in bf16 on an NVIDIA A100: 2,039 GB/s, 312 TFLOPS dense, 80 GB",
    weights_bytes=16.1e9,
    kv_token_bytes=131_072,
    bytes_per_s=0.8 * 2_039e9,
    tokens_per_s=0.45 * 312e12 / 16.1e9,
    kv_bytes=0.9 * 80e9 - 16.1e9 - 3e9,
    start_s=70.0,
    memory_bytes=72 * GB,
    gpu_hour_price=3.7,
)
LLAMA_8B_H100 = _estimate(
    "8b-h100",
    source="8 billion parameters in bf16 on an NVIDIA H100 SXM: 3,350 GB/s, 989 TFLOPS dense, 80 GB",
    weights_bytes=16.1e9,
    kv_token_bytes=131_072,
    bytes_per_s=0.8 * 3_350e9,
    tokens_per_s=0.45 * 989e12 / 16.1e9,
    kv_bytes=0.9 * 80e9 - 16.1e9 - 3e9,
    start_s=60.0,
    memory_bytes=72 * GB,
    gpu_hour_price=6.9,
)
LLAMA_70B_4_H100 = _estimate(
    "70b-4xh100",
    source="70 billion parameters in bf16, tensor parallel on four NVIDIA H100 SXM; 160 all-reduces of 15 us a step",
    weights_bytes=141e9 / 4,
    kv_token_bytes=327_680 / 4,  # 80 layers, 8 KV heads of 128
    bytes_per_s=0.8 * 3_350e9,
    tokens_per_s=0.35 * 4 * 989e12 / 141e9,
    kv_bytes=0.9 * 80e9 - 141e9 / 4 - 4e9,
    link_s=160 * 15e-6,
    start_s=180.0,
    gpus=4,
    memory_bytes=72 * GB,
    gpu_hour_price=6.9,
)
PROFILES: Mapping[str, EngineProfile] = {
    profile.name: profile for profile in (TINY_CPU, LLAMA_8B_L4, LLAMA_8B_A100, LLAMA_8B_H100, LLAMA_70B_4_H100)
}
