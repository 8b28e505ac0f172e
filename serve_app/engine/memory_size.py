"""How much memory an engine requests, and the KV pool that fits into its grant: pure functions of the settings.

Invariant: weights, KV pool and vLLM's overhead fit into the grant, for each rank.
"""

from __future__ import annotations

from serve_app.engine.engine_args import kv_cache_bytes
from serve_app.engine.environment import GRAMMAR_CACHE_MB, Platform
from serve_app.errors import ConfigError
from serve_app.settings import GB, ModelSettings

GIB = 2**30
# Besides weights and KV: activations of a step, CUDA graphs, NCCL; a rank's process and CUDA context.
GPU_OVERHEAD_BYTES = 3 * GIB
# Compiled grammars, and the process that compiles each of them first (0.3 GiB resident).
GRAMMAR_BYTES = GRAMMAR_CACHE_MB * 2**20 + 320 * 2**20
# Besides weights and KV: two Python processes with torch and vLLM in each (2.0 GiB resident measured, tiny model).
CPU_OVERHEAD_BYTES = int(2.5 * GIB) + GRAMMAR_BYTES
SIMULATED_BYTES = GIB // 4  # the process of a simulated engine; `memory_gb` sets the memory of the engine it simulates


def memory_request(
    settings: ModelSettings, platform: Platform, weights_bytes: int, device_bytes: int | None
) -> tuple[int, int]:
    """The memory to request for each rank, in bytes: the wanted and the least amount.

    With `memory_gb`: exactly that. Else with `kv_cache_gb`: weights, overhead and `kv_cache_gb`, at least
    `kv_cache_min_gb`. Else: the share `gpu_memory_utilization` of the device, as vLLM itself would take.

    Args:
        weights_bytes: of the whole model.
        device_bytes: of one device; None: not known.

    Raises:
        ConfigError: no setting determines the amount.
    """
    if settings.memory_gb is not None:
        asked = round(settings.memory_gb * GB)
        return asked, asked
    if settings.engine == "simulated":
        return SIMULATED_BYTES, SIMULATED_BYTES
    fixed = fixed_bytes(settings, platform, weights_bytes)
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


def fixed_bytes(settings: ModelSettings, platform: Platform, weights_bytes: int) -> int:
    """Bytes that a rank needs besides its KV pool."""
    overhead = CPU_OVERHEAD_BYTES if platform == "cpu" else GPU_OVERHEAD_BYTES
    return overhead + -(-weights_bytes // settings.ranks)


def kv_bytes_of(settings: ModelSettings, platform: Platform, weights_bytes: int, granted_bytes: int) -> int:
    """The KV pool of a rank with this grant, in bytes.

    Raises:
        ConfigError: the grant leaves no bytes for it.
    """
    left = granted_bytes - fixed_bytes(settings, platform, weights_bytes)
    if left <= 0:
        raise ConfigError(
            f"memory_gb of {settings.name}: {granted_bytes} bytes a rank leave nothing for the KV cache beside weights "
            f"and overhead ({granted_bytes - left} bytes)",
            param="memory_gb",
        )
    return left
