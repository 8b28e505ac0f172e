"""The queries of the dashboards' panels, as a stack under test is asked them."""

from __future__ import annotations

import re

from scripts.dashboards.boards import Board, Panel
from scripts.dashboards.files import boards

VLLM = "vllm:"  # of the names of vLLM's own metrics, which simulated engines lack


def panels(*, of_vllm: bool) -> list[tuple[Board, Panel]]:
    """The panels that ask for vLLM's own metrics, or all others."""
    found = ((board, panel) for board in boards() for panel in board.panels())
    return [(board, panel) for board, panel in found if _asks_vllm(panel) is of_vllm]


def asked(board: Board, panel: Panel, model: str, window: str) -> list[str]:
    """The queries of a panel, with values in place of the dashboard's variables."""
    single = {variable.name for variable in board.variables if variable.is_single}
    values = {"model": model if "model" in single else ".*", "tenant": ".*", "__rate_interval": window}
    return [re.sub(r"\$(\w+)", lambda found: values[found.group(1)], query.expression.text) for query in panel.queries]


def _asks_vllm(panel: Panel) -> bool:
    return any(VLLM in query.expression.text for query in panel.queries)
