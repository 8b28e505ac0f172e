"""The metrics that an engine itself counts, written as its part of a scrape.

Invariant: each sample has the labels `model` and `replica` beside the engine's own, and no family has `_created`; what
one engine adds to a scrape has at most `MAX_BYTES`. A family beyond that is missing as a whole, and the log names it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from prometheus_client import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from serve_app.transport import EngineTexts

logger = logging.getLogger("ray.serve")

MAX_BYTES = 262_144  # vLLM's have 90 KB; labels of a plugin's metrics may grow without end
CREATED = "_created"


class OwnMetrics:
    """Writes the metrics of one engine replica.

    Args:
        labels: added to each sample.
        max_bytes: of all families together.
    """

    def __init__(self, labels: Mapping[str, str], max_bytes: int = MAX_BYTES) -> None:
        self._labels = dict(labels)
        self._max_bytes = max_bytes
        self._left_out: frozenset[str] = frozenset()

    def texts(self, families: Iterable[Metric], *, is_openmetrics: bool) -> EngineTexts:
        """Each family in Prometheus' or OpenMetrics' text format."""
        found: dict[str, tuple[bytes, bytes]] = {}
        left_out = set()
        left_bytes = self._max_bytes
        for family in families:
            text = _written(_Labelled(family, self._labels), is_openmetrics)
            if len(text) > left_bytes:
                left_out.add(family.name)
                continue
            left_bytes -= len(text)
            found[family.name] = _parts(text)
        if left_out - self._left_out:
            logger.warning(
                "Engine of model %s has more metrics than %d bytes, and scrapes get none of: %s",
                self._labels["model"],
                self._max_bytes,
                ", ".join(sorted(left_out)),
            )
        self._left_out = frozenset(left_out)
        return found


class _Labelled(Collector):
    """One family with more labels."""

    def __init__(self, family: Metric, labels: Mapping[str, str]) -> None:
        self._family = Metric(family.name, family.documentation, family.type, family.unit)
        self._family.samples = [
            Sample(one.name, {**labels, **one.labels}, one.value, one.timestamp, one.exemplar)
            for one in family.samples
            if not one.name.endswith(CREATED)
        ]

    def collect(self) -> list[Metric]:
        """The family."""
        return [self._family]


def _written(collector: Collector, is_openmetrics: bool) -> bytes:
    if not is_openmetrics:
        return generate_latest(collector)
    # its default would write `vllm_` for the `vllm:` of samples (seen with 0.26.0), but not of their HELP and TYPE
    text: bytes = openmetrics.generate_latest(collector, openmetrics.ALLOWUTF8)  # type: ignore[no-untyped-call]
    return text.removesuffix(b"# EOF\n")


def _parts(text: bytes) -> tuple[bytes, bytes]:
    """HELP and TYPE, and the samples: a family's text begins with its comments."""
    lines = text.split(b"\n")
    comments = sum(1 for line in lines if line.startswith(b"# "))
    return b"".join(line + b"\n" for line in lines[:comments]), b"\n".join(lines[comments:])
