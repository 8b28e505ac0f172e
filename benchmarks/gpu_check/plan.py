"""What a run checks: its arguments and sizes, the numbers of ranks, where streams are cut. Pure.

Invariant: a check that cannot be made on the devices is in the plan all the same, with the reason.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from benchmarks.common.arms import OURS, START_TIMEOUT_S, VLLM, ModelChoice
from benchmarks.common.plan import MAX_REQUESTS, QUICK_WARMUP_S, QUICK_WINDOW_S, WARMUP_S, WINDOW_S
from benchmarks.common.plan import Plan as Windows
from serve_app.settings import GB

Device = Literal["gpu", "cpu"]

RANKS = (1, 2)  # tensor parallel
PROMPTS = 8
QUICK_PROMPTS = 4
# of a compared answer
TOKENS = 64
QUICK_TOKENS = 32
BORDER_PROMPTS = 3
QUICK_BORDER_PROMPTS = 1
BORDER_BLOCKS = 2  # an answer of so many blocks passes as many borders
KILL_AFTER_TOKENS = 16  # of a stream: its client has a part
KILL_TOKENS = 1700  # nearly all that fits: on a fast engine, too, the first come long before the last
CLIENTS = (1, 8, 32)
QUICK_CLIENTS = (1, 8)
ROUNDS = 3
QUICK_ROUNDS = 2
KV_CACHE_GB = {"gpu": 4.0, "cpu": 0.5}  # a rank; both servers get the same
MAX_MODEL_LEN = 2048  # prompts and answers here are shorter
GPU_START_S = 1200.0  # a first start of a large model loads weights and compiles its graphs
# Between the two likeliest tokens, in nats, either of which is right where kernels round differently: 16-bit logits
# near 16 are an eighth apart, and each of the two may be off by one step; in float32 as tests/e2e/reference.py.
TIE_NATS = 0.25
TIE_NATS_FLOAT32 = 1e-3
REPORT = Path("gpu-check.md")


@dataclass(frozen=True, slots=True)
class Options:
    """The command line."""

    device: Device
    model: str | None
    dtype: str
    kv_cache_gb: float
    clients: tuple[int, ...]
    quick: bool
    seed: int
    out: Path

    @property
    def tie_nats(self) -> float:
        return TIE_NATS_FLOAT32 if self.dtype == "float32" else TIE_NATS

    @property
    def prompts(self) -> int:
        return QUICK_PROMPTS if self.quick else PROMPTS

    @property
    def tokens(self) -> int:
        return QUICK_TOKENS if self.quick else TOKENS

    @property
    def border_prompts(self) -> int:
        return QUICK_BORDER_PROMPTS if self.quick else BORDER_PROMPTS

    @property
    def start_timeout_s(self) -> float:
        return GPU_START_S if self.device == "gpu" else START_TIMEOUT_S

    @property
    def windows(self) -> Windows:
        """The windows of the throughput, vLLM's own server as the baseline."""
        return Windows(
            arms=(VLLM, OURS),
            clients=self.clients,
            rounds=QUICK_ROUNDS if self.quick else ROUNDS,
            warmup_s=QUICK_WARMUP_S if self.quick else WARMUP_S,
            window_s=QUICK_WINDOW_S if self.quick else WINDOW_S,
            max_requests=MAX_REQUESTS,
            seed=self.seed,
            budget_s=None,
        )

    def choice(self, path: str, ranks: int) -> ModelChoice:
        """What both servers serve. `path`: the model's folder or id."""
        kv_bytes = round(self.kv_cache_gb * GB)
        return ModelChoice(
            path=path,
            name="checked",
            dtype=self.dtype,
            max_model_len=MAX_MODEL_LEN,
            kv_cache_bytes=kv_bytes,
            tensor_parallel_size=ranks,
        )


@dataclass(frozen=True, slots=True)
class Part:
    """The checks with one number of ranks. `obstacle`: why they cannot be made; empty: they can."""

    ranks: int
    obstacle: str = ""

    @property
    def name(self) -> str:
        return f"TP={self.ranks}"


