"""The text of counters and histograms is what `prometheus_client` writes of the same counts."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.openmetrics.exposition import generate_latest as openmetrics_text
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families

from serve_app.router.metrics import buckets
from serve_app.router.metrics.metric_row import MetricRow
from serve_app.router.metrics.series import CountedFamily, CountedSeries, ObservedSeries

HELP = 'what "it" counts: a\\b'
COUNTER = MetricRow("events", "counter", ("tenant", "model"), HELP)
HISTOGRAM = MetricRow("seconds", "histogram", ("model", "aside"), HELP, buckets=buckets.REQUEST_TOKENS)
BARE = MetricRow("lost", "counter", (), HELP)

labels = st.tuples(st.text(max_size=4), st.sampled_from(["m", 'a"b', "a\nb", "a\\", "a{b} # {"]))
amounts = st.floats(0, 1e12)


def written(family: CountedFamily[CountedSeries] | CountedFamily[ObservedSeries], is_openmetrics: bool) -> str:
    return "".join(f"{line}\n" for line in family.lines(is_openmetrics)) + ("# EOF\n" if is_openmetrics else "")


def plain(families: Iterable[Family]) -> list[tuple[object, ...]]:
    """All that a scraper reads, but for the times of exemplars."""
    return [
        (one.name, one.type, one.documentation, sample.name, sample.labels, sample.value)
        + ((sample.exemplar.labels, sample.exemplar.value) if sample.exemplar else ())
        for one in families
        for sample in one.samples
        if not sample.name.endswith("_created")
    ]


def same(ours: CountedFamily[CountedSeries] | CountedFamily[ObservedSeries], registry: CollectorRegistry) -> None:
    expected = plain(text_string_to_metric_families(generate_latest(registry).decode()))
    assert plain(text_string_to_metric_families(written(ours, is_openmetrics=False))) == expected
    expected = plain(openmetrics_families(openmetrics_text(registry).decode()))  # type: ignore[no-untyped-call]
    assert plain(openmetrics_families(written(ours, is_openmetrics=True))) == expected


@given(st.lists(st.tuples(labels, amounts)))
def test_a_counter_reads_as_that_of_prometheus_client(counts: list[tuple[tuple[str, str], float]]) -> None:
    registry = CollectorRegistry()
    theirs = Counter(COUNTER.name, COUNTER.help, COUNTER.labels, registry=registry)
    ours = CountedFamily(COUNTER, CountedSeries)
    for of, amount in counts:
        theirs.labels(*of).inc(amount)
        ours.of(of).value += amount
    same(ours, registry)


observed = st.one_of(amounts, st.sampled_from(buckets.REQUEST_TOKENS))


@given(st.lists(st.tuples(labels, observed, st.one_of(st.none(), st.text("0123456789abcdef", min_size=1)))))
def test_a_histogram_reads_as_that_of_prometheus_client_with_the_last_request_of_each_bucket(
    counts: list[tuple[tuple[str, str], float, str | None]],
) -> None:
    registry = CollectorRegistry()
    theirs = Histogram(HISTOGRAM.name, HISTOGRAM.help, HISTOGRAM.labels, registry=registry, buckets=HISTOGRAM.buckets)
    ours = CountedFamily(HISTOGRAM, ObservedSeries)
    for of, value, request_id in counts:
        theirs.labels(*of).observe(value, None if request_id is None else {"request_id": request_id})
        ours.of(of).observe(value, request_id)
    same(ours, registry)


@pytest.mark.parametrize("is_openmetrics", [False, True])
def test_a_counter_without_labels_is_there_before_it_has_counted(is_openmetrics: bool) -> None:
    assert written(CountedFamily(BARE, CountedSeries), is_openmetrics).splitlines()[2] == "lost_total 0.0"
