"""Published request traces, read from `shared/data` beside the project."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from pathlib import Path

from autoscaling.simulator import SimulatedRequest, read_trace

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
AZURE_FILE = "azure_llm_2023_conversation.csv"
MOONCAKE_FILE = "mooncake_conversation.jsonl"
PUBLISHED = {  # the project ships none of them
    AZURE_FILE: "AzureLLMInferenceTrace_conv.csv of Azure/AzurePublicDataset on GitHub",
    MOONCAKE_FILE: "conversation_trace.jsonl of kvcache-ai/Mooncake on GitHub, in FAST25-release",
}
BYTES_PER_TOKEN = 4.2
BYTES_SIGMA = 0.15
MODEL = "m"


class TraceMissingError(Exception):
    """The traces are not beside the project."""


@dataclass(frozen=True, slots=True)
class Request:
    """One of a workload; `at_s` from its start."""

    at_s: float
    tenant: str
    prompt_bytes: int
    prompt_tokens: int
    output_tokens: int


def located(folder: Path, name: str) -> Path:
    """The file of a trace. TraceMissingError: it is not in the folder."""
    if not (folder / name).exists():
        raise TraceMissingError(f"{name} is not in {folder} (--data names another folder): it is {PUBLISHED[name]}")
    return folder / name


def recorded(folder: Path, name: str) -> list[SimulatedRequest]:
    """The requests of a trace. TraceMissingError: it is not in the folder."""
    with located(folder, name).open() as lines:
        return read_trace(lines, MODEL)


def request(draw: random.Random, at_s: float, tenant: str, prompt: int, output: int) -> Request:
    """A request of a trace with a text of drawn size."""
    per_token = BYTES_PER_TOKEN * math.exp(draw.gauss(0.0, BYTES_SIGMA))
    return Request(at_s, tenant, round(prompt * per_token), prompt, output)


def azure(folder: Path, draw: random.Random) -> list[Request]:
    """The Azure trace as one tenant. TraceMissingError: it is not in the folder."""
    return _with_texts(recorded(folder, AZURE_FILE), draw)


def mooncake(folder: Path, draw: random.Random) -> list[Request]:
    """The Mooncake trace as one tenant. TraceMissingError: it is not in the folder."""
    return _with_texts(recorded(folder, MOONCAKE_FILE), draw)


def _with_texts(found: list[SimulatedRequest], draw: random.Random) -> list[Request]:
    return [request(draw, one.at_s, one.tenant, one.prompt_tokens, one.output_tokens) for one in found]
