"""The first dashboard at 3 a.m.: in ten seconds who waits and why, whether memory is full, and what failed."""

from __future__ import annotations

from scripts.dashboards import questions
from scripts.dashboards.boards import Board, Kind, Panel, Query, Section, Unit, Variable
from scripts.dashboards.expressions import Expression, growth, now
from serve_app.router.metrics.table import ClusterFigure, Figure, Metric

MODEL = questions.MODEL
SIXTH = 4  # of the width


def overview() -> Board:
    return Board(
        "serve-app-overview",
        "serve-app: overview",
        "Who waits and why, what memory does, what failed. The other dashboards are linked above.",
        (
            Section("", _numbers()),
            Section(
                "",
                (
                    questions.who_waits(),
                    questions.model_or_router(),
                    questions.what_memory_does(),
                    questions.what_failed(),
                    questions.first_token_by_class(),
                    questions.refused(),
                    questions.which_tenant_hogs(),
                    questions.why_it_scaled(),
                ),
            ),
        ),
        (Variable("model", Figure.WAITING),),
    )


def _numbers() -> tuple[Panel, ...]:
    filled = now(Figure.WAITING_RATIO, model=MODEL).summed("model").highest()
    granted = now(ClusterFigure.GPU_MEMORY, kind="granted").summed()
    failed = growth(Metric.REQUESTS, questions.RECENT, model=MODEL, outcome=questions.FAILED).summed()
    refused = growth(Metric.REFUSALS, questions.RECENT, model=MODEL).summed()
    return (
        _number("Requests that wait", "Now, of all classes.", now(Figure.WAITING, model=MODEL).summed()),
        _number("Fullest queue", "Waiting over `admission.max_queued`.", filled, Unit.RATIO, 0.8),
        _number(
            "Fullest KV cache",
            "KV tokens used over all of a replica.",
            now(ClusterFigure.KV_USED_RATIO, model=MODEL).highest(),
            Unit.RATIO,
            0.95,
        ),
        _number(
            "GPU memory granted",
            "To engines, of all there is. An engine is granted what it may ever use, so that 100% is no fault.",
            granted.over(now(ClusterFigure.GPU_MEMORY).summed()),
            Unit.RATIO,
        ),
        _number("Failed in 10 minutes", "Requests that an engine or serve-app failed.", failed.or_zero(), alarm=1),
        _number("Refused in 10 minutes", "Requests, for all reasons.", refused.or_zero()),
    )


def _number(
    title: str, about: str, expression: Expression, unit: Unit = Unit.COUNT, alarm: float | None = None
) -> Panel:
    return Panel(
        title, about, unit, (Query(expression, title),), Kind.NUMBER, width=SIXTH, height=4, alarm=alarm, nothing="?"
    )
