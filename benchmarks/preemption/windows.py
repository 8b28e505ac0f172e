"""What a window of requests of class `high` says: their first tokens, and the engine's own counters at its edges."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.preemption.high_load import Answered

MIN_P99 = 300  # requests for a p99, as elsewhere


@dataclass(frozen=True, slots=True)
class Counters:
    """The engine's own, since its start: steps, and the sequences of all steps added up; `at`: read at this moment."""

    at: float
    steps: float
    sequence_steps: float

    @classmethod
    def of(cls, metrics: str, at: float) -> Counters:
        """From what GET /metrics says."""
        found = engine_figures(metrics, ("steps", "sequence_steps"))
        return cls(at, found["steps"], found["sequence_steps"])

    def sequences_since(self, earlier: Counters) -> float:
        """The mean sequences of a step since then; without steps 0."""
        steps = self.steps - earlier.steps
        return (self.sequence_steps - earlier.sequence_steps) / steps if steps else 0.0


def engine_figures(metrics: str, names: Sequence[str]) -> dict[str, float]:
    """The engines' counters of these names (`serve_app_engine_NAME_total`), each the sum over the replicas."""
    found = dict.fromkeys(names, 0.0)
    series = {f"serve_app_engine_{name}_total": name for name in names}
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            if sample.name in series:
                found[series[sample.name]] += sample.value
    return found


@dataclass(frozen=True, slots=True)
class Window:
    """One window: the answers to requests that came in it, and the engine's counters at its edges."""

    answers: Sequence[Answered]
    before: Counters
    after: Counters

    @property
    def span_s(self) -> float:
        return self.after.at - self.before.at

    @property
    def steps(self) -> float:
        return self.after.steps - self.before.steps

    @property
    def step_s(self) -> float:
        """Seconds of a step, where the engine was never idle."""
        return self.span_s / self.steps if self.steps else 0.0


def p99(seconds: Sequence[float]) -> float | None:
    """None: too few for one."""
    return float(np.quantile(np.asarray(seconds), 0.99)) if len(seconds) >= MIN_P99 else None


def first_tokens(windows: Sequence[Window]) -> list[float]:
    """Seconds to the first token, of all windows."""
    return [one.first_s for window in windows for one in window.answers if not one.failure]


def parts_of(windows: Sequence[Window]) -> dict[str, Any]:
    """Requests, and seconds to the first token at the median, the 95th and the 99th of a hundred; of its parts, too:
    until the client sent it, in the queue, in the engine, and outside these (HTTP)."""
    answers = [one for window in windows for one in window.answers if not one.failure]
    if not answers:
        return {}
    return {"requests": len(answers), **_percentiles([one.first_s for one in answers])} | {
        "queue": _percentiles([one.queue_s for one in answers]),
        "engine": _percentiles([one.engine_s for one in answers]),
        "late": _percentiles([one.late_s for one in answers]),
        "outside": _percentiles([one.first_s - one.queue_s - one.engine_s - one.late_s for one in answers]),
    }


def _percentiles(seconds: Sequence[float]) -> dict[str, float]:
    return {f"p{q}_s": round(float(np.percentile(seconds, q)), 4) for q in (50, 95, 99)}
