"""How far a map is: figures for a caller's own function, or a bar on stderr.

Invariant: the figures are of items, each counted once, when its result is there, read or not.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

LINE_S = 15.0  # without a terminal: how often a line is printed, as in the other commands
REFRESH_PER_SECOND = 4  # of the bar


@dataclass(frozen=True, slots=True)
class MapProgress:
    """The state of a map.

    Args:
        done: items that have a result, an answer or an error.
        failed: those of them with an error.
        in_flight: requests that run, or wait in the server's queue.
        waiting: refused items that wait until they may be sent again.
        tokens: that the answers' models have generated; of embeddings, those of their inputs.
        total: number of items; None: the source does not say.
    """

    done: int
    failed: int
    in_flight: int
    waiting: int
    tokens: int
    total: int | None


Report = Callable[[MapProgress], object]


class BarReporter:
    """A bar on a terminal; elsewhere a line every `LINE_S`, and one at the end."""

    def __init__(self, console: Console | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console or Console(stderr=True)
        self._clock = clock
        self._began_at = self._printed_at = clock()
        self._last: MapProgress | None = None
        self._is_terminal = self._console.is_terminal
        self._bar = Progress(
            TextColumn("map"),
            BarColumn(),
            MofNCompleteColumn(),
            _Rates(self._rates),
            TimeRemainingColumn(),
            console=self._console,
            refresh_per_second=REFRESH_PER_SECOND,
            redirect_stdout=False,  # the caller prints its results there
            redirect_stderr=False,
        )
        self._task = self._bar.add_task("map", total=None)

    def __call__(self, progress: MapProgress) -> None:
        now = self._clock()
        self._last = progress
        if self._is_terminal:
            self._bar.start()
            self._bar.update(self._task, completed=progress.done, total=progress.total)
        elif now - self._printed_at >= LINE_S:
            self._print(now)

    def close(self) -> None:
        """Leave the last state on the screen."""
        if self._is_terminal:
            self._bar.stop()
        elif self._last is not None:
            self._print(self._clock())
        self._last = None

    def _print(self, now: float) -> None:
        self._printed_at = now
        assert self._last is not None
        total = "" if self._last.total is None else f" of {self._last.total:,}"
        self._console.print(f"map: {self._last.done:,}{total}, {self._rates()}", soft_wrap=True, highlight=False)

    def _rates(self) -> str:
        if self._last is None:
            return ""
        last = self._last
        elapsed_s = max(self._clock() - self._began_at, 1e-9)
        waiting = f", {last.waiting:,} refused for now" if last.waiting else ""
        rates = f"{last.done / elapsed_s:,.1f} items/s, {last.tokens / elapsed_s:,.0f} tokens/s"
        return f"{last.failed:,} failed{waiting}, {rates}"


class _Rates(ProgressColumn):
    """What a bar cannot show."""

    def __init__(self, text: Callable[[], str]) -> None:
        super().__init__()
        self._text = text

    def render(self, task: Task) -> Text:
        return Text(self._text())
