"""A comparison made by hand, for the tests of its page, its picture and its recommendation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from serve_app.cli.simulate import ArmResult, ClassResult, Comparison, TraceSummary, recommendation
from serve_app.cli.simulate.figures import MissedRequests, ModelResult, SeriesResult

SERIES = SeriesResult(
    10.0,
    arrivals_per_minute={"high": [60.0, 0.0, 12.0], "normal": [6.0, 6.0, 6.0]},
    running={"chat": [1.0, 2.0, 2.0]},
    starting={"chat": [1.0, 0.0, 0.0]},
    waiting={"chat": [3.0, 0.0, 0.0]},
    ttft_p50_s={"high": [0.2, None, 0.1], "normal": [0.2, 0.2, 0.2]},
    ttft_p99_s={"high": [4.0, None, 0.2], "normal": [9.0, 0.3, 0.4]},
)
MODEL = ModelResult("chat", 1, 60.0, 8, 1.7, 2, 0.5, 3.45, 2)
MISSED = (MissedRequests("starts", "chat", 5), MissedRequests("engine", "chat", 2))


def class_of(name: str, attainment: float | None, level_s: float | None = 2.0) -> ClassResult:
    return ClassResult(name, level_s, 100, attainment, 0.2, 4.0, 3, MISSED)


def arm(name: str, cost: float, high: float | None, normal: float | None, **changes: Any) -> ArmResult:
    """An arm with two classes, which meets their levels at 0.99."""
    classes = (class_of("high", high), class_of("normal", normal))
    meets = min(each.attainment or 0.0 for each in classes) >= 0.99
    made = ArmResult(name, "p", "", 1.7, 2, 1.7, 2, 0.5, cost, 6, 2, meets, (MODEL,), classes, SERIES)
    return replace(made, **changes)


def comparison(*arms: ArmResult) -> Comparison:
    return Comparison(
        "my.yaml",
        TraceSummary("/data/a<b>.csv", 200, 25.0, 1.0, 20_000, 8_000),
        0.99,
        {"chat": {"name": "8b-l4", "source": "estimate: a data sheet"}},
        ("a note <about> it",),
        arms,
        recommendation(arms, 0.99),
    )
