"""What vLLM counts itself, beside what the routers have measured of the same replicas."""

from __future__ import annotations

from scripts.dashboards.boards import RATE, Panel, Query, Unit
from scripts.dashboards.expressions import Source, now, quantile, rate
from scripts.dashboards.vllm_metrics import VllmMetric
from serve_app.router.metrics.table import Metric

THIRD = 8  # of the width
NOTHING = "no replica of the model runs vLLM, or there was no request"


def vllm_panels(model: str) -> tuple[Panel, ...]:
    """`model`: the variable with the model's name."""
    hits = rate(VllmMetric.PREFIX_HITS, RATE, model=model).summed("replica")
    looked_for = rate(VllmMetric.PREFIX_QUERIES, RATE, model=model).summed("replica")
    preempted = rate(VllmMetric.PREEMPTIONS, RATE, model=model).summed("replica")
    running = now(VllmMetric.RUNNING, model=model).summed("replica")
    waiting = now(VllmMetric.WAITING, model=model).summed("replica")
    return (
        _panel(
            "KV cache in use, by vLLM",
            "Blocks with tokens, of each replica. `KV tokens in use` counts what requests are expected to need.",
            Unit.RATIO,
            Query(now(VllmMetric.KV_USAGE, model=model).highest("replica"), "{{replica}}"),
        ),
        _panel(
            "Requests in vLLM",
            "Few should wait here: routers send what fits.",
            Unit.COUNT,
            Query(running, "{{replica}} running"),
            Query(waiting, "{{replica}} waiting"),
        ),
        _panel(
            "Prompt tokens found in vLLM's prefix cache",
            "Over those that it looked for.",
            Unit.RATIO,
            Query(hits.over(looked_for), "{{replica}}"),
        ),
        _panel(
            "Preemptions in vLLM",
            "Requests that vLLM stopped for want of KV blocks. It computes them again.",
            Unit.PER_SECOND,
            Query(preempted, "{{replica}}"),
        ),
        _compared(
            "Time per output token, by vLLM and by the routers",
            "The mean of a request. If the routers measure more, the time is lost between engine and router.",
            VllmMetric.TIME_PER_TOKEN,
            Metric.TIME_PER_TOKEN,
            model,
        ),
        _compared(
            "First token, by vLLM and by the routers",
            "The routers count from the grant of the replica. The difference is the way there and back.",
            VllmMetric.TIME_TO_FIRST_TOKEN,
            Metric.FIRST_TOKEN_IN_ENGINE,
            model,
        ),
    )


def _panel(title: str, about: str, unit: Unit, *queries: Query) -> Panel:
    return Panel(title, about, unit, queries, width=THIRD, nothing=NOTHING)


def _compared(title: str, about: str, vllms: Source, ours: Source, model: str) -> Panel:
    """The median and the slowest 5% of both."""
    queries = [
        Query(quantile(part, source, RATE, model=model), f"{name} p{part * 100:g}")
        for name, source in (("vLLM", vllms), ("routers", ours))
        for part in (0.5, 0.95)
    ]
    return _panel(title, about, Unit.SECONDS, *queries)
