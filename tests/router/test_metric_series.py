"""How many series a router has: they follow models, classes and enums, and not the number of its tenants."""

from __future__ import annotations

from serve_app.core.receipts import Receipt, SloVerdict
from serve_app.router import RouterMetrics
from serve_app.router.metrics.counts import CHOICE_S
from serve_app.types import Outcome, RequestClass

NAMED = 20
MANY = 2_000
MODELS = ("a", "b", "c")
SCRAPES = 5
MOST = 1.1  # times the series of 20 tenants


def series_of(tenants: int) -> int:
    """The samples of a router after each tenant has had answers and refusals in every class, the first one the most."""
    metrics = RouterMetrics()
    metrics.configure(NAMED, lambda: tenants)
    for scrape in range(SCRAPES):
        for number in range(tenants):
            count_request(metrics, number, scrape)
        metrics.read([], scrape * CHOICE_S)
    text = metrics.render().decode()
    return sum(not line.startswith("#") for line in text.splitlines())


def count_request(metrics: RouterMetrics, number: int, scrape: int) -> None:
    """What the requests of a tenant between two scrapes count: of all models and classes, if there are few tenants."""
    tenant = f"tenant-{number}"
    for turn in range(len(MODELS) * len(RequestClass)) if number < NAMED else (number + scrape,):
        model = MODELS[turn % len(MODELS)]
        request_class = RequestClass(turn // len(MODELS) % len(RequestClass))
        metrics.count_arrived(model, tenant, request_class)
        metrics.count_limited(model, tenant, "rate_limit")
        metrics.count_limit_wait(model, tenant, 0.1)
        used = 10_000 // (1 + number)
        metrics.count_estimated(model, tenant, (used, used), (used, used))
        for outcome, refused in ((Outcome.OK, None), (Outcome.REFUSED, "queue_full")):
            receipt = Receipt(
                f"{number}-{turn}", request_class, tenant, model, outcome, 0.0, 0.1, 1.0, refused=refused,
                first_token_s=0.5, prompt_tokens=used, output_tokens=used, itl_s=0.1, longest_gap_s=0.2,
                slo=SloVerdict.MET,
            )  # fmt: skip
            metrics.count_ended(receipt, is_streamed=False, takes_slot=True, is_list=False)


def test_two_thousand_tenants_have_hardly_more_series_than_twenty() -> None:
    few = series_of(NAMED)
    many = series_of(MANY)
    assert few > 5000, "hardly anything was counted"
    assert few < many <= MOST * few
