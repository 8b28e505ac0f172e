"""Tenants, their use, and what limits did to them."""

from __future__ import annotations

from scripts.dashboards import questions
from scripts.dashboards.boards import RATE, Board, Kind, Panel, Query, Section, Unit, Variable
from scripts.dashboards.expressions import growth, now, quantile, rate
from serve_app.router.metrics.table import ClusterFigure, Figure, Metric

MODEL = questions.MODEL
TENANT = "$tenant"


def tenants() -> Board:
    return Board(
        "serve-app-tenants",
        "serve-app: tenants and limits",
        "Who uses how much, who is refused, and why. 'other': tenants without a name of their own in the metrics.",
        (Section("Use", _use()), Section("Limits and refusals", _limits())),
        (Variable("model", Figure.WAITING), Variable("tenant", Metric.REQUESTS)),
    )


def _use() -> tuple[Panel, ...]:
    requests = rate(Metric.REQUESTS, RATE, model=MODEL, tenant=TENANT).summed("tenant")
    tokens = {
        "prompt": rate(Metric.PROMPT_TOKENS, RATE, model=MODEL).summed(),
        "output": rate(Metric.COMPLETION_TOKENS, RATE, model=MODEL).summed(),
    }
    of_tenant = {
        "prompt": rate(Metric.PROMPT_TOKENS, RATE, model=MODEL, tenant=TENANT).summed("tenant"),
        "output": rate(Metric.COMPLETION_TOKENS, RATE, model=MODEL, tenant=TENANT).summed("tenant"),
    }
    share = of_tenant["prompt"].plus(of_tenant["output"]).over(tokens["prompt"].plus(tokens["output"]))
    used = rate(Metric.USED_TOKENS, RATE, model=MODEL, tenant=TENANT).summed("tenant")
    estimated = rate(Metric.ESTIMATED_TOKENS, RATE, model=MODEL, tenant=TENANT).summed("tenant")
    first_token = quantile(0.95, Metric.TIME_TO_FIRST_TOKEN, RATE, "tenant", model=MODEL, tenant=TENANT)
    duration = quantile(0.95, Metric.DURATION, RATE, "tenant", model=MODEL, tenant=TENANT)
    return (
        questions.which_tenant_hogs(),
        Panel(
            "Share of the tokens",
            "Of all tenants' tokens, prompts and answers.",
            Unit.RATIO,
            (Query(share, "{{tenant}}"),),
        ),
        Panel("Requests", "Ended, by tenant.", Unit.REQUESTS_PER_SECOND, (Query(requests, "{{tenant}}"),), Kind.STACK),
        Panel(
            "First token, p95",
            "From the arrival, waits included.",
            Unit.SECONDS,
            (Query(first_token, "{{tenant}}"),),
        ),
        Panel("Whole answer, p95", "From the arrival.", Unit.SECONDS, (Query(duration, "{{tenant}}"),)),
        Panel(
            "Used tokens over estimated ones",
            "Near 100% the queue estimates the tenant's requests well. Above it requests have to ask for more.",
            Unit.RATIO,
            (Query(used.over(estimated), "{{tenant}}"),),
        ),
    )


def _limits() -> tuple[Panel, ...]:
    refused = growth(Metric.REFUSALS, RATE, model=MODEL, tenant=TENANT).summed("tenant", "reason")
    limited = growth(Metric.LIMITED, RATE, model=MODEL, tenant=TENANT).summed("tenant", "reason")
    waited = growth(Metric.LIMIT_WAIT, RATE, model=MODEL, tenant=TENANT).summed("tenant")
    keys = now(ClusterFigure.KEYS).highest("source", "state")
    by_hour = growth(Metric.REFUSALS, questions.HOUR, model=MODEL, tenant=TENANT).summed("tenant", "reason")
    return (
        Panel(
            "Refused",
            "Since the point before, for all reasons.",
            Unit.COUNT,
            (Query(refused.or_zero("reason"), "{{tenant}} {{reason}}"),),
        ),
        Panel(
            "Refused by a limit",
            "Of a key or tenant: rate_limit, concurrency, quota. Show the limits: `serve-app keys show-limits ID`.",
            Unit.COUNT,
            (Query(limited.or_zero("reason"), "{{tenant}} {{reason}}"),),
        ),
        Panel(
            "Waited for a limit",
            "Seconds of requests that wait aside (`over_limit: wait`), since the point before.",
            Unit.SECONDS,
            (Query(waited.or_zero("tenant"), "{{tenant}}"),),
        ),
        Panel(
            "API keys",
            "Of the configuration and of the store.",
            Unit.COUNT,
            (Query(keys, "{{source}} {{state}}"),),
            Kind.BARS,
        ),
        Panel(
            "Refused in the last hour",
            "By tenant and reason.",
            Unit.COUNT,
            (Query(by_hour.or_zero("reason"), "{{tenant}} {{reason}}"),),
            Kind.BARS,
        ),
    )
