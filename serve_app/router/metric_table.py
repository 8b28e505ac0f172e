"""The router's metrics: name, type, labels and help. `metrics` counts them; docs/reference/metrics.md shows them.

Invariant: labels are bounded; models and tenants come from the configuration, classes and outcomes from enums.
"""

from __future__ import annotations

from enum import Enum
from typing import Literal, NamedTuple

OF_MODEL = ("model",)
OF_CLASS = ("model", "priority")
OF_TENANT = ("model", "tenant")


class MetricRow(NamedTuple):
    """One metric; the name of a counter is that without `_total`."""

    name: str
    type: Literal["counter", "histogram", "gauge"]
    labels: tuple[str, ...]
    help: str


class Metric(Enum):
    """The table."""

    __hash__ = object.__hash__  # looked up at each request: `Enum`'s own calls a Python function

    REQUESTS = MetricRow(
        "serve_app_requests", "counter", (*OF_TENANT, "priority", "outcome"), "requests by how they ended"
    )
    IDEMPOTENT_REQUESTS = MetricRow(
        "serve_app_idempotent_requests",
        "counter",
        ("model", "result"),
        "answered requests with an `Idempotency-Key`: `run`, `restarted` (its first router died), `joined`, `replayed`",
    )
    QUEUE_WAIT = MetricRow(
        "serve_app_queue_wait_seconds",
        "histogram",
        OF_CLASS,
        "seconds in the queue before the last grant; a retry counts anew",
    )
    WAITED = MetricRow(
        "serve_app_waited_seconds",
        "counter",
        (*OF_CLASS, "reason"),
        "seconds that granted requests waited in the queue, by what for (`waited_for` of a receipt)",
    )
    TIME_TO_FIRST_TOKEN = MetricRow(
        "serve_app_time_to_first_token_seconds",
        "histogram",
        OF_CLASS,
        "seconds from arrival to the first token of a generation, streamed or not",
    )
    MOVES = MetricRow(
        "serve_app_moves",
        "counter",
        OF_MODEL,
        "how often requests continued elsewhere since their replica was taken away",
    )
    PREEMPTIONS = MetricRow(
        "serve_app_preemptions",
        "counter",
        OF_CLASS,
        "how often requests were stopped for others while they ran, and continued later",
    )
    MIGRATIONS = MetricRow(
        "serve_app_migrations", "counter", OF_MODEL, "streams that lost their replica and continued on another one"
    )
    MIGRATION_GAP = MetricRow(
        "serve_app_migration_gap_seconds",
        "histogram",
        OF_MODEL,
        "seconds from the loss to the first frame of the next replica",
    )
    NOT_CONTINUABLE = MetricRow(
        "serve_app_not_continuable",
        "counter",
        ("model", "reason"),
        "streams that lost their replica and ended: `engine` (the engines cannot continue, or none of the same model "
        "is left), `request` (what it asks for cannot be), `too_long`, `losses` (three), `queue` (no replica took it "
        "in time), `refused` (by the next engine)",
    )
    GRANTED_TOKENS = MetricRow(
        "serve_app_granted_tokens",
        "counter",
        OF_CLASS,
        "estimated tokens of granted requests; of a continued one, what is left",
    )
    PROMPT_TOKENS = MetricRow("serve_app_prompt_tokens", "counter", OF_TENANT, "prompt tokens")
    COMPLETION_TOKENS = MetricRow("serve_app_completion_tokens", "counter", OF_TENANT, "generated tokens")
    ESTIMATED_TOKENS = MetricRow(
        "serve_app_estimated_tokens",
        "counter",
        (*OF_TENANT, "part"),
        "what answered generations were estimated to need",
    )
    USED_TOKENS = MetricRow(
        "serve_app_used_tokens", "counter", (*OF_TENANT, "part"), "what answered generations needed"
    )
    SLO_OFFERED = MetricRow("serve_app_slo_offered", "counter", OF_CLASS, "generations of classes with a service level")
    SLO_MET = MetricRow("serve_app_slo_met", "counter", OF_CLASS, "generations served within their service level")
    SLO_MISSED = MetricRow(
        "serve_app_slo_missed",
        "counter",
        (*OF_CLASS, "reason"),
        "generations not served within it; without those whose client left in time",
    )
    GOODPUT_TOKENS = MetricRow(
        "serve_app_goodput_tokens", "counter", OF_CLASS, "generated tokens of generations within their service level"
    )
    WAITING = MetricRow("serve_app_waiting", "gauge", OF_CLASS, "requests that wait")
    REFUSED = MetricRow("serve_app_refused", "gauge", ("model", "reason"), "refusals of the queue")
    SLOTS = MetricRow(
        "serve_app_slots",
        "gauge",
        ("model", "replica", "state"),
        "slots of a replica: `total`; `granted` to the router's requests; `booked` for the router, credit included",
    )
    BLOCKED = MetricRow("serve_app_blocked", "gauge", ("model", "reason"), "engines that wait to load: `memory`")
    GPU_FRAGMENTATION = MetricRow(
        "serve_app_gpu_memory_fragmentation",
        "gauge",
        ("node",),
        "share of a node's free GPU memory into which no engine of a present model fits; 0 to 1",
    )
    LIMITED = MetricRow(
        "serve_app_limited", "counter", (*OF_TENANT, "reason"), "requests that a limit of their key or tenant refused"
    )
    LIMIT_WAIT = MetricRow(
        "serve_app_limit_wait_seconds",
        "counter",
        OF_TENANT,
        "seconds that requests waited aside for a limit (`over_limit: wait`)",
    )
    PLACED = MetricRow(
        "serve_app_placed",
        "gauge",
        ("model", "key", "place"),
        "grants by key (`session`, `prefix`, `none`) and place (`home`, `next`, `two_choices`, `least_busy`, `probe`, "
        "`session`, `most_free`: the queue's own choice)",
    )
    EJECTED = MetricRow("serve_app_ejected", "gauge", OF_MODEL, "replicas that are ejected or on probation")
    EJECTIONS = MetricRow(
        "serve_app_ejections", "gauge", ("model", "reason"), "ejections: `lost`, `consecutive`, `rate`, `probe`"
    )
    UNREAD_BYTES = MetricRow("serve_app_unread_bytes", "gauge", (), "bytes of answers that clients have not read yet")
    UNREAD_ENDED = MetricRow("serve_app_unread_ended", "gauge", (), "requests ended because of too many unread bytes")
    ENGINE = MetricRow(
        "serve_app_engine",
        "gauge",
        ("model", "replica", "figure"),
        "live figures of an engine: `running`, `waiting`, `kv_cache_usage`, `preemptions`, ...; those of its batches "
        "below",
    )
