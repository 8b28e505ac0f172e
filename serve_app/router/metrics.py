"""The router's metrics, in Prometheus' format.

Invariant: labels are bounded; models and tenants come from the configuration, classes and outcomes from enums.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from serve_app.core.queue import ReplicaUse
from serve_app.core.receipts import SloVerdict
from serve_app.core.routing import FailureKind
from serve_app.router.model_queue import QueueView
from serve_app.transport import EngineLoad
from serve_app.types import Outcome, RequestClass

# seconds; from an idle tiny model's first token to the longest permitted wait
LATENCY_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class RouterMetrics:
    """Counters, gauges and histograms of one router replica, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        labels = ("model", "tenant", "priority")
        self._requests = Counter(
            "serve_app_requests", "Requests by how they ended.", (*labels, "outcome"), registry=self.registry
        )
        self._wait = Histogram(
            "serve_app_queue_wait_seconds",
            "Seconds in the queue before the last grant.",
            ("model", "priority"),
            registry=self.registry,
            buckets=LATENCY_BUCKETS_S,
        )
        self._granted = Counter(
            "serve_app_granted_tokens",
            "Estimated tokens of the requests that the queue has granted.",
            ("model", "priority"),
            registry=self.registry,
        )
        self._ttft = Histogram(
            "serve_app_time_to_first_token_seconds",
            "Seconds from arrival to the first frame of a generation.",
            ("model", "priority"),
            registry=self.registry,
            buckets=LATENCY_BUCKETS_S,
        )
        self._prompt = Counter("serve_app_prompt_tokens", "Prompt tokens.", ("model", "tenant"), registry=self.registry)
        self._output = Counter(
            "serve_app_completion_tokens", "Generated tokens.", ("model", "tenant"), registry=self.registry
        )
        parts = ("model", "tenant", "part")
        self._estimated = Counter(
            "serve_app_estimated_tokens",
            "Tokens that answered generations were estimated to need.",
            parts,
            registry=self.registry,
        )
        self._used = Counter(
            "serve_app_used_tokens", "Tokens that answered generations have used.", parts, registry=self.registry
        )
        self._make_service_counters()
        self._make_gauges()

    def _make_service_counters(self) -> None:
        """How well classes are served: see `core.receipts.slo`."""
        levels = ("model", "priority")
        self._slo_offered = Counter(
            "serve_app_slo_offered", "Generations of classes with a service level.", levels, registry=self.registry
        )
        self._slo_met = Counter(
            "serve_app_slo_met", "Generations served within their service level.", levels, registry=self.registry
        )
        self._slo_missed = Counter(
            "serve_app_slo_missed",
            "Generations not served within it, by reason; excludes those whose client left in time.",
            (*levels, "reason"),
            registry=self.registry,
        )
        self._goodput = Counter(
            "serve_app_goodput_tokens",
            "Generated tokens of answers within their class's service level.",
            levels,
            registry=self.registry,
        )

    def _make_gauges(self) -> None:
        """The gauges, set to the present state at each scrape."""
        self._gauge_waiting = Gauge(
            "serve_app_waiting", "Requests waiting in the queue.", ("model", "priority"), registry=self.registry
        )
        self._gauge_slots = Gauge(
            "serve_app_slots",
            "Batch slots of an engine replica: in all, granted by the queue's count, and booked for this router.",
            ("model", "replica", "state"),
            registry=self.registry,
        )
        self._gauge_refused = Gauge(
            "serve_app_refused", "Requests the queue has refused.", ("model", "reason"), registry=self.registry
        )
        self._gauge_blocked = Gauge(
            "serve_app_blocked",
            "Engine replicas that wait to load, by reason.",
            ("model", "reason"),
            registry=self.registry,
        )
        self._gauge_placed = Gauge(
            "serve_app_placed",
            "Requests granted, by kind of affinity key and by how their replica was found.",
            ("model", "key", "place"),
            registry=self.registry,
        )
        self._gauge_ejected = Gauge(
            "serve_app_ejected",
            "Engine replicas that get no requests, or one at a time, because they failed.",
            ("model",),
            registry=self.registry,
        )
        self._gauge_ejections = Gauge(
            "serve_app_ejections", "Ejections of engine replicas.", ("model", "reason"), registry=self.registry
        )
        self._gauge_unread = Gauge(
            "serve_app_unread_bytes", "Bytes of answers that clients have not read yet.", registry=self.registry
        )
        self._gauge_unread_ended = Gauge(
            "serve_app_unread_ended", "Requests ended because of too many unread bytes.", registry=self.registry
        )
        self._gauge_engine = Gauge(
            "serve_app_engine", "Live load of an engine.", ("model", "replica", "figure"), registry=self.registry
        )

    def count_ended(self, model: str, tenant: str, request_class: RequestClass, outcome: Outcome) -> None:
        """Count a request's end."""
        self._requests.labels(model, tenant, request_class.label, outcome.value).inc()

    def count_granted(self, model: str, request_class: RequestClass, waited_s: float, tokens: int) -> None:
        """Count a granted request, its wait and its estimated tokens."""
        self._wait.labels(model, request_class.label).observe(waited_s)
        self._granted.labels(model, request_class.label).inc(tokens)

    def observe_first_token(self, model: str, request_class: RequestClass, seconds: float) -> None:
        self._ttft.labels(model, request_class.label).observe(seconds)

    def count_slo(self, model: str, request_class: RequestClass, verdict: SloVerdict, tokens: int) -> None:
        """Count the verdict on a generation of a class with a service level, and its output tokens."""
        labels = (model, request_class.label)
        self._slo_offered.labels(*labels).inc()
        if verdict is SloVerdict.MET:
            self._slo_met.labels(*labels).inc()
            self._goodput.labels(*labels).inc(tokens)
        elif verdict is not SloVerdict.CLIENT_LEFT:
            self._slo_missed.labels(*labels, verdict.value).inc()

    def count_tokens(self, model: str, tenant: str, prompt: int, completion: int) -> None:
        self._prompt.labels(model, tenant).inc(prompt)
        self._output.labels(model, tenant).inc(completion)

    def count_estimated(self, model: str, tenant: str, given: tuple[int, int], used: tuple[int, int]) -> None:
        """Count the estimated and the used tokens (prompt, output) of an answered generation."""
        for part, estimate, actual in zip(("prompt", "output"), given, used, strict=True):
            self._estimated.labels(model, tenant, part).inc(estimate)
            self._used.labels(model, tenant, part).inc(actual)

    def set_queue(self, model: str, view: QueueView, use: Mapping[str, ReplicaUse], blocked: int = 0) -> None:
        """Set the gauges of a model's queue to this view, and the number of replicas that wait for memory."""
        self._gauge_blocked.labels(model, "memory").set(blocked)
        for request_class, count in view.waiting.items():
            self._gauge_waiting.labels(model, request_class).set(count)
        self._gauge_slots.remove_by_labels({"model": model})
        for replica, slots in use.items():
            booked = view.replicas.get(replica, slots)
            self._gauge_slots.labels(model, replica, "granted").set(booked.used)
            self._gauge_slots.labels(model, replica, "booked").set(booked.slots)
            self._gauge_slots.labels(model, replica, "total").set(slots.slots)
        for reason, count in view.refused.items():
            self._gauge_refused.labels(model, reason).set(count)

    def set_unread(self, unread_bytes: int, ended: int) -> None:
        """Set the unread bytes, and how many requests have ended because of them."""
        self._gauge_unread.set(unread_bytes)
        self._gauge_unread_ended.set(ended)

    def set_replicas(
        self, model: str, placed: Mapping[tuple[str, str], int], ejected: int, ejections: Mapping[FailureKind, int]
    ) -> None:
        """Set the gauges of placement and ejection; see each gauge's help."""
        for (key, place), count in placed.items():
            self._gauge_placed.labels(model, key, place).set(count)
        self._gauge_ejected.labels(model).set(ejected)
        for why, count in ejections.items():
            self._gauge_ejections.labels(model, why.value).set(count)

    def set_engines(self, model: str, loads: Mapping[str, EngineLoad]) -> None:
        """Set the engine gauges of a model to exactly these replicas."""
        self._gauge_engine.remove_by_labels({"model": model})
        for replica, load in loads.items():
            for field, value in msgspec.structs.asdict(load).items():
                self._gauge_engine.labels(model, replica, field).set(value)

    def remove_model(self, model: str) -> None:
        """Remove the gauges of a removed model; its counters stay."""
        for gauge in (
            self._gauge_waiting,
            self._gauge_slots,
            self._gauge_refused,
            self._gauge_engine,
            self._gauge_blocked,
            self._gauge_placed,
            self._gauge_ejected,
            self._gauge_ejections,
        ):
            gauge.remove_by_labels({"model": model})

    def render(self) -> bytes:
        """The exposition text."""
        return generate_latest(self.registry)
