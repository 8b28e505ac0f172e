"""Which page has which lists."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from tests.generated.blocks import written
from tests.generated.commands import sections
from tests.generated.errors import answers
from tests.generated.findings import findings
from tests.generated.metrics import metrics

ROOT = Path(__file__).resolve().parents[2]
PAGES: Mapping[str, Mapping[str, Callable[[], str]]] = {
    "docs/reference/cli.md": {"commands": sections},
    "docs/reference/errors.md": {"errors": answers, "findings": findings},
    "docs/reference/metrics.md": {"metrics": metrics},
}


def page(name: str) -> str:
    """The page with its lists as the code has them.

    Raises:
        NoBlock: it lacks the comments of a list.
    """
    text = (ROOT / name).read_text()
    for block, made in PAGES[name].items():
        text = written(text, block, made())
    return text
