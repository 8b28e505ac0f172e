"""Counts the router's metrics (`metric_table`), in Prometheus' format; `scrape` answers with those of all routers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from serve_app.core.queue import RefusalReason
from serve_app.core.receipts import Receipt, RequestTrace, SloVerdict
from serve_app.router.metric_table import Metric, MetricRow
from serve_app.router.model_router import ModelRouter
from serve_app.transport import EngineLoad
from serve_app.types import Outcome, RequestClass

# seconds; from an idle tiny model's first token to the longest permitted wait
LATENCY_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class RouterMetrics:
    """Counts the metrics of one router replica, in `registry`, and of the engines that it asks, in
    `engine_registry`."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.engine_registry = CollectorRegistry()
        self._counters = {
            metric: Counter(row.name, row.help, row.labels, registry=self.registry) for metric, row in _rows("counter")
        }
        self._histograms = {
            metric: Histogram(row.name, row.help, row.labels, registry=self.registry, buckets=LATENCY_BUCKETS_S)
            for metric, row in _rows("histogram")
        }
        self._gauges = {
            metric: Gauge(
                row.name,
                row.help,
                row.labels,
                registry=self.engine_registry if metric is Metric.ENGINE else self.registry,
            )
            for metric, row in _rows("gauge")
        }

    def count_ended(self, model: str, tenant: str, request_class: RequestClass, outcome: Outcome) -> None:
        """Count a request's end."""
        self._counters[Metric.REQUESTS].labels(model, tenant, request_class.label, outcome.value).inc()

    def count_keyed(self, model: str, result: str) -> None:
        """Count an answered request with an Idempotency-Key: `run`, `restarted`, `joined` or `replayed`."""
        self._counters[Metric.IDEMPOTENT_REQUESTS].labels(model, result).inc()

    def count_granted(self, model: str, request_class: RequestClass, trace: RequestTrace, tokens: int) -> None:
        """Count a granted request, its wait and its estimated tokens."""
        labels = (model, request_class.label)
        self._histograms[Metric.QUEUE_WAIT].labels(*labels).observe(trace.waited_s)
        if trace.waited_for is not None:
            self._counters[Metric.WAITED].labels(*labels, trace.waited_for.value).inc(trace.waited_s)
        self._counters[Metric.GRANTED_TOKENS].labels(*labels).inc(tokens)

    def count_continued(self, model: str, request_class: RequestClass, trace: RequestTrace) -> None:
        """Count how often an ended request was stopped for others, and where it continued or why it did not."""
        if trace.preempted:
            self._counters[Metric.PREEMPTIONS].labels(model, request_class.label).inc(trace.preempted)
        if trace.moved:
            self._counters[Metric.MOVES].labels(model).inc(trace.moved)
        for _, gap_s in trace.continued:
            self._counters[Metric.MIGRATIONS].labels(model).inc()
            self._histograms[Metric.MIGRATION_GAP].labels(model).observe(gap_s)
        if trace.not_continued is not None:
            self._counters[Metric.NOT_CONTINUABLE].labels(model, trace.not_continued.value).inc()

    def count_limited(self, model: str, tenant: str, reason: str) -> None:
        """Count a request that a limit refused."""
        self._counters[Metric.LIMITED].labels(model, tenant, reason).inc()

    def count_limit_wait(self, model: str, tenant: str, waited_s: float) -> None:
        """Count the wait of a request for a limit."""
        self._counters[Metric.LIMIT_WAIT].labels(model, tenant).inc(waited_s)

    def observe_first_token(self, model: str, request_class: RequestClass, seconds: float) -> None:
        self._histograms[Metric.TIME_TO_FIRST_TOKEN].labels(model, request_class.label).observe(seconds)

    def count_served(self, receipt: Receipt, *, is_streamed: bool) -> None:
        """Count the verdict on a generation of a class with a service level, and its output tokens; observe the first
        token of an answer that is not streamed: that of a stream was observed when it came."""
        model = receipt.model
        request_class = receipt.request_class
        if not is_streamed and receipt.first_token_s is not None:
            self.observe_first_token(model, request_class, receipt.first_token_s)
        if receipt.slo is None:
            return
        labels = (model, request_class.label)
        self._counters[Metric.SLO_OFFERED].labels(*labels).inc()
        if receipt.slo is SloVerdict.MET:
            self._counters[Metric.SLO_MET].labels(*labels).inc()
            self._counters[Metric.GOODPUT_TOKENS].labels(*labels).inc(receipt.output_tokens or 0)
        elif receipt.slo is not SloVerdict.CLIENT_LEFT:
            self._counters[Metric.SLO_MISSED].labels(*labels, receipt.slo.value).inc()

    def count_tokens(self, model: str, tenant: str, prompt: int, completion: int) -> None:
        self._counters[Metric.PROMPT_TOKENS].labels(model, tenant).inc(prompt)
        self._counters[Metric.COMPLETION_TOKENS].labels(model, tenant).inc(completion)

    def count_estimated(self, model: str, tenant: str, given: tuple[int, int], used: tuple[int, int]) -> None:
        """Count the estimated and the used tokens (prompt, output) of an answered generation."""
        for part, estimate, actual in zip(("prompt", "output"), given, used, strict=True):
            self._counters[Metric.ESTIMATED_TOKENS].labels(model, tenant, part).inc(estimate)
            self._counters[Metric.USED_TOKENS].labels(model, tenant, part).inc(actual)

    def set_model(self, model: ModelRouter) -> None:
        """Set the gauges of a model to its present state."""
        name = model.settings.name
        queue = model.queue
        replicas = model.replica_set
        self._gauges[Metric.UNREAD_BYTES].set(model.unread.bytes)
        self._gauges[Metric.UNREAD_ENDED].set(model.unread.ended_requests)
        self._gauges[Metric.BLOCKED].labels(name, "memory").set(queue.blocked)
        self._gauges[Metric.GPU_FRAGMENTATION].clear()  # nodes may have left
        for node, share in queue.fragmentation:
            self._gauges[Metric.GPU_FRAGMENTATION].labels(node).set(share)
        for request_class, count in queue.core.pending.count_by_class(name).items():
            self._gauges[Metric.WAITING].labels(name, request_class.label).set(count)
        for reason in RefusalReason:
            self._gauges[Metric.REFUSED].labels(name, reason.value).set(queue.refused[reason])
        self._gauges[Metric.SLOTS].remove_by_labels({"model": name})
        for replica in sorted(replicas.running):
            used, account = queue.core.account(replica)
            self._gauges[Metric.SLOTS].labels(name, replica, "granted").set(used)
            self._gauges[Metric.SLOTS].labels(name, replica, "booked").set(account.slots)
            self._gauges[Metric.SLOTS].labels(name, replica, "total").set(replicas.slots[replica])
        for (key, place), count in model.placed.items():
            self._gauges[Metric.PLACED].labels(name, key, place).set(count)
        self._gauges[Metric.EJECTED].labels(name).set(replicas.ejected_count)
        for why, count in replicas.ejections.items():
            self._gauges[Metric.EJECTIONS].labels(name, why.value).set(count)

    def set_engines(self, model: str, loads: Mapping[str, EngineLoad]) -> None:
        """Set the gauges of a model's engines to exactly these loads."""
        self._gauges[Metric.ENGINE].remove_by_labels({"model": model})
        for replica, load in loads.items():
            for figure, value in msgspec.structs.asdict(load).items():
                self._gauges[Metric.ENGINE].labels(model, replica, figure).set(value)

    def remove_model(self, model: str) -> None:
        """Remove the gauges of a removed model; its counters stay."""
        for metric, gauge in self._gauges.items():
            if "model" in metric.value.labels:
                gauge.remove_by_labels({"model": model})

    def render(self) -> bytes:
        """The exposition text of this router."""
        return generate_latest(self.registry)

    def render_engines(self) -> bytes:
        """The exposition text of the engines."""
        return generate_latest(self.engine_registry)


def _rows(kind: str) -> Iterator[tuple[Metric, MetricRow]]:
    return ((metric, metric.value) for metric in Metric if metric.value.type == kind)
