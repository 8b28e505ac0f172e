"""The samples of figures that are read at a scrape, from whoever counts them."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from serve_app.router.metrics.metric_row import MetricRow


class Families(Collector):
    """One family for each row of the table, without samples until they are added."""

    def __init__(self, figures: Iterable[Enum]) -> None:
        rows: list[MetricRow] = [figure.value for figure in figures]
        self._families = {row.name: _family(row) for row in rows}

    def add(self, figure: Enum, value: float, *labels: str) -> None:
        """Add a sample, with the values of the row's labels in their order."""
        self._families[figure.value.name].add_metric(labels, value)

    def collect(self) -> list[Family]:
        """All families, in the order of the table."""
        return list(self._families.values())


def _family(row: MetricRow) -> CounterMetricFamily | GaugeMetricFamily:
    if row.type == "counter":
        return CounterMetricFamily(row.name, row.help, labels=row.labels)
    return GaugeMetricFamily(row.name, row.help, labels=row.labels)
