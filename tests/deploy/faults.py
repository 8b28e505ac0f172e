"""What a deployment reports minute by minute, healthy or with a fault, as series for promtool's tests of rules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from serve_app.router.metrics.table import ClusterFigure, Figure, Metric

MINUTES = 130  # above the longest window of a rule, twice
FAULT = 70  # the minute in which a fault begins
TARGET = {"job": "serve-app", "instance": "127.0.0.1:8000"}
ROUTERS = ("r1", "r2")
REPLICAS = ("e1", "e2")
MODEL = "chat"
SLOTS = 8.0
Values = list[float | None]  # a minute each; None: the scrape had none


@dataclass(frozen=True)
class Series:
    """One time series."""

    name: str
    labels: Mapping[str, str]
    values: Values = field(compare=False)

    def notation(self) -> dict[str, str]:
        """As promtool reads it."""
        labels = ",".join(f'{label}="{value}"' for label, value in sorted({**TARGET, **self.labels}.items()))
        values = " ".join("_" if value is None else f"{value:g}" for value in self.values)
        return {"series": f"{self.name}{{{labels}}}", "values": values}


def steady(value: float) -> Values:
    return [value] * MINUTES


def growing(per_minute: float, start: float = 1000.0) -> Values:
    """A counter."""
    return [start + per_minute * minute for minute in range(MINUTES)]


def then(before: Values, after: Values, minute: int = FAULT) -> Values:
    """The first, and from a minute on the second."""
    return before[:minute] + after[minute:]


def only_after(after: Values, minute: int = FAULT) -> Values:
    """Nothing before the minute."""
    return then([None] * MINUTES, after, minute)


def rising(per_minute: float, start: float = 1000.0) -> Values:
    """A counter that stands still until the fault."""
    return [start + per_minute * max(0, minute + 1 - FAULT) for minute in range(MINUTES)]


def sample_name(row: Metric | Figure | ClusterFigure, suffix: str = "") -> str:
    return f"{row.value.sample_name}{suffix}"


class Deployment:
    """Its series: at first those of one that works, with two routers, two replicas and two tenants, under load."""

    def __init__(self, *, is_idle: bool = False) -> None:
        self._series: dict[tuple[str, frozenset[tuple[str, str]]], Series] = {}
        self._load = 0.0 if is_idle else 1.0
        self.put("up", {}, steady(1.0))
        for part in ("quota_actor", "store"):
            self.put(sample_name(ClusterFigure.UP), {"part": part}, steady(1.0))
        self.put(sample_name(ClusterFigure.ROUTERS_WANTED), {}, steady(len(ROUTERS)))
        self._add_replicas()
        self._add_requests()
        for router in ROUTERS:
            self.add_router(router, steady(1.0))

    def put(self, name: str, labels: Mapping[str, str], values: Values) -> None:
        """Add the series, or replace the one with these labels."""
        self._series[name, frozenset(labels.items())] = Series(name, labels, values)

    def change(self, source: Metric | Figure | ClusterFigure, values: Values, suffix: str = "", **labels: str) -> None:
        """Replace all series of the metric that have these labels, or add one if there is none."""
        name = sample_name(source, suffix)
        found = [
            series
            for series in self._series.values()
            if series.name == name and labels.items() <= series.labels.items()
        ]
        for series in found:
            self.put(name, series.labels, values)
        if not found:
            self.put(name, labels, values)

    def lose(self, *, minute: int = FAULT, **labels: str) -> None:
        """No series with these labels is reported from the minute on."""
        for series in list(self._series.values()):
            if labels.items() <= series.labels.items():
                self.put(series.name, series.labels, then(series.values, [None] * MINUTES, minute))

    def hide(self, minute: int, **labels: str) -> None:
        """One scrape lacks the series with these labels."""
        for series in list(self._series.values()):
            if labels.items() <= series.labels.items():
                missing: Values = [None if at == minute else value for at, value in enumerate(series.values)]
                self.put(series.name, series.labels, missing)

    def input_series(self) -> list[dict[str, str]]:
        return [series.notation() for series in self._series.values()]

    def _add_replicas(self) -> None:
        self.put(sample_name(ClusterFigure.REPLICAS), {"model": MODEL, "state": "running"}, steady(len(REPLICAS)))
        self.put(sample_name(ClusterFigure.REPLICAS_TARGET), {"model": MODEL}, steady(len(REPLICAS)))
        for replica in REPLICAS:
            labels = {"model": MODEL, "replica": replica}
            self.put(sample_name(ClusterFigure.KV_USED_RATIO), labels, steady(0.8 * self._load))

    def add_router(self, router: str, values: Values) -> None:
        """What a router reports: gauges, and counters that begin at zero. `values`: where they are 1 it reports."""
        reports = [value is not None for value in values]
        of_model = {"model": MODEL, "router": router}
        gauges: list[tuple[Figure, dict[str, str], float]] = [
            (Figure.BUILD_INFO, {"router": router, "version": "0.6.0", "vllm": "0.32.0"}, 1.0),
            (Figure.WAITING_RATIO, of_model, 0.02 * self._load),
            (Figure.BLOCKED, of_model | {"reason": "memory"}, 0.0),
            (Figure.EJECTED, of_model, 0.0),
            *((Figure.WAITING, of_model | {"priority": name}, waiting) for name, waiting in self._waiting()),
            *(
                (Figure.SLOTS, of_model | {"replica": replica, "state": state}, slots)
                for replica in REPLICAS
                for state, slots in (("total", SLOTS), ("granted", 3.0 * self._load))
            ),
            *((Figure.REPLICA_EJECTIONS, of_model | {"reason": reason}, 0.0) for reason in ("lost", "rate", "probe")),
        ]
        for source, labels, value in gauges:
            self.put(sample_name(source), labels, [value if is_reported else None for is_reported in reports])

    def _waiting(self) -> Iterator[tuple[str, float]]:
        yield from (("high", 0.0), ("normal", 2.0 * self._load), ("low", 20.0 * self._load))

    def _add_requests(self) -> None:
        """Of both tenants: answers, a few refusals of each kind, and failures of one in a thousand."""
        load = self._load
        for tenant, share in (("acme", 0.55), ("beta", 0.45)):
            of_tenant = {"model": MODEL, "tenant": tenant, "router": "r1"}
            of_class = of_tenant | {"priority": "normal"}
            self.put(sample_name(Metric.PROMPT_TOKENS), of_tenant, growing(60_000 * share * load))
            self.put(sample_name(Metric.COMPLETION_TOKENS), of_tenant, growing(30_000 * share * load))
            self.put(sample_name(Metric.REQUESTS), of_class | {"outcome": "ok"}, growing(120 * share * load))
            self.put(
                sample_name(Metric.REQUESTS), of_class | {"outcome": "engine_failed"}, growing(0.12 * share * load)
            )
            self.put(sample_name(Metric.REFUSALS), of_class | {"reason": "rate_limit"}, growing(30 * load))
            self.put(sample_name(Metric.REFUSALS), of_class | {"reason": "queue_full"}, growing(1 * load))
            self.put(sample_name(Metric.TIME_TO_FIRST_TOKEN, "_count"), of_class, growing(120 * share * load))
            self.put(sample_name(Metric.TIME_TO_FIRST_TOKEN, "_sum"), of_class, growing(60 * share * load))
        for priority, waits in (("normal", 4.0), ("low", 30.0)):
            labels = {"model": MODEL, "priority": priority, "router": "r1", "reason": "slots"}
            self.put(sample_name(Metric.QUEUE_WAIT, "_sum"), labels, growing(60 * waits * load))
        of_class = {"model": MODEL, "priority": "normal", "router": "r1"}
        self.put(sample_name(Metric.SLO_OFFERED), of_class, growing(120 * load))
        self.put(sample_name(Metric.SLO_MISSED), of_class | {"reason": "ttft"}, growing(1 * load))