def parse_arguments(arguments: Sequence[str], description: str) -> Options:
    """The command line; exits with code 2 and a message when it makes no sense."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check", description=description.split("\n", 1)[0])
    parser.add_argument("--device", choices=("gpu", "cpu"), default="gpu", help="cpu: the same flow without a GPU")
    parser.add_argument("--model", help="a Hugging Face id or a folder; default: the built-in tiny model")
    parser.add_argument("--dtype", help="default: auto; float32 for the built-in model on a CPU")
    parser.add_argument(
        "--kv-cache-gb", type=float, help="KV cache of a rank, of both servers; default: 4; 0.5 on a CPU"
    )
    parser.add_argument("--clients", help="comma separated client counts of the throughput")
    parser.add_argument("--quick", action="store_true", help="fewer prompts, cuts, clients and rounds")
    parser.add_argument("--seed", type=int, default=1, help="of prompts and resampling")
    parser.add_argument("--out", type=Path, default=REPORT, help=f"the report; default: {REPORT}")
    given = parser.parse_args(arguments)
    if not given.out.absolute().parent.is_dir():
        parser.error(f"--out: there is no folder {given.out.absolute().parent}")
    default = QUICK_CLIENTS if given.quick else CLIENTS
    return Options(
        device=given.device,
        model=given.model,
        dtype=given.dtype or ("float32" if given.device == "cpu" and given.model is None else "auto"),
        kv_cache_gb=given.kv_cache_gb or KV_CACHE_GB[given.device],
        clients=tuple(map(int, given.clients.split(","))) if given.clients else default,
        quick=given.quick,
        seed=given.seed,
        out=given.out,
    )


def parts(device: Device, gpus: int, cores: int, heads: int | None) -> tuple[Part, ...]:
    """The checks for each number of ranks.

    Args:
        gpus, cores: of this machine. On a CPU a rank has a core of its own.
        heads: attention heads of the model, which the ranks share out; None: not known.
    """
    available, unit = (gpus, "GPU") if device == "gpu" else (cores, "core")
    found = []
    for ranks in RANKS:
        obstacle = ""
        if available < ranks:
            obstacle = f"{ranks} {unit}s are needed, {available} there"
        elif heads is not None and heads % ranks:
            obstacle = f"{heads} attention heads cannot be shared out to {ranks} ranks"
        found.append(Part(ranks, obstacle))
    return tuple(found)


def obstacle(device: Device, build: str, gpus: int, error: str) -> str:
    """Why nothing can be checked here, and what helps; empty: it can.

    Args:
        build: of vLLM, "cpu" or "gpu".
        gpus, error: of this machine, and why NVML does not answer.
    """
    if device == "cpu":
        return "vLLM's GPU build is installed: `make setup DEVICE=cpu` first" if build == "gpu" else ""
    if not gpus:
        why = f"NVML says: {error}" if error else "NVML finds none"
        return f"no NVIDIA GPU is usable here ({why}); install the driver, or give the container its GPUs (--gpus all)"
    return "vLLM's CPU build is installed: `make setup DEVICE=gpu` first" if build == "cpu" else ""


def crowded(device: Device, cores: int, ranks: int) -> str:
    """Why the throughput on a CPU gets no verdict; empty: it gets one. A rank fills a core, and so do the servers."""
    if device == "gpu" or cores >= 2 * ranks:
        return ""
    return f"no verdict: {ranks} ranks on {cores} cores leave the servers too little"


def answer_tokens(prompt_tokens: int, block_tokens: int, longest: int) -> int:
    """Tokens of an answer that passes `BORDER_BLOCKS` borders of blocks, and at most as many as fit."""
    return max(1, min(BORDER_BLOCKS * block_tokens + 2, longest - prompt_tokens))


def cuts(prompt_tokens: int, tokens: int, block_tokens: int) -> tuple[int, ...]:
    """After how many tokens of an answer a stream is cut: prompt and answer then end one token before the border of a
    block, at it, and one token after it."""
    near = {block_tokens - 1, 0, 1 % block_tokens}
    return tuple(cut for cut in range(1, tokens) if (prompt_tokens + cut) % block_tokens in near)
