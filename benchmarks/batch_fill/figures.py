"""What windows with and without a batch say: latencies of people, and slots that rows filled.

A step of an engine has `slots` places; a window of n steps has n times that many slot-steps. Of those people use what
they use without a batch; the rest is idle, and rows fill a part of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.batch_fill.load import HIGH, NORMAL, Answered

LEVELS = (HIGH, NORMAL)
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
    def sequence_steps(self) -> float:
        return self.after.sequence_steps - self.before.sequence_steps

    @property
    def step_s(self) -> float:
        """Seconds of a step, where the engine was never idle."""
        return self.span_s / self.steps if self.steps else 0.0


def fill_share(alone: Window, beside: Window, slots: int) -> float:
    """The part of the idle slot-steps that rows filled; people are taken to use as many a second as alone."""
    people = alone.sequence_steps / alone.span_s * beside.span_s
    idle = slots * beside.steps - people
    return (beside.sequence_steps - people) / idle if idle > 0 else 0.0


def p99(seconds: Sequence[float]) -> float | None:
    """None: too few for one."""
    return float(np.quantile(np.asarray(seconds), 0.99)) if len(seconds) >= MIN_P99 else None


def pooled(windows: Sequence[Window], *, first: bool, levels: Sequence[str] = LEVELS) -> list[float]:
    """Latencies of all windows, or times to the first token, of these classes."""
    answers = [one for window in windows for one in window.answers if not one.failure and one.level in levels]
    return [one.first_s if first else one.ended_s for one in answers]


def first_tokens(windows: Sequence[Window]) -> dict[str, Any]:
    """Of each class: requests, and seconds to the first token at the median, the 95th and the 99th of a hundred; of its
    parts, too: until the client sent it, in the queue, in the engine, and outside these (HTTP)."""
    found = dict[str, Any]()
    for level in LEVELS:
        answers = [one for window in windows for one in window.answers if not one.failure and one.level == level]
        if answers:
            found[level] = {"requests": len(answers), **_percentiles([one.first_s for one in answers])} | {
                "queue": _percentiles([one.queue_s for one in answers]),
                "engine": _percentiles([one.engine_s for one in answers]),
                "late": _percentiles([one.late_s for one in answers]),
                "outside": _percentiles([one.first_s - one.queue_s - one.engine_s - one.late_s for one in answers]),
            }
    return found


def _percentiles(seconds: Sequence[float]) -> dict[str, float]:
    return {f"p{q}_s": round(float(np.percentile(seconds, q)), 4) for q in (50, 95, 99)}


def result(alone: Sequence[Window], beside: Sequence[Window], slots: int) -> dict[str, Any]:
    """The figures of all rounds."""
    ended = [p99(pooled(windows, first=False)) for windows in (alone, beside)]
    first = [p99(pooled(windows, first=True, levels=(HIGH,))) for windows in (alone, beside)]
    fills = [fill_share(a, b, slots) for a, b in zip(alone, beside, strict=True)]
    step_s = float(np.mean([window.step_s for window in beside]))
    added = None if first[0] is None or first[1] is None else first[1] - first[0]
    return {
        "interactive_p99_ratio": round(ended[1] / ended[0], 4) if ended[0] and ended[1] else None,
        "idle_fill_share": round(float(np.mean(fills)), 4),
        "fill_by_round": [round(fill, 4) for fill in fills],
        "interactive_p99_s": {"alone": _rounded(ended[0]), "beside": _rounded(ended[1])},
        "first_token": {"alone": first_tokens(alone), "beside": first_tokens(beside)},
        "full_step_s": round(step_s, 5),
        "first_token_added_steps": None if added is None or not step_s else round(added / step_s, 2),
        "requests": {"alone": len(pooled(alone, first=False)), "beside": len(pooled(beside, first=False))},
        "failed": sum(bool(one.failure) for window in (*alone, *beside) for one in window.answers),
    }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)
