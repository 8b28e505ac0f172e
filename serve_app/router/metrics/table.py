"""The router's metrics: name, type, labels and help. docs/reference/metrics.md shows them.

`Metric` is counted as requests come and end, by `counts`; the others are read at each scrape.

Invariant: labels are bounded; models come from the configuration, classes and outcomes from enums, and of tenants only
those of most use are named (`core.usage.named_tenants`).
Invariant: no two rows have one name, with or without `_total`: in OpenMetrics they would be one family.
"""

from __future__ import annotations

from enum import Enum

from serve_app.router.metrics import buckets
from serve_app.router.metrics.haproxy_table import HaproxyFigure
from serve_app.router.metrics.metric_row import OF_CLASS, OF_MODEL, OF_REPLICA, OF_TENANT, MetricRow


class Metric(Enum):
    """What is counted as requests come and end."""

    __hash__ = object.__hash__  # looked up at each request: `Enum`'s own calls a Python function

    ARRIVALS = MetricRow(
        "serve_app_arrivals",
        "counter",
        (*OF_TENANT, "priority"),
        "requests that were read and understood, when they arrive",
    )
    REQUESTS = MetricRow(
        "serve_app_requests", "counter", (*OF_TENANT, "priority", "outcome"), "requests by how they ended"
    )
    NAMED_REQUESTS = MetricRow(
        "serve_app_named_requests",
        "counter",
        ("name", "model", "outcome"),
        "requests to a name of `routes`, by the model on which they ended",
    )
    NAMED_HOPS = MetricRow(
        "serve_app_named_hops",
        "counter",
        ("name", "model", "reason"),
        "requests to a name of `routes` that left a model for the next one, by that model",
    )
    REFUSALS = MetricRow(
        "serve_app_refusals", "counter", (*OF_TENANT, "priority", "reason"), "refused requests, by reason"
    )
    UNAUTHORIZED = MetricRow(
        "serve_app_unauthorized",
        "counter",
        ("reason",),
        "requests whose API key or token was not accepted (outcome `unauthorized`), by reason",
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
        (*OF_CLASS, "reason"),
        "seconds in the queue before the last grant, by what for (`waited_for` of a receipt; `none`: it did not wait); "
        "a retry counts anew",
        buckets=buckets.QUEUE_WAIT_S,
    )
    WAITED = MetricRow(
        "serve_app_waited_seconds",
        "counter",
        (*OF_CLASS, "reason"),
        "serve_app_queue_wait_seconds_sum",
        is_old=True,
    )
    TIME_TO_FIRST_TOKEN = MetricRow(
        "serve_app_time_to_first_token_seconds",
        "histogram",
        (*OF_TENANT, "priority"),
        "seconds from arrival to the first token of a generation, streamed or not",
        buckets=buckets.TIME_TO_FIRST_TOKEN_S,
    )
    FIRST_TOKEN_IN_ROUTER = MetricRow(
        "serve_app_first_token_in_router_seconds",
        "histogram",
        OF_CLASS,
        "the router's part of the first token: from arrival to the replica, without waits; of requests with one run",
        buckets=buckets.ROUTER_S,
    )
    FIRST_TOKEN_IN_ENGINE = MetricRow(
        "serve_app_first_token_in_engine_seconds",
        "histogram",
        OF_CLASS,
        "the replica's part: from there to the first token; of requests with one run",
        buckets=buckets.TIME_TO_FIRST_TOKEN_S,
    )
    TIME_PER_TOKEN = MetricRow(
        "serve_app_time_per_output_token_seconds",
        "histogram",
        OF_CLASS,
        "mean seconds between the tokens of a request",
        buckets=buckets.INTER_TOKEN_LATENCY_S,
    )
    LONGEST_GAP = MetricRow(
        "serve_app_longest_token_gap_seconds",
        "histogram",
        OF_CLASS,
        "longest pause between tokens of a streamed request",
        buckets=buckets.INTER_TOKEN_LATENCY_S,
    )
    DURATION = MetricRow(
        "serve_app_request_duration_seconds",
        "histogram",
        (*OF_TENANT, "priority"),
        "seconds from arrival to the end of an answer (outcome `ok`); without work that takes no slot",
        buckets=buckets.REQUEST_LATENCY_S,
    )
    REQUEST_PROMPT_TOKENS = MetricRow(
        "serve_app_request_prompt_tokens",
        "histogram",
        OF_CLASS,
        "prompt tokens of a request",
        buckets=buckets.REQUEST_TOKENS,
    )
    REQUEST_OUTPUT_TOKENS = MetricRow(
        "serve_app_request_output_tokens",
        "histogram",
        OF_CLASS,
        "generated tokens of a request",
        buckets=buckets.REQUEST_TOKENS,
    )
    RETRIES = MetricRow(
        "serve_app_retries", "counter", OF_CLASS, "runs after the loss of a replica, from the start or continued"
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
        buckets=buckets.CONTINUATION_GAP_S,
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
    ESTIMATE_RATIO = MetricRow(
        "serve_app_estimate_ratio",
        "histogram",
        ("model", "part"),
        "used over estimated tokens of an answered generation",
        buckets=buckets.ESTIMATE_RATIO,
    )
    SLO_OFFERED = MetricRow("serve_app_slo_offered", "counter", OF_CLASS, "generations of classes with a service level")
    SLO_MET = MetricRow("serve_app_slo_met", "counter", OF_CLASS, "generations served within their service level")
    SLO_MISSED = MetricRow(
        "serve_app_slo_missed",
        "counter",
        (*OF_CLASS, "reason"),
        "generations not served within it; without those whose client left in time",
    )
    TRACE_SPANS_DROPPED = MetricRow(
        "serve_app_trace_spans_dropped",
        "counter",
        ("reason",),
        "spans that no collector got: `queue_full`, `export_failed`, `ending` (of the router)",
    )
    RECORDS_LOST = MetricRow(
        "serve_app_records_lost", "counter", (), "records of ended requests, and of minutes, that the disk did not take"
    )
    GOODPUT_TOKENS = MetricRow(
        "serve_app_goodput_tokens", "counter", OF_CLASS, "generated tokens of generations within their service level"
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


class Figure(Enum):
    """What a scrape reads from the models of a router."""

    BUILD_INFO = MetricRow("serve_app_build_info", "gauge", ("version", "vllm"), "1; the versions that a router runs")
    WAITING = MetricRow("serve_app_waiting", "gauge", OF_CLASS, "requests that wait")
    WAITING_RATIO = MetricRow(
        "serve_app_waiting_ratio",
        "gauge",
        OF_MODEL,
        "requests that wait over `admission.max_queued`; the sum over the routers is 1 when the queue is full",
    )
    SLOTS = MetricRow(
        "serve_app_slots",
        "gauge",
        (*OF_REPLICA, "state"),
        "slots of a replica: `total`; `granted` to the router's requests; `booked` for the router, credit included",
    )
    BLOCKED = MetricRow("serve_app_blocked", "gauge", ("model", "reason"), "engines that wait to load: `memory`")
    GPU_FRAGMENTATION = MetricRow(
        "serve_app_gpu_memory_fragmentation",
        "gauge",
        ("node",),
        "share of a node's free GPU memory into which no engine of a present model fits; 0 to 1",
    )
    EJECTED = MetricRow("serve_app_ejected", "gauge", OF_MODEL, "replicas that are ejected or on probation")
    UNREAD_BYTES = MetricRow("serve_app_unread_bytes", "gauge", (), "bytes of answers that clients have not read yet")
    USAGE_PENDING = MetricRow(
        "serve_app_usage_pending", "gauge", (), "ended requests whose use the store has not acknowledged yet"
    )
    JWKS_AGE = MetricRow(
        "serve_app_jwks_age_seconds",
        "gauge",
        (),
        "seconds since a router has read the keys of `auth.jwt`; missing until the first time",
    )
    PLACEMENTS = MetricRow(
        "serve_app_placements",
        "counter",
        ("model", "key", "place"),
        "grants by key (`session`, `prefix`, `none`) and place (`home`, `next`, `two_choices`, `least_busy`, `probe`, "
        "`session`, `most_free`: the queue's own choice)",
    )
    REPLICA_EJECTIONS = MetricRow(
        "serve_app_replica_ejections",
        "counter",
        ("model", "reason"),
        "ejections: `lost`, `consecutive`, `rate`, `probe`",
    )
    SLOW_CLIENTS = MetricRow("serve_app_slow_clients", "counter", (), "requests ended because of too many unread bytes")
    OLD_REFUSED = MetricRow("serve_app_refused", "gauge", ("model", "reason"), "serve_app_refusals_total", True)
    OLD_PLACED = MetricRow("serve_app_placed", "gauge", ("model", "key", "place"), "serve_app_placements_total", True)
    OLD_EJECTIONS = MetricRow(
        "serve_app_ejections", "gauge", ("model", "reason"), "serve_app_replica_ejections_total", True
    )
    OLD_UNREAD_ENDED = MetricRow("serve_app_unread_ended", "gauge", (), "serve_app_slow_clients_total", True)


class EngineFigure(Enum):
    """What a scrape reads from the engines; a member is called as the field of `EngineLoad`."""

    RUNNING = MetricRow("serve_app_engine_running_sequences", "gauge", OF_REPLICA, "sequences that run in the engine")
    WAITING = MetricRow(
        "serve_app_engine_waiting_sequences",
        "gauge",
        OF_REPLICA,
        "sequences that wait in the engine, for its batch, too",
    )
    KV_CACHE_USAGE = MetricRow(
        "serve_app_engine_kv_cache_usage_ratio", "gauge", OF_REPLICA, "part of the KV cache that is in use, 0 to 1"
    )
    STEPS = MetricRow("serve_app_engine_steps", "counter", OF_REPLICA, "steps")
    GENERATED_TOKENS = MetricRow("serve_app_engine_generated_tokens", "counter", OF_REPLICA, "generated tokens")
    PROMPT_TOKENS = MetricRow(
        "serve_app_engine_prompt_tokens", "counter", OF_REPLICA, "tokens of prompts, each prompt once"
    )
    PREFILLED_TOKENS = MetricRow(
        "serve_app_engine_prefilled_tokens",
        "counter",
        OF_REPLICA,
        "tokens computed before a sequence's next token: its prompt, and what it had produced before a stop or loss, "
        "less prefix cache hits",
    )
    PREEMPTIONS = MetricRow(
        "serve_app_engine_preemptions", "counter", OF_REPLICA, "sequences that the engine stopped for want of KV blocks"
    )
    SEQUENCE_STEPS = MetricRow(
        "serve_app_engine_sequence_steps",
        "counter",
        OF_REPLICA,
        "sequences of all steps, added up: its rate over that of the steps is the mean batch",
    )
    BATCH_SIZE = MetricRow(
        "serve_app_engine_batch_size",
        "gauge",
        OF_REPLICA,
        "mean requests of the last 32 batches; without `batching` mean sequences of a step, over ten seconds",
    )
    BATCH_WAIT_S = MetricRow(
        "serve_app_engine_batch_wait_seconds",
        "gauge",
        OF_REPLICA,
        "mean seconds that these requests waited for their batch; 0 without `batching`",
    )
    PADDING_RATIO = MetricRow(
        "serve_app_engine_padding_ratio",
        "gauge",
        OF_REPLICA,
        "mean part of a batch that would be padding if all took as long as the longest; 0 without `batching`",
    )
    TOKENS_PER_S = MetricRow(
        "serve_app_engine_tokens_per_second", "gauge", OF_REPLICA, "prompt and output tokens a second, over ten seconds"
    )
    BATCHES = MetricRow("serve_app_engine_batches", "counter", OF_REPLICA, "batches started; needs `batching`")
    BATCHED_REQUESTS = MetricRow(
        "serve_app_engine_batched_requests", "counter", OF_REPLICA, "requests of the batches started"
    )
    OLD = MetricRow(
        "serve_app_engine",
        "gauge",
        (*OF_REPLICA, "figure"),
        "serve_app_engine_...: a metric for each figure, all of them under this name",
        True,
    )


class ClusterFigure(Enum):
    """What a scrape reads from the quota actor, Serve's controller and the store."""

    UP = MetricRow(
        "serve_app_up",
        "gauge",
        ("part",),
        "1: `quota_actor`, `store`, `controller` (Serve's) or `haproxy` (every node's) has answered",
    )
    GPU_MEMORY = MetricRow(
        "serve_app_gpu_memory_bytes",
        "gauge",
        ("node", "device", "kind"),
        "bytes of a device: `reserved` (nobody's), `granted` to engines, `free`",
    )
    REPLICA_MEMORY = MetricRow(
        "serve_app_replica_memory_bytes", "gauge", (*OF_REPLICA, "kind"), "bytes of a replica: `granted`, `measured`"
    )
    KV_TOKENS = MetricRow(
        "serve_app_kv_tokens",
        "gauge",
        (*OF_REPLICA, "kind"),
        "KV tokens of a replica: `total`, `free`, `used` by requests, reserved for `sessions`",
    )
    KV_USED_RATIO = MetricRow("serve_app_kv_used_ratio", "gauge", OF_REPLICA, "KV tokens used over all of a replica")
    REPLICAS = MetricRow(
        "serve_app_replicas",
        "gauge",
        ("model", "state"),
        "replicas: `blocked` (waits for memory), `loading`, `running`, `draining`, `ending`",
    )
    REPLICAS_SHORT = MetricRow(
        "serve_app_replicas_short", "gauge", OF_MODEL, "1: scaling wants more replicas, and memory for them lacks"
    )
    REPLICAS_WANTED = MetricRow("serve_app_replicas_wanted", "gauge", OF_MODEL, "replicas that scaling wants now")
    REPLICAS_ADVISED = MetricRow(
        "serve_app_replicas_advised", "gauge", OF_MODEL, "replicas that the policy of `replicas.advise` would want"
    )
    REPLICAS_TARGET = MetricRow("serve_app_replicas_target", "gauge", OF_MODEL, "the same after the delays")
    REPLICAS_REASON = MetricRow(
        "serve_app_replicas_wanted_reason",
        "gauge",
        ("model", "reason"),
        "1: why so many",
    )
    ROUTERS_WANTED = MetricRow("serve_app_routers_wanted", "gauge", (), "routers that the configuration wants")
    SESSIONS = MetricRow("serve_app_sessions", "gauge", ("model", "state"), "agent sessions: `open`, `waiting`")
    BATCHES = MetricRow("serve_app_batches", "gauge", ("status",), "batches that have not ended, by OpenAI's status")
    BATCH_ROWS = MetricRow(
        "serve_app_batch_rows", "gauge", ("state",), "their rows: `waiting`, `running`, `completed`, `failed`"
    )
    BATCH_MODEL_ROWS = MetricRow(
        "serve_app_batch_model_rows",
        "gauge",
        ("model", "state"),
        "the same by model; `other`: not served here",
    )
    OLDEST_BATCH = MetricRow("serve_app_oldest_batch_age_seconds", "gauge", (), "age of the oldest of them")
    STORE_BYTES = MetricRow("serve_app_store_bytes", "gauge", (), "bytes of the store's database")
    KEYS = MetricRow(
        "serve_app_keys",
        "gauge",
        ("source", "state"),
        "API keys: `configured` or `stored`; `valid`, `revoked`, `expired`",
    )


TABLE: tuple[MetricRow, ...] = tuple(
    figure.value for enum in (Metric, Figure, EngineFigure, ClusterFigure, HaproxyFigure) for figure in enum
)
