"""What all runs against a served model share: the width of tables, the limit of foreign load, and how a run without
figures ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

from benchmarks.common.arms import BenchmarkError

FOREIGN_LIMIT_CORES = 0.2  # a tenth of a two-core machine: more moves a ratio by more than its bar
CONSOLE_WIDTH = 150  # of tables when the output is not a terminal


@contextmanager
def figures_or_exit(console: Console, *failures: type[Exception]) -> Iterator[None]:
    """A block that gets the figures.

    Raises:
        SystemExit: 1 after a BenchmarkError or one of `failures`, which has been shown.
    """
    shown: tuple[type[Exception], ...] = (BenchmarkError, *failures)
    try:
        yield
    except shown as error:
        console.print(f"failed: {error}", style="red", markup=False)
        raise SystemExit(1) from None
