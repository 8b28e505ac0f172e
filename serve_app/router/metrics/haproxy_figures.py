"""HAProxy's own metrics, from the expositions of the nodes."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families

from serve_app.router.metrics.families import Families
from serve_app.router.metrics.haproxy_table import HaproxyFigure

_OF_SAMPLE = {figure.value.sample_name: figure for figure in HaproxyFigure}


def haproxy_families(expositions: Mapping[str, str | None]) -> Families:
    """The rows of the table, of every node. `expositions`: by node, as HAProxy's exporter has written
    them; None: it does not answer."""
    families = Families(HaproxyFigure)
    for node, text in sorted(expositions.items()):
        for family in text_string_to_metric_families(declared_lines(text or "")):
            for sample in family.samples:
                figure = _OF_SAMPLE[sample.name]
                own = (sample.labels.get(name, "") for name in figure.value.labels[1:])
                families.add(figure, sample.value, node, *own)
    return families


def declared_lines(text: str) -> str:
    """The samples of the table's rows."""
    lines = text.splitlines(keepends=True)
    return "".join(line for line in lines if line.partition("{")[0].partition(" ")[0] in _OF_SAMPLE)
