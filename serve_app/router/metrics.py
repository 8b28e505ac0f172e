"""The router's metrics, in Prometheus' format; `scrape` answers with those of all routers.

Invariant: labels are bounded; models and tenants come from the configuration, classes and outcomes from enums.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from serve_app.core.queue import RefusalReason
from serve_app.core.receipts import Receipt, RequestTrace, SloVerdict
from serve_app.router.model_router import ModelRouter
from serve_app.transport import EngineLoad
from serve_app.types import Outcome, RequestClass

# seconds; from an idle tiny model's first token to the longest permitted wait
LATENCY_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
OF_CLASS = ("model", "priority")
OF_TENANT = ("model", "tenant")


class RouterMetrics:
    """Counters, gauges and histograms of one router replica, in `registry`, and of the engines that it asks, in
    `engine_registry`."""

    def __init__(self) -> None:
        self.registry, self.engine_registry = CollectorRegistry(), CollectorRegistry()
        counter = functools.partial(Counter, registry=self.registry)
        seconds = functools.partial(Histogram, registry=self.registry, buckets=LATENCY_BUCKETS_S)
        self._requests = counter(
            "serve_app_requests", "Requests by how they ended.", (*OF_TENANT, "priority", "outcome")
        )
        self._keyed = counter(
            "serve_app_idempotent_requests",
            "Answered requests with an Idempotency-Key, by what became of them.",
            ("model", "result"),
        )
        self._wait = seconds("serve_app_queue_wait_seconds", "Seconds in the queue before the last grant.", OF_CLASS)
        self._waited = counter(
            "serve_app_waited_seconds",
            "Seconds that granted requests have waited in the queue, by what they waited for.",
            (*OF_CLASS, "reason"),
        )
        self._limited = counter(
            "serve_app_limited",
            "Requests that a limit of their key or tenant refused, by reason.",
            (*OF_TENANT, "reason"),
        )
        self._limit_wait = counter(
            "serve_app_limit_wait_seconds", "Seconds that requests waited aside for a limit.", OF_TENANT
        )
        self._granted = counter(
            "serve_app_granted_tokens", "Estimated tokens of the requests that the queue has granted.", OF_CLASS
        )
        self._ttft = seconds(
            "serve_app_time_to_first_token_seconds",
            "Seconds from arrival to the first frame of a generation.",
            OF_CLASS,
        )
        self._prompt = counter("serve_app_prompt_tokens", "Prompt tokens.", OF_TENANT)
        self._output = counter("serve_app_completion_tokens", "Generated tokens.", OF_TENANT)
        self._estimated = counter(
            "serve_app_estimated_tokens",
            "Tokens that answered generations were estimated to need.",
            (*OF_TENANT, "part"),
        )
        self._used = counter(
            "serve_app_used_tokens", "Tokens that answered generations have used.", (*OF_TENANT, "part")
        )
        # How well classes are served: see `core.receipts.slo`.
        self._slo_offered = counter("serve_app_slo_offered", "Generations of classes with a service level.", OF_CLASS)
        self._slo_met = counter("serve_app_slo_met", "Generations served within their service level.", OF_CLASS)
        self._slo_missed = counter(
            "serve_app_slo_missed",
            "Generations not served within it, by reason; excludes those whose client left in time.",
            (*OF_CLASS, "reason"),
        )
        self._goodput = counter(
            "serve_app_goodput_tokens", "Generated tokens of answers within their class's service level.", OF_CLASS
        )
        self._make_gauges()
        self._make_migrations()

    def _make_migrations(self) -> None:
        """What becomes of streams that have lost their replica, and of requests that stop for others."""
        counter = functools.partial(Counter, registry=self.registry)
        self._migrations = counter(
            "serve_app_migrations", "Streams that lost their replica and continued on another one.", ("model",)
        )
        self._moves = counter("serve_app_moves", "Requests continued elsewhere: their replica drained.", ("model",))
        self._preemptions = counter(
            "serve_app_preemptions", "How often requests were stopped for others while they ran.", OF_CLASS
        )
        self._not_continued = counter(
            "serve_app_not_continuable",
            "Streams that lost their replica and ended with an error, by why they were not continued.",
            ("model", "reason"),
        )
        self._gap = Histogram(
            "serve_app_migration_gap_seconds",
            "Seconds from the loss of a stream's replica to the first frame of the next one.",
            ("model",),
            registry=self.registry,
            buckets=LATENCY_BUCKETS_S,
        )

    def _make_gauges(self) -> None:
        """The gauges, set to the present state at each scrape."""
        self._of_models: list[Gauge] = []

        def gauge(name: str, text: str, labels: tuple[str, ...] = ()) -> Gauge:
            made = Gauge(name, text, labels, registry=self.registry)
            if labels:
                self._of_models.append(made)
            return made

        self._waiting = gauge("serve_app_waiting", "Requests waiting in the queue.", OF_CLASS)
        self._slots = gauge(
            "serve_app_slots",
            "Batch slots of an engine replica: in all, granted by the queue's count, and booked for this router.",
            ("model", "replica", "state"),
        )
        self._refused = gauge("serve_app_refused", "Requests the queue has refused.", ("model", "reason"))
        self._blocked = gauge("serve_app_blocked", "Engine replicas that wait to load, by reason.", ("model", "reason"))
        self._placed = gauge(
            "serve_app_placed",
            "Requests granted, by kind of affinity key and by how their replica was found.",
            ("model", "key", "place"),
        )
        self._ejected = gauge(
            "serve_app_ejected",
            "Engine replicas that get no requests, or one at a time, because they failed.",
            ("model",),
        )
        self._ejections = gauge("serve_app_ejections", "Ejections of engine replicas.", ("model", "reason"))
        self._unread = gauge("serve_app_unread_bytes", "Bytes of answers that clients have not read yet.")
        self._unread_ended = gauge("serve_app_unread_ended", "Requests ended because of too many unread bytes.")
        self._engine = Gauge(
            "serve_app_engine",
            "Live load of an engine.",
            ("model", "replica", "figure"),
            registry=self.engine_registry,
        )
        self._of_models.append(self._engine)

    def count_ended(self, model: str, tenant: str, request_class: RequestClass, outcome: Outcome) -> None:
        """Count a request's end."""
        self._requests.labels(model, tenant, request_class.label, outcome.value).inc()

    def count_keyed(self, model: str, result: str) -> None:
        """Count an answered request with an Idempotency-Key: `run`, `restarted`, `joined` or `replayed`."""
        self._keyed.labels(model, result).inc()

    def count_granted(self, model: str, request_class: RequestClass, trace: RequestTrace, tokens: int) -> None:
        """Count a granted request, its wait and its estimated tokens."""
        labels = (model, request_class.label)
        self._wait.labels(*labels).observe(trace.waited_s)
        if trace.waited_for is not None:
            self._waited.labels(*labels, trace.waited_for.value).inc(trace.waited_s)
        self._granted.labels(*labels).inc(tokens)

    def count_continued(self, model: str, request_class: RequestClass, trace: RequestTrace) -> None:
        """Count how often an ended request was stopped for others, and continued on another replica or why not."""
        if trace.preempted:
            self._preemptions.labels(model, request_class.label).inc(trace.preempted)
        if trace.moved:
            self._moves.labels(model).inc(trace.moved)
        for _, gap_s in trace.continued:
            self._migrations.labels(model).inc()
            self._gap.labels(model).observe(gap_s)
        if trace.not_continued is not None:
            self._not_continued.labels(model, trace.not_continued.value).inc()

    def count_limited(self, model: str, tenant: str, reason: str) -> None:
        """Count a request that a limit refused."""
        self._limited.labels(model, tenant, reason).inc()

    def count_limit_wait(self, model: str, tenant: str, waited_s: float) -> None:
        """Count the wait of a request for a limit."""
        self._limit_wait.labels(model, tenant).inc(waited_s)

    def observe_first_token(self, model: str, request_class: RequestClass, seconds: float) -> None:
        self._ttft.labels(model, request_class.label).observe(seconds)

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
        self._slo_offered.labels(*labels).inc()
        if receipt.slo is SloVerdict.MET:
            self._slo_met.labels(*labels).inc()
            self._goodput.labels(*labels).inc(receipt.output_tokens or 0)
        elif receipt.slo is not SloVerdict.CLIENT_LEFT:
            self._slo_missed.labels(*labels, receipt.slo.value).inc()

    def count_tokens(self, model: str, tenant: str, prompt: int, completion: int) -> None:
        self._prompt.labels(model, tenant).inc(prompt)
        self._output.labels(model, tenant).inc(completion)

    def count_estimated(self, model: str, tenant: str, given: tuple[int, int], used: tuple[int, int]) -> None:
        """Count the estimated and the used tokens (prompt, output) of an answered generation."""
        for part, estimate, actual in zip(("prompt", "output"), given, used, strict=True):
            self._estimated.labels(model, tenant, part).inc(estimate)
            self._used.labels(model, tenant, part).inc(actual)

    def set_model(self, model: ModelRouter) -> None:
        """Set the gauges of a model to its present state."""
        name = model.settings.name
        queue = model.queue
        replicas = model.replica_set
        self._unread.set(model.unread.bytes)
        self._unread_ended.set(model.unread.ended_requests)
        self._blocked.labels(name, "memory").set(queue.blocked)
        for request_class, count in queue.core.pending.count_by_class(name).items():
            self._waiting.labels(name, request_class.label).set(count)
        for reason in RefusalReason:
            self._refused.labels(name, reason.value).set(queue.refused[reason])
        self._slots.remove_by_labels({"model": name})
        for replica in sorted(replicas.running):
            used, account = queue.core.account(replica)
            self._slots.labels(name, replica, "granted").set(used)
            self._slots.labels(name, replica, "booked").set(account.slots)
            self._slots.labels(name, replica, "total").set(replicas.slots[replica])
        for (key, place), count in model.placed.items():
            self._placed.labels(name, key, place).set(count)
        self._ejected.labels(name).set(replicas.outliers.ejected_count)
        for why, count in replicas.ejections.items():
            self._ejections.labels(name, why.value).set(count)

    def set_engines(self, model: str, loads: Mapping[str, EngineLoad]) -> None:
        """Set the gauges of a model's engines to exactly these loads."""
        self._engine.remove_by_labels({"model": model})
        for replica, load in loads.items():
            for figure, value in msgspec.structs.asdict(load).items():
                self._engine.labels(model, replica, figure).set(value)

    def remove_model(self, model: str) -> None:
        """Remove the gauges of a removed model; its counters stay."""
        for gauge in self._of_models:
            gauge.remove_by_labels({"model": model})

    def render(self) -> bytes:
        """The exposition text of this router."""
        return generate_latest(self.registry)

    def render_engines(self) -> bytes:
        """The exposition text of the engines."""
        return generate_latest(self.engine_registry)
