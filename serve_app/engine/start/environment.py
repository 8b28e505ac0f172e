"""The environment variables of a process, set before vLLM is imported there.

Measured on two cores: without the CPU settings, spinning OpenMP threads starve the process that serves HTTP;
throughput halves and first tokens come seconds late.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Literal

from serve_app.core.audio import decoded_bound
from serve_app.names import has_cpu_build

Platform = Literal["cpu", "gpu"]

GRAMMAR_CACHE_MB = 64  # of compiled grammars, in EngineCore; vLLM's default of 512 is counted in no grant
SERVING_CORE_SHARE = 2  # of each two cores, one runs the model, the other all other processes


def platform() -> Platform:
    """The installed build of vLLM; the CPU build has its own distribution name."""
    return "cpu" if has_cpu_build() else "gpu"


def common_environment(max_sequences: int, max_image_pixels: int, max_audio_s: float) -> dict[str, str]:
    """Settings for every platform: bounds of a public endpoint, no usage statistics.

    Args:
        max_sequences: of one request; with vLLM's own default of 16384, one call can fill the engine.
        max_image_pixels: of one image; vLLM reads them in its header, and decodes none with more.
        max_audio_s: seconds of one audio file; vLLM decodes no more, whatever its header says.
    """
    return {
        "VLLM_MAX_N_SEQUENCES": str(max_sequences),
        "VLLM_MAX_IMAGE_PIXELS": str(max_image_pixels),
        "VLLM_MAX_AUDIO_DECODE_DURATION_S": str(math.ceil(max_audio_s)),
        "VLLM_MAX_AUDIO_DECODE_BYTES": str(decoded_bound(max_audio_s)),
        "VLLM_MEDIA_URL_ALLOW_REDIRECTS": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_XGRAMMAR_CACHE_MB": str(GRAMMAR_CACHE_MB),
        "VLLM_SERVER_DEV_MODE": "0",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
        # vLLM's own set-up closes every log handler of the process. Serve's handler then loses its file, and a
        # restarted controller takes the replica for broken and replaces the engine.
        "VLLM_CONFIGURE_LOGGING": "0",
        "TOKENIZERS_PARALLELISM": "false",
    }


def cpu_environment(cores: Sequence[int], ranks: int) -> dict[str, str]:
    """Settings for the CPU build, for an engine of `ranks` ranks on a machine with these `cores`.

    The model gets one of each two cores; with more ranks than that, all cores, and in the worst case several ranks
    share a core.
    """
    engine_cores = max(1, len(cores) // SERVING_CORE_SHARE)
    if ranks > engine_cores:
        engine_cores = len(cores)
    per_rank = max(1, engine_cores // ranks)
    groups = [cores[(rank * per_rank) % len(cores) :][:per_rank] for rank in range(ranks)]
    environment = {
        "VLLM_CPU_OMP_THREADS_BIND": "|".join(",".join(str(core) for core in group) for group in groups),
        "OMP_NUM_THREADS": str(per_rank),
        "KMP_BLOCKTIME": "0",
    }
    if ranks == 1:
        # the worker inside EngineCore: no process between EngineCore and the step
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    return environment


def prepare(ranks: int, max_sequences: int, max_image_pixels: int, max_audio_s: float) -> None:
    """Set this process's environment for an engine of `ranks` ranks; call before vLLM is imported. Variables that the
    operator has set take precedence.

    Args:
        max_sequences: of one request. The router's bound is usually lower; a request above the batch's size is never
            granted.
        max_image_pixels: of one image. max_audio_s: of one audio file.
    """
    wanted = common_environment(max_sequences, max_image_pixels, max_audio_s)
    if platform() == "cpu":
        os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # in whole GiB; would override the bytes of our settings
        # Ray sets OMP_NUM_THREADS to the actor's CPUs; ours follows the binding instead
        os.environ.pop("OMP_NUM_THREADS", None)
        wanted |= cpu_environment(sorted(os.sched_getaffinity(0)), ranks)
    for name, value in wanted.items():
        os.environ.setdefault(name, value)
