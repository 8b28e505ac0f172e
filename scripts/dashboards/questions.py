"""The seven questions of a night, a panel each. The overview has all of them.

A panel is the same wherever it stands; `model` is a variable of the dashboard.
"""

from __future__ import annotations

from autoscaling.policies import Cause
from scripts.dashboards.boards import RATE, Kind, Panel, Query, Unit
from scripts.dashboards.expressions import any_of, growth, mean, none_of, now, observed, quantile, rate
from serve_app.core.queue import WaitReason
from serve_app.router.metrics.table import ClusterFigure, Figure, Metric
from serve_app.types import Outcome

MODEL = "$model"
DID_NOT_WAIT = "none"
FAILED = any_of(Outcome.ENGINE_FAILED.value, Outcome.INTERNAL_ERROR.value)
RECENT = "10m"
HOUR = "1h"


def who_waits() -> Panel:
    waited = observed(Metric.QUEUE_WAIT, RATE, model=MODEL, reason=none_of(DID_NOT_WAIT))
    waiting = now(Figure.WAITING, model=MODEL)
    return Panel(
        "who waits and why",
        "Requests that wait, by class. 'now': at the last scrape. With a reason: how many waited for it on average, of "
        f"those that have started. {WaitReason.SLOTS.value} and {WaitReason.GUARD_SLOTS.value}: add replicas. "
        f"{WaitReason.KV_TOKENS.value}: KV tokens are short. {WaitReason.TURN.value}: others are ahead. "
        f"{WaitReason.NO_REPLICA.value}: no replica runs.",
        Unit.COUNT,
        (
            Query(waiting.summed("priority"), "{{priority}} now"),
            Query(waited.summed("priority", "reason").or_zero("reason", "nothing"), "{{priority}} {{reason}}"),
        ),
        nothing="no router answers",
    )


def which_tenant_hogs() -> Panel:
    prompts = rate(Metric.PROMPT_TOKENS, RATE, model=MODEL).summed("tenant")
    answers = rate(Metric.COMPLETION_TOKENS, RATE, model=MODEL).summed("tenant")
    return Panel(
        "which tenant hogs",
        "Tokens a second by tenant, prompts and answers, counted when an answer ends. 'other': tenants without a name "
        "of their own in the metrics. Lower the tenant's weight, or set a limit.",
        Unit.PER_SECOND,
        (Query(prompts.plus(answers), "{{tenant}}"),),
        Kind.STACK,
    )


def first_token_by_class() -> Panel:
    by_class = quantile(0.95, Metric.TIME_TO_FIRST_TOKEN, HOUR, "priority", model=MODEL)
    return Panel(
        "p95 of the first token by class in the last hour",
        "95% of the generations of the last hour had their first token within this time, waits included.",
        Unit.SECONDS,
        (Query(by_class, "{{priority}}"),),
        Kind.BARS,
        nothing="no generation in the last hour",
    )


def what_memory_does() -> Panel:
    return Panel(
        "what does GPU memory do",
        "Bytes of all devices: granted to engines, free, and reserved, which is nobody's. If bytes are free and an "
        "engine waits for memory, no device has enough of them: see GPU memory.",
        Unit.BYTES,
        (Query(now(ClusterFigure.GPU_MEMORY).summed("kind"), "{{kind}}"),),
        Kind.STACK,
        nothing="the quota actor does not answer",
    )


def why_it_scaled() -> Panel:
    """What scaling looks at, what it has decided and why, and what came of it."""
    replicas = now(ClusterFigure.REPLICAS, model=MODEL).summed("model", "state")
    granted = now(Figure.SLOTS, model=MODEL, state="granted").summed("model")
    waiting = now(Figure.WAITING, model=MODEL).summed("model")
    reasons = now(ClusterFigure.REPLICAS_REASON, model=MODEL).highest("model", "reason")
    return Panel(
        "why did it scale",
        "Wanted replicas and the reason, which is a line at 1 while it holds; the target is what Serve keeps after the "
        "delays. Beside them the replicas by state, and the requests that scaling counts: those that run and those "
        f"that wait. 'blocked', or the reason {Cause.MEMORY.value}: there is no GPU memory for more.",
        Unit.COUNT,
        (
            Query(now(ClusterFigure.REPLICAS_WANTED, model=MODEL).highest("model"), "{{model}} wanted"),
            Query(now(ClusterFigure.REPLICAS_ADVISED, model=MODEL).highest("model"), "{{model}} advised"),
            Query(now(ClusterFigure.REPLICAS_TARGET, model=MODEL).highest("model"), "{{model}} target"),
            Query(reasons, "{{model}} because: {{reason}}"),
            Query(replicas, "{{model}} replicas {{state}}"),
            Query(granted.plus(waiting), "{{model}} requests"),
            Query(waiting, "{{model}} requests that wait"),
        ),
        nothing="nothing runs",
    )


def what_failed() -> Panel:
    ended = growth(Metric.REQUESTS, RECENT, model=MODEL, outcome=FAILED).summed("model", "outcome")
    broken = growth(Metric.NOT_CONTINUABLE, RECENT, model=MODEL).summed("model", "reason")
    ejected = growth(Figure.REPLICA_EJECTIONS, RECENT, model=MODEL).summed("model", "reason")
    return Panel(
        "what failed in the last ten minutes",
        "Requests that failed, streams that lost their replica and could not continue, and replicas that a router took "
        "out. One request: `serve-app explain ID`.",
        Unit.COUNT,
        (
            Query(ended.or_zero("outcome", "no request"), "{{model}} {{outcome}}"),
            Query(broken.or_zero("reason", "none"), "{{model}} streams broken: {{reason}}"),
            Query(ejected.above(0).or_zero("reason", "none"), "{{model}} replicas taken out: {{reason}}"),
        ),
        Kind.BARS,
        alarm=1,
        nothing="no router answers",
    )


def model_or_router() -> Panel:
    return Panel(
        "model or router?",
        "Means that add up to the first token: the wait in the queue, the router's own part, the engine's part. The "
        "router needs some ms. A high wait: see who waits. A high part of the engine: long prompts or full batches.",
        Unit.SECONDS,
        (
            Query(mean(Metric.QUEUE_WAIT, RATE, model=MODEL), "wait in the queue"),
            Query(mean(Metric.FIRST_TOKEN_IN_ROUTER, RATE, model=MODEL), "router"),
            Query(mean(Metric.FIRST_TOKEN_IN_ENGINE, RATE, model=MODEL), "model"),
        ),
        Kind.STACK,
    )


def refused() -> Panel:
    """Not one of the seven, and asked as often."""
    grown = growth(Metric.REFUSALS, RATE, model=MODEL).summed("reason")
    return Panel(
        "refused, by reason",
        "Requests refused since the point before. rate_limit, concurrency and quota are limits of keys; queue_full, "
        "shed, timeout and deadline mean more load than capacity.",
        Unit.COUNT,
        (Query(grown.or_zero("reason"), "{{reason}}"),),
        nothing="no router answers",
    )
