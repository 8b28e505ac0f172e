"""How much memory an engine asks for, and what it does with what it gets: pure functions of the settings.

Invariant: weights, KV pool and what vLLM needs besides fit into what was granted, rank by rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from serve_app.engine.environment import GRAMMAR_CACHE_MB, Platform
from serve_app.errors import ConfigError
from serve_app.settings import DEFAULT_KV_CACHE_GB, ModelSettings

GIB = 2**30
# Besides weights and KV: activations of a step, CUDA graphs, NCCL; a rank's process and its CUDA context.
GPU_OVERHEAD_BYTES = 3 * GIB
# Compiled grammars, and the process that compiles each of them first (0.3 GiB resident).
GRAMMAR_BYTES = GRAMMAR_CACHE_MB * 2**20 + 320 * 2**20
# Besides weights and KV: two Python processes with torch and vLLM in each (2.0 GiB resident measured, tiny model).
CPU_OVERHEAD_BYTES = int(2.5 * GIB) + GRAMMAR_BYTES
SIMULATED_BYTES = GIB // 4  # the process of a simulated engine; the memory of what it stands for is `memory_gb`


@dataclass(frozen=True, slots=True)
class Ask:
    """What an engine asks for, in bytes per rank."""

    wanted_bytes: int
    least_bytes: int


def memory_ask(settings: ModelSettings, platform: Platform, weights_bytes: int, device_bytes: int | None) -> Ask:
    """What to ask for each rank.

    `memory_gb` is taken as it is. Without it: weights and overhead, and `kv_cache_gb` where that is set, down to
    `kv_cache_min_gb`; where it is not, the share `gpu_memory_utilization` of the device, as vLLM itself would take it.

    Args:
        weights_bytes: of the whole model.
        device_bytes: of one device, where it is known; None: not known.

    Raises:
        ConfigError: nothing says how much it is.
    """
    if settings.memory_gb is not None:
        asked = int(settings.memory_gb * GIB)
        return Ask(asked, asked)
    if settings.engine == "simulated":
        return Ask(SIMULATED_BYTES, SIMULATED_BYTES)
    fixed = fixed_bytes(settings, platform, weights_bytes)
    wanted_gb = settings.kv_cache_gb
    if wanted_gb is None and platform == "cpu":
        wanted_gb = DEFAULT_KV_CACHE_GB
    if wanted_gb is not None:
        least_gb = min(wanted_gb, settings.kv_cache_min_gb or wanted_gb)
        return Ask(fixed + int(wanted_gb * GIB), fixed + int(least_gb * GIB))
    if device_bytes is None:
        raise ConfigError(
            f"memory_gb or kv_cache_gb of {settings.name}: one of them has to be set, since what its device has is "
            "not known here",
            param="memory_gb",
        )
    asked = int(device_bytes * settings.gpu_memory_utilization)
    if settings.kv_cache_min_gb is None:
        return Ask(asked, asked)
    return Ask(asked, min(asked, fixed + int(settings.kv_cache_min_gb * GIB)))


def fixed_bytes(settings: ModelSettings, platform: Platform, weights_bytes: int) -> int:
    """What a rank needs besides its KV pool."""
    overhead = CPU_OVERHEAD_BYTES if platform == "cpu" else GPU_OVERHEAD_BYTES
    return overhead + -(-weights_bytes // settings.ranks)


def kv_bytes_of(settings: ModelSettings, platform: Platform, weights_bytes: int, granted_bytes: int) -> int:
    """The KV pool of a rank that was granted this much.

    Raises:
        ConfigError: nothing is left for it.
    """
    left = granted_bytes - fixed_bytes(settings, platform, weights_bytes)
    if left <= 0:
        raise ConfigError(
            f"memory_gb of {settings.name}: {granted_bytes} bytes a rank leave nothing for the KV cache beside weights "
            f"and overhead ({granted_bytes - left} bytes)",
            param="memory_gb",
        )
    return left
