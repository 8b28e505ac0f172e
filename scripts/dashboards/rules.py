"""Recording rules and alerts.

Invariant: at most three alerts fire for one fault, and none while a deployment idles or works as it should: an alert of
a symptom is silent where an alert of its cause fires.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from scripts.dashboards.expressions import (
    Expression,
    Wanted,
    any_of,
    growth,
    none_of,
    now,
    observations,
    observed,
    quantile,
    rate,
    recorded,
    target,
)
from scripts.dashboards.questions import DID_NOT_WAIT, FAILED, RECENT
from serve_app.core.limits import LimitReason
from serve_app.core.queue import RefusalReason, WaitReason
from serve_app.core.usage.named_tenants import OTHER
from serve_app.router.metrics.table import ClusterFigure, Figure, Metric
from serve_app.types import RequestClass

GROUP = "serve-app"
SHORT = "5m"  # the window of rates
LOW = RequestClass.LOW.label  # waits on purpose
STORE = "store"
FILLED = 0.5  # of the queue's bound: more is no burst
HOG_SHARE = 0.6  # of the tokens of a model
SOME_PER_S = 0.01  # generations: fewer say nothing, and what is left of a difference may be rounding
OTHERS_WAIT_S = 5.0  # mean first token of all other tenants of the model
FLOOD_SHARE = 0.9  # of the requests that wait


class Severity(Enum):
    """`critical` wakes somebody: clients get no answers. `warning` can wait until the morning."""

    CRITICAL = "critical"
    WARNING = "warning"


@dataclass(frozen=True, slots=True)
class Recording:
    """A series that Prometheus computes: `LEVEL:METRIC:OPERATION`."""

    name: str
    expression: Expression

    def now(self, **wanted: Wanted) -> Expression:
        return recorded(self.name, self.expression.labels, **wanted)


@dataclass(frozen=True, slots=True)
class Alert:
    """A condition that holds for `lasts` before it fires.

    Args:
        summary: may name labels of the expression as `{{ $labels.model }}`.
        runbook: a heading of a page in docs/how-to, as `page.md#anchor`.
    """

    name: str
    expression: Expression
    lasts: str
    severity: Severity
    summary: str
    runbook: str


WAITS = Recording(
    "model_priority:serve_app_waits:rate5m",
    observed(Metric.QUEUE_WAIT, SHORT, reason=none_of(DID_NOT_WAIT)).summed("model", "priority"),
)
FIRST_TOKEN = Recording(
    "model_priority:serve_app_first_token_seconds:p95_5m",
    quantile(0.95, Metric.TIME_TO_FIRST_TOKEN, SHORT, "model", "priority"),
)
FILL = Recording("model:serve_app_queue_filled:ratio", now(Figure.WAITING_RATIO).summed("model"))
TOKENS = Recording(
    "model_tenant:serve_app_tokens:rate5m",
    rate(Metric.PROMPT_TOKENS, SHORT)
    .summed("model", "tenant")
    .plus(rate(Metric.COMPLETION_TOKENS, SHORT).summed("model", "tenant")),
)


def _first_token_of_others() -> Expression:
    """The mean first token of all tenants but one, for each tenant."""
    above_low = none_of(LOW)
    seconds = observed(Metric.TIME_TO_FIRST_TOKEN, SHORT, priority=above_low)
    counts = observations(Metric.TIME_TO_FIRST_TOKEN, SHORT, priority=above_low)
    of_others = [series.summed("model", "tenant").taken_from(series.summed("model")) for series in (seconds, counts)]
    return of_others[0].over(of_others[1].above(SOME_PER_S))


OTHERS_FIRST_TOKEN = Recording("model_tenant:serve_app_first_token_of_others_seconds:mean5m", _first_token_of_others())
RECORDINGS = (WAITS, FIRST_TOKEN, FILL, TOKENS, OTHERS_FIRST_TOKEN)

# Alerts of symptoms are silent here: Flood or QueueFills names the cause.
OVERLOADED = FILL.now().above(FILLED)


def _no_answer() -> Alert:
    return Alert(
        "NoAnswer",
        target().equal(0),
        "2m",
        Severity.CRITICAL,
        "Prometheus gets no answer of {{ $labels.instance }}.",
        "troubleshooting.md#the-endpoint-does-not-answer",
    )


def _parts() -> tuple[Alert, ...]:
    answering = now(Figure.BUILD_INFO).present("router", "instance").counted("instance")  # a deployment is one target
    return (
        Alert(
            "Silent",
            now(ClusterFigure.UP, part=none_of(STORE)).lowest("part").below(1),
            "2m",
            Severity.CRITICAL,
            "The {{ $labels.part }} does not answer.",
            "troubleshooting.md#a-process-hangs",
        ),
        Alert(
            "StoreAway",
            now(ClusterFigure.UP, part=STORE).lowest("part").below(1),
            "2m",
            Severity.CRITICAL,
            "The store does not answer: keys, use and batches get 503.",
            "troubleshooting.md#clients-get-5xx",
        ),
        Alert(
            "RouterLost",
            answering.below_that(now(ClusterFigure.ROUTERS_WANTED).highest("instance")),
            "3m",
            Severity.WARNING,
            "{{ $value }} routers of {{ $labels.instance }} answer, and its configuration wants more.",
            "troubleshooting.md#the-endpoint-does-not-answer",
        ),
    )


def _replicas() -> tuple[Alert, ...]:
    refused = growth(Metric.REFUSALS, SHORT, reason=RefusalReason.NO_REPLICA.value).summed("model").above(0)
    asked = now(Figure.WAITING).summed("model").above(0).or_else(refused)
    target_count = now(ClusterFigure.REPLICAS_TARGET).highest("model")
    running = now(ClusterFigure.REPLICAS, state="running").summed("model")
    starts = "troubleshooting.md#a-model-does-not-start"
    return (
        Alert(
            "NoReplica",
            asked.where_not(now(Figure.SLOTS, state="total").present("model")),
            "5m",
            Severity.CRITICAL,
            "Requests ask for {{ $labels.model }}, and none of its replicas runs.",
            starts,
        ),
        Alert(
            "ReplicasMissing",
            target_count.minus(running.or_zero_of(target_count))
            .above(0)
            .where_not(now(Figure.BLOCKED).highest("model").above(0)),
            "30m",
            Severity.WARNING,
            "{{ $value }} replicas of {{ $labels.model }} have been missing for 30 minutes.",
            starts,
        ),
        Alert(
            "Blocked",
            now(Figure.BLOCKED).highest("model").above(0),
            "10m",
            Severity.WARNING,
            "{{ $value }} engines of {{ $labels.model }} wait for GPU memory.",
            "free-gpu-memory.md",
        ),
    )


def _losses() -> tuple[Alert, ...]:
    lost = growth(Figure.REPLICA_EJECTIONS, RECENT).summed("model")
    unhealthy = "troubleshooting.md#a-model-is-unhealthy-or-failed"
    return (
        Alert(
            "EngineLost",
            lost.above(0),
            "0m",
            Severity.WARNING,
            "A replica of {{ $labels.model }} died, hung or failed in the last 10 minutes.",
            unhealthy,
        ),
        Alert(
            "Ejected",
            now(Figure.EJECTED).highest("model").above(0),
            "5m",
            Severity.WARNING,
            "{{ $value }} replicas of {{ $labels.model }} get no requests since they failed.",
            unhealthy,
        ),
    )


def _queue() -> tuple[Alert, ...]:
    by_class = now(Figure.WAITING).summed("model", "priority").over(now(Figure.WAITING).summed("model"))
    flood = by_class.above(FLOOD_SHARE).where_also(OVERLOADED)
    share = TOKENS.now(tenant=none_of(OTHER)).over(TOKENS.now().summed("model"))
    return (
        Alert(
            "Flood",
            flood,
            "5m",
            Severity.WARNING,
            "{{ $labels.priority }} is {{ $value | humanizePercentage }} of the requests that wait for "
            "{{ $labels.model }}, and the queue is filling.",
            "scale-replicas.md",
        ),
        Alert(
            "QueueFills",
            FILL.now().above(0.8).where_not(flood.present("model")),
            "5m",
            Severity.WARNING,
            "The queue of {{ $labels.model }} is {{ $value | humanizePercentage }} full.",
            "scale-replicas.md",
        ),
        Alert(
            "Hog",
            share.above(HOG_SHARE).where_also(OTHERS_FIRST_TOKEN.now().above(OTHERS_WAIT_S)),
            "10m",
            Severity.WARNING,
            "{{ $labels.tenant }} uses {{ $value | humanizePercentage }} of the tokens of {{ $labels.model }}, and the "
            "other tenants wait for their first tokens.",
            "set-limits.md",
        ),
    )


def _waits() -> tuple[Alert, ...]:
    for_kv = any_of(WaitReason.KV_TOKENS.value, WaitReason.KV_DEBT.value)
    kv_waits = observed(Metric.QUEUE_WAIT, SHORT, priority=none_of(LOW), reason=for_kv).summed("model")
    full = now(ClusterFigure.KV_USED_RATIO).highest("model", "replica").above(0.95)
    of_no_limit = none_of(*(reason.value for reason in LimitReason), RefusalReason.NO_REPLICA.value)
    refused = rate(Metric.REFUSALS, SHORT, reason=of_no_limit).summed("model", "reason")
    return (
        Alert(
            "Waits",
            WAITS.now(priority=none_of(LOW)).above(10).where_not(OVERLOADED),
            "10m",
            Severity.WARNING,
            '{{ $value | printf "%.0f" }} requests of class {{ $labels.priority }} wait for {{ $labels.model }} on '
            "average.",
            "explain-a-wait.md",
        ),
        Alert(
            "KvFull",
            full.where_also(kv_waits.above(FILLED)).where_not(OVERLOADED),
            "10m",
            Severity.WARNING,
            "The KV tokens of {{ $labels.replica }} of {{ $labels.model }} are used up, and requests wait for them.",
            "size-a-deployment.md",
        ),
        Alert(
            "Refused",
            refused.above(0.1),
            "10m",
            Severity.WARNING,
            '{{ $labels.model }} refuses {{ $value | printf "%.1f" }} requests a second: {{ $labels.reason }}.',
            "troubleshooting.md#clients-get-429",
        ),
    )


def _answers() -> tuple[Alert, ...]:
    failed = growth(Metric.REQUESTS, RECENT, outcome=FAILED).summed("model")
    ended = growth(Metric.REQUESTS, RECENT).summed("model")
    missed = rate(Metric.SLO_MISSED, RECENT).summed("model", "priority")
    offered = rate(Metric.SLO_OFFERED, RECENT).summed("model", "priority")
    broken = growth(Metric.NOT_CONTINUABLE, RECENT).summed("model", "reason")
    return (
        Alert(
            "Fails",
            failed.over(ended).above(0.02),
            "5m",
            Severity.CRITICAL,
            "{{ $value | humanizePercentage }} of the requests to {{ $labels.model }} fail.",
            "troubleshooting.md#clients-get-5xx",
        ),
        Alert(
            "StreamsBreak",
            broken.above(0),
            "0m",
            Severity.WARNING,
            "Streams of {{ $labels.model }} lost their replica and ended: {{ $labels.reason }}.",
            "troubleshooting.md#streams-break",
        ),
        Alert(
            "RecordsLost",
            growth(Metric.RECORDS_LOST, RECENT).summed("router").above(0),
            "0m",
            Severity.WARNING,
            "Router {{ $labels.router }} cannot write its request log: the disk of its node is full.",
            "troubleshooting.md#memory-nodes-disks",
        ),
        Alert(
            "SloMissed",
            missed.over(offered).above(0.05).where_not(OVERLOADED),
            "10m",
            Severity.WARNING,
            "{{ $labels.model }} misses the service level of class {{ $labels.priority }} for "
            "{{ $value | humanizePercentage }} of its requests.",
            "troubleshooting.md#answers-are-slow",
        ),
    )


ALERTS = (_no_answer(), *_parts(), *_replicas(), *_losses(), *_queue(), *_waits(), *_answers())


def groups(runbooks: str) -> dict[str, Any]:
    """The rules as Prometheus reads them. `runbooks`: where the pages of docs/how-to are; ends with a slash."""
    recordings = [{"record": recording.name, "expr": recording.expression.text} for recording in RECORDINGS]
    alerts = [
        {
            "alert": alert.name,
            "expr": alert.expression.text,
            "for": alert.lasts,
            "labels": {"severity": alert.severity.value},
            "annotations": {"summary": alert.summary, "runbook_url": f"{runbooks}{alert.runbook}"},
        }
        for alert in ALERTS
    ]
    return {
        "groups": [
            {"name": f"{GROUP}-recordings", "rules": recordings},
            {"name": f"{GROUP}-alerts", "rules": alerts},
        ]
    }
