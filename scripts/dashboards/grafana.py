"""Boards as Grafana's JSON, by the builders of its foundation SDK, and the files that provision them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from grafana_foundation_sdk.builders import bargauge, common, dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models

from scripts.dashboards.boards import WIDTH, Board, Kind, Panel, Query, Variable
from scripts.dashboards.expressions import values_of

GRAFANA = "11.6.0"  # the release that the SDK's version in pyproject.toml is for
TAG = "serve-app"
SOURCE_VARIABLE = "datasource"
SOURCE = models.DataSourceRef(type_val="prometheus", uid="${" + SOURCE_VARIABLE + "}")
REFRESH = "30s"
SCRAPE_INTERVAL = "15s"  # of docs/how-to/watch.md; Grafana's $__rate_interval is four of them at least
SPAN = "now-1h"
FILL_PERCENT = 10
STACK_FILL_PERCENT = 60
MOUNTED_AT = "/etc/grafana/serve-app"  # where deploy/grafana is in Grafana's container

PanelBuilder = timeseries.Panel | stat.Panel | bargauge.Panel


def dashboard_json(board: Board) -> str:
    """The file of a dashboard."""
    made = (
        dashboard.Dashboard(board.title)
        .uid(board.uid)
        .description(board.help)
        .tags([TAG])
        .editable()
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .time(SPAN, "now")
        .refresh(REFRESH)
        .link(_link())
        .with_variable(dashboard.DatasourceVariable(SOURCE_VARIABLE).label("Prometheus").type("prometheus"))
    )
    for variable in board.variables:
        made.with_variable(_variable(variable))
    for built in _placed(board):
        if isinstance(built, dashboard.Row):
            made.with_row(built)
        else:
            made.with_panel(built)
    return json.dumps(made.build(), cls=JSONEncoder, indent=1, sort_keys=True) + "\n"


def _link() -> dashboard.DashboardLink:
    """To the other dashboards, with the same time and choices."""
    link = dashboard.DashboardLink("serve-app").type(models.DashboardLinkType.DASHBOARDS).tags([TAG])
    return link.as_dropdown(False).keep_time(True).include_vars(True)


def _variable(variable: Variable) -> dashboard.QueryVariable:
    query: dict[str, object] = {"query": values_of(variable.source, variable.name), "refId": variable.name}
    made = (
        dashboard.QueryVariable(variable.name)
        .label(variable.name)
        .datasource(SOURCE)
        .query(query)
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.ALPHABETICAL_ASC)
    )
    if variable.is_single:
        return made
    everything = models.VariableOption(selected=True, text="All", value="$__all")
    return made.multi(True).include_all(True).all_value(".*").current(everything)


def _placed(board: Board) -> Iterator[PanelBuilder | dashboard.Row]:
    """Headings and panels from the left to the right and down, numbered in this order."""
    number = 0
    y = 0
    for section in board.sections:
        if section.title:
            number += 1
            heading = models.GridPos(h=1, w=WIDTH, x=0, y=y)
            yield dashboard.Row(section.title).id(number).grid_pos(heading)
            y += 1
        x = 0
        height = 0
        for panel in section.panels:
            if x + panel.width > WIDTH:
                y += height
                x = height = 0
            number += 1
            place = models.GridPos(h=panel.height, w=panel.width, x=x, y=y)
            yield _panel(panel).id(number).grid_pos(place)
            x += panel.width
            height = max(height, panel.height)
        y += height


def _panel(panel: Panel) -> PanelBuilder:
    made = _BUILT[panel.kind](panel)
    made.title(panel.title).description(panel.help).datasource(SOURCE).unit(panel.unit.value).min(0)
    if panel.nothing:
        made.no_value(panel.nothing)
    is_instant = panel.kind in (Kind.NUMBER, Kind.BARS)
    for letter, query in zip("ABCDEFGH", panel.queries, strict=False):
        made.with_target(_target(query, letter, is_instant=is_instant))
    return made


def _target(query: Query, letter: str, *, is_instant: bool) -> prometheus.Dataquery:
    made = prometheus.Dataquery().expr(query.expression.text).legend_format(query.legend).ref_id(letter)
    made.datasource(SOURCE)
    return made.instant() if is_instant else made.range()


def _lines(panel: Panel) -> timeseries.Panel:
    stacks = panel.kind is Kind.STACK
    legend = (
        common.VizLegendOptions()
        .display_mode(common_models.LegendDisplayMode.TABLE)
        .placement(common_models.LegendPlacement.BOTTOM)
        .show_legend(True)
        .calcs(["lastNotNull", "max"])
    )
    tooltip = (
        common.VizTooltipOptions().mode(common_models.TooltipDisplayMode.MULTI).sort(common_models.SortOrder.DESCENDING)
    )
    made = timeseries.Panel().legend(legend).tooltip(tooltip)
    made.show_points(common_models.VisibilityMode.NEVER).fill_opacity(STACK_FILL_PERCENT if stacks else FILL_PERCENT)
    if stacks:
        made.stacking(common.StackingConfig().mode(common_models.StackingMode.NORMAL).group("A"))
    return made


def _last() -> common.ReduceDataOptions:
    return common.ReduceDataOptions().calcs(["lastNotNull"])


def _number(panel: Panel) -> stat.Panel:
    made = stat.Panel().reduce_options(_last()).color_mode(common_models.BigValueColorMode.BACKGROUND)
    made.graph_mode(common_models.BigValueGraphMode.NONE)
    return made.thresholds(_thresholds(panel))


def _bars(panel: Panel) -> bargauge.Panel:
    made = bargauge.Panel().reduce_options(_last()).display_mode(common_models.BarGaugeDisplayMode.BASIC)
    made.orientation(common_models.VizOrientation.HORIZONTAL)
    made.name_placement(common_models.BarGaugeNamePlacement.LEFT)
    return made.thresholds(_thresholds(panel))


_BUILT: dict[Kind, Callable[[Panel], PanelBuilder]] = {
    Kind.LINES: _lines,
    Kind.STACK: _lines,
    Kind.NUMBER: _number,
    Kind.BARS: _bars,
}


def _thresholds(panel: Panel) -> dashboard.ThresholdsConfig:
    calm = "blue" if panel.alarm is None else "green"
    steps = [models.Threshold(value=None, color=calm)]
    if panel.alarm is not None:
        steps.append(models.Threshold(value=panel.alarm, color="red"))
    return dashboard.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(steps)


def provider() -> dict[str, Any]:
    """Grafana's file that says where the dashboards are."""
    options = {"path": f"{MOUNTED_AT}/dashboards"}
    return {
        "apiVersion": 1,
        "providers": [
            {"name": "serve-app", "folder": "serve-app", "type": "file", "disableDeletion": True, "options": options}
        ],
    }


def source() -> dict[str, Any]:
    """Grafana's file of the Prometheus that is asked. Grafana puts the variable of its environment in."""
    return {
        "apiVersion": 1,
        "datasources": [
            {
                "name": "serve-app",
                "type": "prometheus",
                "access": "proxy",
                "url": "$SERVE_APP_PROMETHEUS_URL",
                "jsonData": {"timeInterval": SCRAPE_INTERVAL, "httpMethod": "POST"},
            }
        ],
    }
