"""A row of the table of metrics, and the labels that many rows have."""

from __future__ import annotations

from typing import Literal, NamedTuple

OF_MODEL = ("model",)
OF_CLASS = ("model", "priority")
OF_TENANT = ("model", "tenant")
OF_REPLICA = ("model", "replica")


class MetricRow(NamedTuple):
    """One metric; the name of a counter is that without `_total`. `is_old`: it goes with the next version, and its
    help says what has taken its place. `buckets`: of a histogram."""

    name: str
    type: Literal["counter", "histogram", "gauge"]
    labels: tuple[str, ...]
    help: str
    is_old: bool = False
    buckets: tuple[float, ...] = ()

    @property
    def sample_name(self) -> str:
        """The name as a query has it."""
        return f"{self.name}_total" if self.type == "counter" else self.name
