"""Counts the router's metrics (`table`), in Prometheus' format; `router.scrape` answers with those of all routers.

The child of a metric for its labels is found once and kept: that costs a request one look-up for each metric.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from serve_app.core.receipts import Receipt, RequestTrace, SloVerdict
from serve_app.core.usage import NamedTenants
from serve_app.router.metrics.families import Families
from serve_app.router.metrics.model_figures import model_families
from serve_app.router.metrics.table import Figure, Metric, MetricRow
from serve_app.router.metrics.text_format import TextFormat, rendered
from serve_app.router.model_router import ModelRouter
from serve_app.types import Outcome, RequestClass

DID_NOT_WAIT = "none"  # in place of a `WaitReason`
CHOICE_S = 60.0  # between two choices of the tenants with names: of 10,000 tenants one takes some ms


class RouterMetrics(Collector):
    """The metrics of one router replica: in `registry` what it counts, and the figures of its models as they were read
    last."""

    def __init__(self) -> None:
        # else each counter and histogram has one more sample, which nobody reads
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self._counters = {
            metric: Counter(row.name, row.help, row.labels, registry=self.registry) for metric, row in _rows("counter")
        }
        self._histograms = {
            metric: Histogram(row.name, row.help, row.labels, registry=self.registry, buckets=row.buckets)
            for metric, row in _rows("histogram")
        }
        self._counter_of: dict[tuple[Metric, tuple[str, ...]], Counter] = {}
        self._histogram_of: dict[tuple[Metric, tuple[str, ...]], Histogram] = {}
        self._figures = Families(Figure)
        self._tenants = NamedTenants(0)
        self._count_tenants: Callable[[], int] = lambda: 0
        self._chosen_at: float | None = None
        self.registry.register(self)

    def configure(self, named_tenants: int, count_tenants: Callable[[], int]) -> None:
        """Apply changed settings. `count_tenants`: how many there are."""
        self._count_tenants = count_tenants
        self._tenants.limit = named_tenants
        self._tenants.known = count_tenants()

    def count_unauthorized(self) -> None:
        """Count a request without a key that is valid."""
        self._count(Metric.REQUESTS, 1, "", "", RequestClass.NORMAL.label, Outcome.UNAUTHORIZED.value)

    def count_arrived(self, model: str, tenant: str, request_class: RequestClass) -> None:
        """Count a request whose body was read and understood."""
        self._count(Metric.ARRIVALS, 1, model, self._tenants.label(tenant), request_class.label)

    def count_keyed(self, model: str, result: str) -> None:
        """Count an answered request with an Idempotency-Key: `run`, `restarted`, `joined` or `replayed`."""
        self._count(Metric.IDEMPOTENT_REQUESTS, 1, model, result)

    def count_granted(self, model: str, request_class: RequestClass, trace: RequestTrace, tokens: int) -> None:
        """Count a granted request, its wait and its estimated tokens."""
        priority = request_class.label
        reason = DID_NOT_WAIT if trace.waited_for is None else trace.waited_for.value
        self._observe(Metric.QUEUE_WAIT, trace.waited_s, model, priority, reason)
        if trace.waited_for is not None:
            self._count(Metric.WAITED, trace.waited_s, model, priority, trace.waited_for.value)
        self._count(Metric.GRANTED_TOKENS, tokens, model, priority)

    def count_limited(self, model: str, tenant: str, reason: str) -> None:
        """Count a request that a limit refused."""
        self._count(Metric.LIMITED, 1, model, self._tenants.label(tenant), reason)

    def count_limit_wait(self, model: str, tenant: str, waited_s: float) -> None:
        """Count the wait of a request for a limit."""
        self._count(Metric.LIMIT_WAIT, waited_s, model, self._tenants.label(tenant))

    def observe_first_token(
        self, model: str, tenant: str, request_class: RequestClass, seconds: float, request_id: str
    ) -> None:
        """Count the time to a first token, as soon as it has come."""
        labels = (model, self._tenants.label(tenant), request_class.label)
        self._observe(Metric.TIME_TO_FIRST_TOKEN, seconds, *labels, request_id=request_id)

    def count_ended(self, receipt: Receipt, *, is_streamed: bool, takes_slot: bool, is_list: bool) -> None:
        """Count an ended request: its outcome, times and tokens. The first token of a stream was counted when it came.

        Args:
            takes_slot: else it waits in no queue, and neither its duration nor its tokens say much of the model.
            is_list: of prompts that ran one by one, so that its times are of several runs.
        """
        model = receipt.model
        priority = receipt.request_class.label
        self._tenants.add(receipt.tenant, 1 + (receipt.prompt_tokens or 0) + (receipt.output_tokens or 0))
        tenant = self._tenants.label(receipt.tenant)
        self._count(Metric.REQUESTS, 1, model, tenant, priority, receipt.outcome.value)
        if receipt.refused is not None:
            self._count(Metric.REFUSALS, 1, model, tenant, priority, receipt.refused)
        if not is_streamed and receipt.first_token_s is not None:
            first_s = receipt.first_token_s
            self.observe_first_token(model, receipt.tenant, receipt.request_class, first_s, receipt.request_id)
        if takes_slot and receipt.outcome is Outcome.OK:
            labels = (model, tenant, priority)
            self._observe(Metric.DURATION, receipt.total_s, *labels, request_id=receipt.request_id)
        if takes_slot and receipt.prompt_tokens is not None:
            self._observe(Metric.REQUEST_PROMPT_TOKENS, receipt.prompt_tokens, model, priority)
            self._observe(Metric.REQUEST_OUTPUT_TOKENS, receipt.output_tokens or 0, model, priority)
        self._observe_pace(receipt, is_list=is_list)
        self._count_continued(receipt)
        self._count_verdict(receipt)

    def _observe_pace(self, receipt: Receipt, *, is_list: bool) -> None:
        """Count the times between tokens, and whose part of the first token was how long."""
        labels = (receipt.model, receipt.request_class.label)
        trace = receipt.trace
        if receipt.itl_s is not None:
            self._observe(Metric.TIME_PER_TOKEN, receipt.itl_s, *labels)
        if receipt.longest_gap_s is not None:
            self._observe(Metric.LONGEST_GAP, receipt.longest_gap_s, *labels)
        has_one_run = receipt.granted and not (is_list or trace.losses or trace.preempted or trace.moved)
        if has_one_run and receipt.first_token_s is not None:
            in_router_s = receipt.wait_s - trace.waited_s - trace.limit_wait_s
            self._observe(Metric.FIRST_TOKEN_IN_ROUTER, max(0.0, in_router_s), *labels)
            self._observe(Metric.FIRST_TOKEN_IN_ENGINE, receipt.first_token_s - receipt.wait_s, *labels)

    def _count_continued(self, receipt: Receipt) -> None:
        """Count how often a request was stopped for others, and where it continued or why it did not."""
        model = receipt.model
        trace = receipt.trace
        priority = receipt.request_class.label
        if trace.losses:
            self._count(Metric.RETRIES, trace.losses, model, priority)
        if trace.preempted:
            self._count(Metric.PREEMPTIONS, trace.preempted, model, priority)
        if trace.moved:
            self._count(Metric.MOVES, trace.moved, model)
        for _, gap_s in trace.continued:
            self._count(Metric.MIGRATIONS, 1, model)
            self._observe(Metric.MIGRATION_GAP, gap_s, model)
        if trace.not_continued is not None:
            self._count(Metric.NOT_CONTINUABLE, 1, model, trace.not_continued.value)

    def _count_verdict(self, receipt: Receipt) -> None:
        """Count the verdict on a generation of a class with a service level, and its output tokens."""
        if receipt.slo is None:
            return
        labels = (receipt.model, receipt.request_class.label)
        self._count(Metric.SLO_OFFERED, 1, *labels)
        if receipt.slo is SloVerdict.MET:
            self._count(Metric.SLO_MET, 1, *labels)
            self._count(Metric.GOODPUT_TOKENS, receipt.output_tokens or 0, *labels)
        elif receipt.slo is not SloVerdict.CLIENT_LEFT:
            self._count(Metric.SLO_MISSED, 1, *labels, receipt.slo.value)

    def count_tokens(self, model: str, tenant: str, prompt: int, completion: int) -> None:
        """Count the tokens of an answer."""
        tenant = self._tenants.label(tenant)
        self._count(Metric.PROMPT_TOKENS, prompt, model, tenant)
        self._count(Metric.COMPLETION_TOKENS, completion, model, tenant)

    def count_estimated(self, model: str, tenant: str, given: tuple[int, int], used: tuple[int, int]) -> None:
        """Count the estimated and the used tokens (prompt, output) of an answered generation."""
        tenant = self._tenants.label(tenant)
        for part, estimate, actual in zip(("prompt", "output"), given, used, strict=True):
            self._count(Metric.ESTIMATED_TOKENS, estimate, model, tenant, part)
            self._count(Metric.USED_TOKENS, actual, model, tenant, part)
            if estimate:
                self._observe(Metric.ESTIMATE_RATIO, actual / estimate, model, part)

    def read(self, models: Iterable[ModelRouter], now: float) -> None:
        """Read the figures of the models that are served now, and choose the tenants that are named from now on."""
        self._figures = model_families(models)
        if self._chosen_at is None or now >= self._chosen_at + CHOICE_S:
            self._chosen_at = now
            self._tenants.known = self._count_tenants()
            self._tenants.choose(now)

    def collect(self) -> list[Family]:
        """The figures as they were read last."""
        return self._figures.collect()

    def render(self, text_format: TextFormat = TextFormat.PROMETHEUS) -> bytes:
        """The exposition of this router, without its end."""
        return rendered(self.registry, text_format)

    def _count(self, metric: Metric, amount: float, *labels: str) -> None:
        child = self._counter_of.get((metric, labels))
        if child is None:
            child = self._counter_of[metric, labels] = self._counters[metric].labels(*labels)
        child.inc(amount)

    def _observe(self, metric: Metric, value: float, *labels: str, request_id: str | None = None) -> None:
        """`request_id`: kept as the exemplar of its bucket."""
        child = self._histogram_of.get((metric, labels))
        if child is None:
            child = self._histogram_of[metric, labels] = self._histograms[metric].labels(*labels)
        child.observe(value, None if request_id is None else {"request_id": request_id})


def _rows(kind: str) -> Iterator[tuple[Metric, MetricRow]]:
    return ((metric, metric.value) for metric in Metric if metric.value.type == kind)
