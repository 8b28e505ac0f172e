"""Counts the router's metrics (`table`), in Prometheus' format; `router.scrape` answers with those of all routers.

A request costs one look-up for each metric that it is counted in.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from serve_app.core.receipts import Receipt, RequestTrace, SloVerdict
from serve_app.core.usage import NamedTenants
from serve_app.errors import AuthFailure
from serve_app.router.metrics.families import Families
from serve_app.router.metrics.model_figures import model_families
from serve_app.router.metrics.series import CountedFamily, CountedSeries, ObservedSeries
from serve_app.router.metrics.table import Figure, Metric
from serve_app.router.metrics.text_format import TextFormat, rendered
from serve_app.router.model_router import ModelRouter
from serve_app.types import Outcome, RequestClass

DID_NOT_WAIT = "none"  # in place of a `WaitReason`
CHOICE_S = 60.0  # between two choices of the tenants with names: of 10,000 tenants one takes some ms


class RouterMetrics:
    """The metrics of one router replica: what it counts, and the figures of its models as they were read last."""

    def __init__(self) -> None:
        rows = {metric: metric.value for metric in Metric}
        self._counted = {one: CountedFamily(row, CountedSeries) for one, row in rows.items() if row.type == "counter"}
        self._observed = {
            one: CountedFamily(row, ObservedSeries) for one, row in rows.items() if row.type == "histogram"
        }
        self._other_threads = threading.Lock()  # they count one after the other
        self._figures = Families(Figure)
        self._tenants = NamedTenants(0)
        self._count_tenants: Callable[[], int] = lambda: 0
        self.count_pending: Callable[[], int] = lambda: 0  # ended requests whose use the store lacks
        self._jwks_age: Callable[[], float | None] = lambda: None
        self._chosen_at: float | None = None

    def configure(
        self,
        named_tenants: int,
        count_tenants: Callable[[], int],
        jwks_age: Callable[[], float | None] = lambda: None,
    ) -> None:
        """Apply changed settings. `count_tenants`: how many there are. `jwks_age`: in seconds; None: there is none."""
        self._count_tenants = count_tenants
        self._jwks_age = jwks_age
        self._tenants.limit = named_tenants
        self._tenants.known = count_tenants()

    def count_unauthorized(self, failure: AuthFailure) -> None:
        """Count a request without a key or token that is valid."""
        self._count(Metric.UNAUTHORIZED, 1, failure.value)
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
        if receipt.prompt_tokens is not None:
            self._count(Metric.PROMPT_TOKENS, receipt.prompt_tokens, model, tenant)
            self._count(Metric.COMPLETION_TOKENS, receipt.output_tokens or 0, model, tenant)
        if takes_slot and receipt.prompt_tokens is not None:
            self._observe(Metric.REQUEST_PROMPT_TOKENS, receipt.prompt_tokens, model, priority)
            self._observe(Metric.REQUEST_OUTPUT_TOKENS, receipt.output_tokens or 0, model, priority)
        self._observe_pace(receipt, is_list=is_list)
        self._count_named(receipt)
        self._count_continued(receipt)
        self._count_verdict(receipt)

    def _count_named(self, receipt: Receipt) -> None:
        """Count a request to a name that is no model's, and the models that it left."""
        name = receipt.trace.asked_model
        if name is None:
            return
        self._count(Metric.NAMED_REQUESTS, 1, name, receipt.model, receipt.outcome.value)
        for model, reason in receipt.trace.hops:
            self._count(Metric.NAMED_HOPS, 1, name, model, reason)

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

    def count_dropped_spans(self, reason: str, spans: int) -> None:
        """Count spans that reached no collector; called from the exporter's thread, too."""
        with self._other_threads:
            self._count(Metric.TRACE_SPANS_DROPPED, spans, reason)

    def count_lost_records(self, records: int) -> None:
        """Count records that no disk took; called from the request log's thread."""
        with self._other_threads:
            self._count(Metric.RECORDS_LOST, records)

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
        self._figures.add(Figure.USAGE_PENDING, self.count_pending())
        age_s = self._jwks_age()
        if age_s is not None:
            self._figures.add(Figure.JWKS_AGE, age_s)
        if self._chosen_at is None or now >= self._chosen_at + CHOICE_S:
            self._chosen_at = now
            self._tenants.known = self._count_tenants()
            self._tenants.choose(now)

    def render(self, text_format: TextFormat = TextFormat.PROMETHEUS) -> bytes:
        """The exposition of this router, without its end."""
        is_openmetrics = text_format is TextFormat.OPENMETRICS
        counted = [line for family in self._counted.values() for line in family.lines(is_openmetrics)]
        observed = [line for family in self._observed.values() for line in family.lines(is_openmetrics)]
        return "\n".join([*counted, *observed, ""]).encode() + rendered(self._figures, text_format)

    def _count(self, metric: Metric, amount: float, *labels: str) -> None:
        self._counted[metric].of(labels).value += amount

    def _observe(self, metric: Metric, value: float, *labels: str, request_id: str | None = None) -> None:
        """`request_id`: kept as the exemplar of its bucket."""
        self._observed[metric].of(labels).observe(value, request_id)
