"""Batches: their rows, how old they are, and how their requests fare."""

from __future__ import annotations

from scripts.dashboards import questions
from scripts.dashboards.boards import RATE, Board, Kind, Panel, Query, Section, Unit, Variable
from scripts.dashboards.expressions import none_of, now, observed, quantile, rate
from serve_app.router.metrics.table import ClusterFigure, Figure, Metric
from serve_app.types import RequestClass

MODEL = questions.MODEL
LOW = RequestClass.LOW.label


def batches() -> Board:
    return Board(
        "serve-app-batches",
        "serve-app: batches",
        "Files of requests. Their rows run as class low where the keys say no other.",
        (Section("", _files()), Section("Requests of class low", _requests())),
        (Variable("model", Figure.WAITING),),
    )


def _files() -> tuple[Panel, ...]:
    by_model = now(ClusterFigure.BATCH_MODEL_ROWS).summed("model", "state")
    statuses = now(ClusterFigure.BATCHES).summed("status")
    return (
        Panel(
            "Rows by state",
            "Of the batches that have not ended. If `waiting` stays, see 'A batch does not progress'.",
            Unit.COUNT,
            (Query(now(ClusterFigure.BATCH_ROWS).summed("state"), "{{state}}"),),
            Kind.STACK,
            nothing="the store does not answer",
        ),
        Panel(
            "Rows by model",
            "Of the same batches.",
            Unit.COUNT,
            (Query(by_model.or_zero("state"), "{{model}} {{state}}"),),
            Kind.STACK,
        ),
        Panel(
            "Batches by status",
            "That have not ended.",
            Unit.COUNT,
            (Query(statuses.or_zero("status"), "{{status}}"),),
            Kind.STACK,
        ),
        Panel(
            "Age of the oldest batch",
            "A batch ends after its completion window, 24 hours at most.",
            Unit.SECONDS,
            (Query(now(ClusterFigure.OLDEST_BATCH).highest(), "oldest"),),
            nothing="the store does not answer",
        ),
    )


def _requests() -> tuple[Panel, ...]:
    ends = rate(Metric.REQUESTS, RATE, model=MODEL, priority=LOW).summed("model", "outcome")
    waits = observed(Metric.QUEUE_WAIT, RATE, model=MODEL, priority=LOW, reason=none_of(questions.DID_NOT_WAIT))
    durations = quantile(0.5, Metric.DURATION, RATE, "model", model=MODEL, priority=LOW)
    return (
        Panel(
            "Ends by outcome",
            "Rows of batches, and other requests of the class.",
            Unit.REQUESTS_PER_SECOND,
            (Query(ends, "{{model}} {{outcome}}"),),
            Kind.STACK,
        ),
        Panel(
            "What they wait for",
            "How many waited for it on average, of those that have started.",
            Unit.COUNT,
            (Query(waits.summed("reason").or_zero("reason", "nothing"), "{{reason}}"),),
        ),
        Panel("Whole answer, median", "From the arrival.", Unit.SECONDS, (Query(durations, "{{model}}"),)),
    )
