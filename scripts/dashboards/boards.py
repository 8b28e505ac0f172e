"""What a dashboard is made of: sections of panels, and their queries with legends."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from scripts.dashboards.expressions import Expression, Source, WrongExpression

WIDTH = 24  # columns of Grafana's grid
RATE = "$__rate_interval"  # Grafana's: four scrapes at least


class Kind(Enum):
    """How a panel shows its series."""

    LINES = "lines"
    STACK = "stack"  # lines that add up
    NUMBER = "number"  # the present value
    BARS = "bars"  # the present value of each series


class Unit(Enum):
    """Grafana's name of a unit."""

    COUNT = "short"
    SECONDS = "s"
    BYTES = "bytes"
    RATIO = "percentunit"
    REQUESTS_PER_SECOND = "reqps"
    PER_SECOND = "cps"


@dataclass(frozen=True, slots=True)
class Query:
    """An expression and the name of its series: a text with `{{label}}`."""

    expression: Expression
    legend: str

    def __post_init__(self) -> None:
        unknown = {*re.findall(r"\{\{(\w+)\}\}", self.legend)} - {*self.expression.labels}
        if unknown:
            raise WrongExpression(f"the legend {self.legend!r} names {unknown}; series of {self.expression.text}")


@dataclass(frozen=True, slots=True)
class Panel:
    """A question and what answers it.

    Args:
        help: how to read it, and what to do.
        alarm: from this value on a number or bar is red; None: it has no colour.
        nothing: shown where there are no series.
    """

    title: str
    help: str
    unit: Unit
    queries: tuple[Query, ...]
    kind: Kind = Kind.LINES
    width: int = 12
    height: int = 8
    alarm: float | None = None
    nothing: str = ""


@dataclass(frozen=True, slots=True)
class Section:
    """Panels below a heading; an empty title: without one."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Variable:
    """A choice above a dashboard: values of a label. `is_single`: one value, else several or all."""

    name: str
    source: Source
    is_single: bool = False


@dataclass(frozen=True, slots=True)
class Board:
    """A dashboard. `uid` stays, as links name it."""

    uid: str
    title: str
    help: str
    sections: tuple[Section, ...]
    variables: tuple[Variable, ...] = field(default=())

    def panels(self) -> Iterator[Panel]:
        for section in self.sections:
            yield from section.panels
