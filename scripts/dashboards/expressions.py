"""PromQL made of the definitions of metrics.

Invariant: a metric that does not exist, or a label that it does not have, is an error here, and not an empty panel.
Invariant: what every router reports alike is never added up over the routers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from scripts.dashboards.vllm_metrics import VllmMetric
from serve_app.router.metrics.haproxy_table import HaproxyFigure
from serve_app.router.metrics.table import ClusterFigure, EngineFigure, Figure, Metric

Source = Metric | Figure | EngineFigure | ClusterFigure | HaproxyFigure | VllmMetric

JOB = "serve-app"  # of Prometheus' configuration, in docs/how-to/watch.md
ADDED = ("job", "instance")  # labels that Prometheus adds to each sample
ROUTER = "router"  # the label that a scrape adds to what routers report
# Every router reports the same number, or a view of the same thing: a sum would count it several times.
ALIKE: frozenset[Source] = frozenset({Figure.BUILD_INFO, Figure.BLOCKED, Figure.GPU_FRAGMENTATION, Figure.EJECTED})


class WrongExpression(ValueError):
    """The expression asks for what the metrics do not have."""


class Values(NamedTuple):
    """Values of a label: one of these, or none of these."""

    names: tuple[str, ...]
    is_excluded: bool = False


Wanted = str | Values  # a text that begins with `$` is a variable of a dashboard


def any_of(*names: str) -> Values:
    return Values(names)


def none_of(*names: str) -> Values:
    return Values(names, is_excluded=True)


@dataclass(frozen=True, slots=True)
class Expression:
    """An instant vector.

    Args:
        labels: what tells its series apart.
        is_alike: the series of different routers say the same.
        is_operand: it may stand beside an operator without parentheses.
    """

    text: str
    labels: tuple[str, ...] = ()
    is_alike: bool = False
    is_operand: bool = True

    def summed(self, *by: str) -> Expression:
        if self.is_alike:
            raise WrongExpression(f"each router reports the same, so that a sum is wrong: {self.text}")
        return self._aggregated("sum", by)

    def highest(self, *by: str) -> Expression:
        return self._aggregated("max", by)

    def lowest(self, *by: str) -> Expression:
        return self._aggregated("min", by)

    def counted(self, *by: str) -> Expression:
        return self._aggregated("count", by)

    def present(self, *by: str) -> Expression:
        """1 for each group that there is."""
        return self._aggregated("group", by)

    def _aggregated(self, operation: str, by: tuple[str, ...]) -> Expression:
        self._demand(by)
        grouped = f" by ({', '.join(by)})" if by else ""
        return Expression(f"{operation}{grouped} ({self.text})", by)

    def _demand(self, labels: Iterable[str]) -> None:
        unknown = sorted({*labels} - {*self.labels})
        if unknown:
            raise WrongExpression(f"no label {', '.join(unknown)}: {self.text} has {', '.join(self.labels) or 'none'}")

    def plus(self, other: Expression) -> Expression:
        return self._combined("+", other)

    def minus(self, other: Expression) -> Expression:
        return self._combined("-", other)

    def over(self, other: Expression) -> Expression:
        """The quotient. `other` may have fewer labels."""
        return self._combined("/", other)

    def taken_from(self, total: Expression) -> Expression:
        """For each of these series the difference from the one of `total` that has fewer labels."""
        self._demand(total.labels)
        text = f"{total._operand} - on ({', '.join(total.labels)}) group_right () {self._operand}"
        return Expression(text, self.labels, is_operand=False)

    def _combined(self, operator: Literal["+", "-", "/"], other: Expression) -> Expression:
        """Between series with the same values of the labels of `other`."""
        self._demand(other.labels)
        matched = "" if {*other.labels} == {*self.labels} else f" on ({', '.join(other.labels)}) group_left ()"
        text = f"{self._operand} {operator}{matched} {other._operand}"
        return Expression(text, self.labels, is_operand=False)

    def above(self, bound: float) -> Expression:
        return self._compared(f"> {bound:g}")

    def below(self, bound: float) -> Expression:
        return self._compared(f"< {bound:g}")

    def equal(self, bound: float) -> Expression:
        return self._compared(f"== {bound:g}")

    def below_that(self, other: Expression) -> Expression:
        return self._compared(f"< {other._operand}")

    def _compared(self, condition: str) -> Expression:
        return Expression(f"{self._operand} {condition}", self.labels, self.is_alike, is_operand=False)

    def where_also(self, other: Expression) -> Expression:
        """Of these series those for which there is one of `other` with the same values of the labels of `other`."""
        return self._filtered("and", other)

    def where_not(self, other: Expression) -> Expression:
        return self._filtered("unless", other)

    def _filtered(self, operator: Literal["and", "unless"], other: Expression) -> Expression:
        self._demand(other.labels)
        text = f"{self._operand} {operator} on ({', '.join(other.labels)}) {other._operand}"
        return Expression(text, self.labels, is_operand=False)

    def or_else(self, other: Expression) -> Expression:
        """These series, and those of `other` with other labels."""
        if {*other.labels} != {*self.labels}:
            raise WrongExpression(f"other labels: {self.text} has {self.labels}, {other.text} has {other.labels}")
        return Expression(f"{self._operand} or {other._operand}", self.labels, is_operand=False)

    def or_zero(self, label: str = "", value: str = "none") -> Expression:
        """These series, or if there are none, a zero, while any router answers: without an answer nothing is known.

        Args:
            label: the zero has it, with the value.
        """
        zero = f"0 * max ({_selected(Figure.BUILD_INFO, {})})"
        if label:
            self._demand([label])
            zero = f'label_replace({zero}, "{label}", "{value}", "", "")'
        return Expression(f"{self._operand} or on () {zero}", self.labels, is_operand=False)

    def or_zero_of(self, other: Expression) -> Expression:
        """These series, and a zero for each series of `other` that has none here."""
        if {*other.labels} != {*self.labels}:
            raise WrongExpression(f"other labels: {self.text} has {self.labels}, {other.text} has {other.labels}")
        return Expression(f"{self._operand} or 0 * {other._operand}", self.labels, is_operand=False)

    @property
    def _operand(self) -> str:
        return self.text if self.is_operand else f"({self.text})"


def target() -> Expression:
    """Whether Prometheus reached the endpoint at its last scrape."""
    return Expression(f'up{{job="{JOB}"}}', ADDED)


def now(source: Source, **wanted: Wanted) -> Expression:
    """A gauge."""
    _demand_type(source, "gauge")
    is_alike = source in ALIKE or (source is Figure.SLOTS and wanted.get("state") == "total")
    return Expression(_selected(source, wanted), _labels(source), is_alike)


def rate(source: Source, window: str, **wanted: Wanted) -> Expression:
    """A counter's growth in a second."""
    _demand_type(source, "counter")
    return Expression(f"rate({_selected(source, wanted)}[{window}])", _labels(source))


