"""The two texts of an exposition: Prometheus' own, and OpenMetrics for a scraper that asks for it.

OpenMetrics has the exemplars: of each bucket of two histograms the id of the last request in it.
"""

from __future__ import annotations

from enum import Enum

from prometheus_client import generate_latest
from prometheus_client.exposition import choose_encoder
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

END = b"# EOF\n"  # of OpenMetrics: once, at the end


class TextFormat(Enum):
    """By content type."""

    PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
    OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"


def accepted(accept: str) -> TextFormat:
    """The format for a request with this header `Accept`."""
    _, content_type = choose_encoder(accept)
    is_openmetrics = content_type.startswith("application/openmetrics-text")
    return TextFormat.OPENMETRICS if is_openmetrics else TextFormat.PROMETHEUS


def rendered(collector: Collector, text_format: TextFormat) -> bytes:
    """The families of a collector as a part of an exposition, without its end."""
    if text_format is TextFormat.PROMETHEUS:
        return generate_latest(collector)
    return openmetrics.generate_latest(collector).removesuffix(END)  # type: ignore[no-any-return, no-untyped-call]
