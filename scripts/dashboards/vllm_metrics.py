"""The metrics of vLLM itself that the dashboards show. A scrape passes them on with `model` and `replica`.

Names, types and labels are those of the vLLM that pyproject.toml pins; `tests/e2e/test_scrape.py` asks a real one.
"""

from __future__ import annotations

from enum import Enum

from serve_app.router.metrics.metric_row import OF_REPLICA, MetricRow

LABELS = (*OF_REPLICA, "model_name", "engine")


class VllmMetric(Enum):
    """By vLLM's names; buckets are not needed here."""

    RUNNING = MetricRow("vllm:num_requests_running", "gauge", LABELS, "requests in the batch")
    WAITING = MetricRow("vllm:num_requests_waiting", "gauge", LABELS, "requests that wait for it")
    KV_USAGE = MetricRow("vllm:kv_cache_usage_perc", "gauge", LABELS, "used part of the KV cache; 1: all")
    PREFIX_QUERIES = MetricRow("vllm:prefix_cache_queries", "counter", LABELS, "tokens looked for in the prefix cache")
    PREFIX_HITS = MetricRow("vllm:prefix_cache_hits", "counter", LABELS, "tokens found there")
    PREEMPTIONS = MetricRow("vllm:num_preemptions", "counter", LABELS, "requests stopped for want of KV blocks")
    TIME_PER_TOKEN = MetricRow(
        "vllm:request_time_per_output_token_seconds", "histogram", LABELS, "mean seconds a token, of a request"
    )
    TIME_TO_FIRST_TOKEN = MetricRow(
        "vllm:time_to_first_token_seconds", "histogram", LABELS, "seconds to the first token, in the engine"
    )