def growth(source: Source, window: str, **wanted: Wanted) -> Expression:
    """How much a counter has grown in a window.

    `increase` alone misses the first event: a series begins with its first count, and there was no zero before. So a
    series counts whole that was not seen in the window before this one, if Prometheus reached its target at that time.
    A router that missed one scrape was seen.
    """
    _demand_type(source, "counter")
    series = _selected(source, wanted)
    seen = f"present_over_time({series}[{window}] offset {window})"
    born = f"(({series} unless {seen}) and on (instance, job) (up offset {window} == 1))"
    return Expression(f"{born} or increase({series}[{window}])", _labels(source), is_operand=False)


def observed(source: Source, window: str, **wanted: Wanted) -> Expression:
    """What a histogram has added up in a second; of waits in seconds: how many requests waited on average."""
    _demand_type(source, "histogram")
    return Expression(f"rate({_selected(source, wanted, '_sum')}[{window}])", _labels(source))


def observations(source: Source, window: str, **wanted: Wanted) -> Expression:
    """How many a histogram has counted in a second."""
    _demand_type(source, "histogram")
    return Expression(f"rate({_selected(source, wanted, '_count')}[{window}])", _labels(source))


def mean(source: Source, window: str, *by: str, **wanted: Wanted) -> Expression:
    total = observed(source, window, **wanted).summed(*by)
    return total.over(observations(source, window, **wanted).summed(*by))


def quantile(part: float, source: Source, window: str, *by: str, **wanted: Wanted) -> Expression:
    _demand_type(source, "histogram")
    rates = Expression(f"rate({_selected(source, wanted, '_bucket')}[{window}])", (*_labels(source), "le"))
    return Expression(f"histogram_quantile({part:g}, {rates.summed('le', *by).text})", by)


def values_of(source: Source, label: str) -> str:
    """The query of a dashboard's variable."""
    row = source.value
    if label not in row.labels:
        raise WrongExpression(f"no label {label}: {row.name} has {', '.join(row.labels)}")
    return f"label_values({row.sample_name}, {label})"


def recorded(name: str, labels: tuple[str, ...], **wanted: Wanted) -> Expression:
    """A series of a recording rule."""
    return Expression(name + _braces(name, labels, wanted), labels)


def _demand_type(source: Source, kind: Literal["counter", "gauge", "histogram"]) -> None:
    row = source.value
    if row.is_old:
        raise WrongExpression(f"{row.name} goes with the next version: {row.help}")
    if row.type != kind:
        raise WrongExpression(f"{row.name} is a {row.type}, and not a {kind}")


def _labels(source: Source) -> tuple[str, ...]:
    """With those that a scrape and Prometheus add."""
    of_router = (ROUTER,) if isinstance(source, Metric | Figure) else ()
    return (*source.value.labels, *of_router, *ADDED)


def _selected(source: Source, wanted: Mapping[str, Wanted], suffix: str = "") -> str:
    row = source.value
    return f"{row.sample_name}{suffix}{_braces(row.name, row.labels, wanted)}"


def _braces(name: str, labels: tuple[str, ...], wanted: Mapping[str, Wanted]) -> str:
    """What selects series, in braces; nothing if all are wanted."""
    unknown = sorted(wanted.keys() - {*labels})
    if unknown:
        raise WrongExpression(f"no label {', '.join(unknown)}: {name} has {', '.join(labels) or 'none'}")
    matchers = ", ".join(f"{label}{_matcher(value)}" for label, value in wanted.items())
    return f"{{{matchers}}}" if matchers else ""


def _matcher(value: Wanted) -> str:
    if isinstance(value, Values):
        names = "|".join(map(re.escape, value.names))
        return f'{"!~" if value.is_excluded else "=~"}"{names}"'
    return f'{"=~" if value.startswith("$") else "="}"{value}"'
