"""What windows with `high` alone and beside a full engine of `low` say. Pure.

A token that is computed again is one that was computed before its request stopped: what the engine prefilled, less the
prompts, each once. Cache hits are not computed, so they do not count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.batch_fill.figures import Window, engine_figures, first_tokens, p99, pooled
from benchmarks.batch_fill.load import HIGH
from benchmarks.preemption.low_load import Completion, LowAnswer, wrong

# what the first token of `high` may cost beside a full engine
STEPS = 2
EXTRA_MS = 100.0
MIN_PREEMPTED = 20
MAX_RECOMPUTED = 0.10


@dataclass(frozen=True, slots=True)
class TokenCounters:
    """The engine's own, since its start: output tokens, prompts (each once), and what was prefilled without hits."""

    generated: float = 0.0
    prompts: float = 0.0
    prefilled: float = 0.0

    @classmethod
    def of(cls, metrics: str) -> TokenCounters:
        """From what GET /metrics says."""
        found = engine_figures(metrics, ("generated_tokens", "prompt_tokens", "prefilled_tokens"))
        return cls(*found.values())

    def since(self, before: TokenCounters) -> TokenCounters:
        return TokenCounters(
            self.generated - before.generated, self.prompts - before.prompts, self.prefilled - before.prefilled
        )


@dataclass(frozen=True, slots=True)
class LowRound:
    """The answers to `low` in one round, how often each was stopped (by request id), and what the engine computed from
    the round's first request to its last answer."""

    answers: Sequence[LowAnswer]
    preempted: Mapping[str, int]
    computed: TokenCounters


def result(
    alone: Sequence[Window], beside: Sequence[Window], rounds: Sequence[LowRound], right: Mapping[int, Completion]
) -> dict[str, Any]:
    """The figures of all rounds."""
    first = [p99(pooled(windows, first=True, levels=(HIGH,))) for windows in (alone, beside)]
    step_s = float(np.mean([window.step_s for window in beside]))
    answers = [answer for one in rounds for answer in one.answers]
    stops = [count for one in rounds for count in one.preempted.values()]
    stopped = [answer for one in rounds for answer in one.answers if one.preempted.get(answer.request_id)]
    prefilled = sum(one.computed.prefilled for one in rounds)
    again = prefilled - sum(one.computed.prompts for one in rounds)
    computed = prefilled + sum(one.computed.generated for one in rounds)
    excess = None if first[0] is None or first[1] is None else round(1000 * (first[1] - first[0]), 1)
    return {
        "high_ttft_p99_excess_ms": excess,
        "two_steps_ms": round(1000 * STEPS * step_s, 1),
        "preempted": len(stopped),
        "wrong": len(wrong(answers, right)),
        "recomputed_share": round(again / computed, 4) if computed else 0.0,
        "stops": sum(stops),
        "most_stops": max(stops, default=0),
        "wrong_of_preempted": len(wrong(stopped, right)),
        "low_answers": len(answers),
        "low_failed": sum(bool(answer.failure) for answer in answers),
        "low_failures": sorted({answer.failure for answer in answers if answer.failure})[:3],
        "tokens": {"prefilled": prefilled, "again": again, "computed": computed},
        "first_token": {"alone": first_tokens(alone), "beside": first_tokens(beside)},
        "failed": sum(bool(one.failure) for window in (*alone, *beside) for one in window.answers),
    }


def verdicts(found: Mapping[str, Any]) -> dict[str, bool]:
    """Which bars are met."""
    excess = found["high_ttft_p99_excess_ms"]
    return {
        "high_ttft_p99_excess_ms": excess is not None and excess <= found["two_steps_ms"] + EXTRA_MS,
        "preempted": found["preempted"] >= MIN_PREEMPTED,
        "wrong": found["wrong"] == 0,
        "recomputed_share": found["recomputed_share"] < MAX_RECOMPUTED,
    }
