"""What vLLM's own log says of an engine's memory and graphs. Pure.

Both servers write this log to a file (`logging_settings`); the lines are those of vLLM 0.32.0.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GIB = 2**30
KV_TOKENS = re.compile(r"KV cache size: ([\d,]+) tokens")
GRAPHS = re.compile(r"Graph capturing finished in \d+ secs, took (-?[\d.]+) GiB")
WEIGHTS = re.compile(r"Model loading took ([\d.]+) GiB")
EAGER = re.compile(r"enforce_eager=(True|False)")
GRAPH_MODE = re.compile(r"'?cudagraph_mode'?[:=] ?<?CUDAGraphMode\.(\w+)")


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """Of the last start in a log; of ranks that say different figures the largest. None: the log does not say."""

    kv_tokens: int | None = None
    graph_bytes: int | None = None
    weights_bytes: int | None = None
    eager: bool | None = None
    graph_mode: str | None = None


def read(text: str) -> EngineFacts:
    """The facts of the last start in this log."""
    starts = list(EAGER.finditer(text))
    text = text[starts[-1].start() :] if starts else text
    tokens = KV_TOKENS.findall(text)
    mode = GRAPH_MODE.search(text)
    return EngineFacts(
        kv_tokens=int(tokens[-1].replace(",", "")) if tokens else None,
        graph_bytes=_largest(GRAPHS.findall(text)),
        weights_bytes=_largest(WEIGHTS.findall(text)),
        eager=starts[-1][1] == "True" if starts else None,
        graph_mode=None if mode is None else mode[1],
    )


def _largest(sizes: list[str]) -> int | None:
    return round(max(map(float, sizes)) * GIB) if sizes else None


def logging_settings(log: Path) -> dict[str, Any]:
    """A logging configuration for `VLLM_LOGGING_CONFIG_PATH`: vLLM's lines go to a file as well."""
    handlers = {
        "file": {"class": "logging.FileHandler", "filename": str(log), "formatter": "plain", "level": "INFO"},
        "vllm": {"class": "logging.StreamHandler", "formatter": "plain", "level": "WARNING"},
    }
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"plain": {"format": "%(process)d %(levelname)s %(message)s"}},
        "handlers": handlers,
        "loggers": {"vllm": {"handlers": ["file", "vllm"], "level": "INFO", "propagate": False}},
    }
