"""The counters and histograms of one router, and their text.

The beginning of a sample's line never changes, so it is made once; a scrape of 4,000 samples then writes numbers alone
and takes some ms of the event loop, where `prometheus_client` takes 70.

Invariant: what a scraper reads is what `prometheus_client` would have written of the same counts. Threads count one
after the other.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable
from typing import Generic, Protocol, TypeVar

from prometheus_client.utils import floatToGoString

from serve_app.router.metrics.metric_row import MetricRow

Labels = tuple[str, ...]  # the values of a row's labels, in their order


class Series(Protocol):
    """What one metric has counted under some values of its labels."""

    def lines(self, is_openmetrics: bool) -> Iterable[str]:
        """Its samples, each without the end of its line."""


S = TypeVar("S", bound=Series)


class CountedSeries:
    """The series of a counter."""

    __slots__ = ("_head", "value")

    def __init__(self, row: MetricRow, labels: Labels) -> None:
        self.value = 0.0
        self._head = f"{row.sample_name}{_braces(zip(row.labels, labels, strict=True))} "

    def lines(self, is_openmetrics: bool) -> tuple[str]:
        """As `Series`."""
        return (f"{self._head}{self.value}",)


class ObservedSeries:
    """The series of a histogram: each of its buckets, the count and the sum."""

    __slots__ = ("_bounds", "_counts", "_heads", "_latest", "_sum")

    def __init__(self, row: MetricRow, labels: Labels) -> None:
        own = tuple(zip(row.labels, labels, strict=True))
        self._bounds = row.buckets
        self._counts = [0] * (1 + len(row.buckets))  # the last one: above all bounds
        self._sum = 0.0
        self._latest: dict[int, str] = {}  # the exemplar of a bucket
        bounds = (*map(floatToGoString, row.buckets), "+Inf")
        names = [f"{row.name}_bucket{_braces((('le', bound), *own))} " for bound in bounds]
        self._heads = (*names, f"{row.name}_count{_braces(own)} ", f"{row.name}_sum{_braces(own)} ")

    def observe(self, value: float, request_id: str | None) -> None:
        """Count a value. `request_id`: kept as the exemplar of its bucket."""
        bucket = bisect_left(self._bounds, value)
        self._counts[bucket] += 1
        self._sum += value
        if request_id is not None:
            self._latest[bucket] = f' # {{request_id="{request_id}"}} {value} {time.time()}'

    def lines(self, is_openmetrics: bool) -> list[str]:
        """As `Series`."""
        total = 0
        found = []
        latest = self._latest if is_openmetrics else {}
        for bucket, (head, count) in enumerate(zip(self._heads, self._counts, strict=False)):
            total += count
            found.append(f"{head}{total}.0{latest[bucket]}" if bucket in latest else f"{head}{total}.0")
        *_, count_head, sum_head = self._heads
        return [*found, f"{count_head}{total}.0", f"{sum_head}{self._sum}"]


class CountedFamily(Generic[S]):
    """All series of one metric. Of a metric without labels there is one from the beginning."""

    def __init__(self, row: MetricRow, make: Callable[[MetricRow, Labels], S]) -> None:
        self._row = row
        self._make = make
        self._series: dict[Labels, S] = {}
        if not row.labels:
            self.of(())

    def of(self, labels: Labels) -> S:
        """The series with these labels."""
        found = self._series.get(labels)
        if found is None:
            found = self._series[labels] = self._make(self._row, labels)
        return found

    def lines(self, is_openmetrics: bool) -> Iterable[str]:
        """HELP, TYPE and the samples."""
        name = self._row.name if is_openmetrics else self._row.sample_name
        yield f"# HELP {name} {_help(self._row.help, is_openmetrics)}"
        yield f"# TYPE {name} {self._row.type}"
        for series in list(self._series.values()):  # another thread may add one
            yield from series.lines(is_openmetrics)


def _braces(labels: Iterable[tuple[str, str]]) -> str:
    """Labels by their names, in braces; empty: there are none."""
    found = ",".join(f'{name}="{_escaped(value)}"' for name, value in sorted(labels))
    return f"{{{found}}}" if found else ""


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _help(text: str, is_openmetrics: bool) -> str:
    return _escaped(text) if is_openmetrics else text.replace("\\", r"\\").replace("\n", r"\n")
