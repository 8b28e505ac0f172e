"""What happens on the day: who asks when, which batches come, which models are there. Seeded.

The day is 24 hours from 06:00. In each hour people replay the Azure conversation trace, stretched to the hour, of which
a part is kept that follows the time of day.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.common.traces import Request
from serve_app.types import RequestClass

HOUR_S = 3600.0
FIRST_HOUR = 6  # of the clock, at second 0
# The part of the trace that people ask in each hour, from 06:00: office hours, a lunch, an evening, a night.
BY_HOUR = (
    *(0.15, 0.35, 0.7, 0.95, 1.0, 0.95, 0.75, 0.9, 1.0, 0.95, 0.85, 0.6),
    *(0.45, 0.4, 0.4, 0.35, 0.3, 0.2, 0.1, 0.06, 0.04, 0.03, 0.03, 0.06),
)
HIGH_SHARE = 0.2  # of people's requests; the others are `normal`
CHAT = "chat"
SUMMARIES = "summaries"
VISITS = {10: 0.03, 15: 0.03}  # hours of the clock in which people use the second model, and the part that does
ROWS = 200_000
BATCH_ROWS = 50_000  # the most rows of one batch


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """A model: its replicas by bounds, the slots of each, and what a start takes."""

    name: str
    slots: int
    min_replicas: int
    max_replicas: int
    start_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Person:
    """A request of people."""

    at_s: float
    model: str
    level: RequestClass
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """A batch: when it comes, whose it is, and the tokens (prompt, output) of its rows."""

    batch_id: str
    at_s: float
    tenant: str
    model: str
    rows: Sequence[tuple[int, int]]


MODELS = (ModelPlan(CHAT, 64, 2, 2), ModelPlan(SUMMARIES, 64, 0, 1))
# When a batch comes (hour of the clock), its tenant, its model.
BATCHES = (
    (20.0, "research", CHAT),
    (20.0, "research", CHAT),
    (20.5, "reports", CHAT),
    (21.0, "reports", SUMMARIES),
)


def clock_s(hour: float) -> float:
    """The second of the day at which this hour of the clock begins."""
    return (hour - FIRST_HOUR) % 24 * HOUR_S


def people(trace: Sequence[Request], seed: int, share: float = 1.0) -> list[Person]:
    """All requests of people, in order; `share` thins them out, for tests."""
    draw = random.Random(f"{seed} people")
    found = list[Person]()
    stretch = HOUR_S / max(one.at_s for one in trace)
    for number, kept in enumerate(BY_HOUR):
        visits = VISITS.get((FIRST_HOUR + number) % 24, 0.0)
        for request in trace:
            if draw.random() < kept * share:
                model = SUMMARIES if draw.random() < visits else CHAT
                level = RequestClass.HIGH if draw.random() < HIGH_SHARE else RequestClass.NORMAL
                at_s = number * HOUR_S + request.at_s * stretch
                found.append(Person(at_s, model, level, max(1, request.prompt_tokens), max(1, request.output_tokens)))
    return found


def batches(trace: Sequence[Request], seed: int, rows: int = ROWS) -> list[BatchPlan]:
    """The batches of the night; their rows have lengths of the trace."""
    draw = random.Random(f"{seed} rows")
    each = min(BATCH_ROWS, rows // len(BATCHES))
    lengths = [(max(1, one.prompt_tokens), max(1, one.output_tokens)) for one in trace]
    return [
        BatchPlan(f"batch-{number}", clock_s(hour), tenant, model, draw.choices(lengths, k=each))
        for number, (hour, tenant, model) in enumerate(BATCHES, 1)
    ]
