"""What the parent asks of the engine's process, and what comes back: one JSON object a line.

Times are seconds from the start of a run.
"""

from __future__ import annotations

import enum

import msgspec

from benchmarks.strategies.strategy import Strategy
from benchmarks.strategies.workload import Ask


class Ended(enum.StrEnum):
    """What became of a request."""

    DONE = "done"
    REFUSED = "refused"  # the queue was full
    LATE = "late"  # its deadline passed; it was cancelled
    FAILED = "failed"


class OpenRun(msgspec.Struct, frozen=True):
    """The requests at their times through one strategy. `deadline_s`: of a request, from its arrival."""

    strategy: Strategy
    asks: list[Ask]
    seed: int
    deadline_s: float | None = None


class Row(msgspec.Struct, array_like=True):
    """One request. `started_s`: handed to the engine; `first_s`: of its first token; negative: never.
    `ended_s`: of its last token, or when it was given up after it had started."""

    number: int
    prompt: int
    output: int
    arrived_s: float
    started_s: float = -1.0
    first_s: float = -1.0
    ended_s: float = -1.0
    outcome: Ended = Ended.FAILED


class Ran(msgspec.Struct, frozen=True):
    """A run. `steps` of the engine, CPU seconds of all its processes, and of the machine's others, in it."""

    rows: list[Row]
    wall_s: float
    steps: int
    cpu_s: float
    foreign_s: float = 0.0


class Started(msgspec.Struct, frozen=True):
    """The engine is up."""

    start_s: float
    slots: int
    max_model_len: int
    kv_cache_tokens: int
