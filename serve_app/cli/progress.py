"""Progress output: a live display on a terminal, plain lines elsewhere.

Invariant: each phase that began is reported exactly once as done, failed or left. On a terminal,
progress of bytes leaves no line behind.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from rich import progress as bars
from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from serve_app.cli.layout import say

GB = 1e9
HEARTBEAT_S = 15.0  # without a terminal: how often a long phase prints a line
REFRESH_PER_SECOND = 8  # of the spinner; more costs CPU that the engine needs
SHOWN_AFTER_S = 2.0  # a bar for less than that is a flicker
MB = 1e6


class Progress:
    """Shows one phase after the other. Use it as a context manager, which restores the terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._title = ""
        self._detail = ""
        self._began_at = 0.0
        self._printed_at = 0.0
        self._live: Live | None = None
        self._spinner = Spinner("dots")

    def begin(self, title: str) -> None:
        """Start a phase; a running phase is reported as done."""
        self._end("✓", "green", "")
        self._title = title
        self._detail = ""
        self._began_at = self._printed_at = time.monotonic()
        if self._console.is_terminal:
            self._live = Live(
                self,
                console=self._console,
                refresh_per_second=REFRESH_PER_SECOND,
                transient=True,
                redirect_stderr=False,
            )
            self._live.start()
        else:
            say(self._console, f"{title} ...")

    def detail(self, text: str) -> None:
        """Show the present step of the phase."""
        now = time.monotonic()
        changed, self._detail = text != self._detail, text
        if self._live is None and text and (changed or now - self._printed_at > HEARTBEAT_S):
            self._printed_at = now
            say(self._console, f"  {self._title}: {text} ({self.elapsed_s:.0f} s)")

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._began_at

    def __rich__(self) -> Spinner:
        detail = f"  {self._detail}" if self._detail else ""
        self._spinner.update(text=Text.assemble(self._title, (f"{detail}  {self.elapsed_s:.0f} s", "dim")))
        return self._spinner

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._end("✓", "green", "")
        elif issubclass(kind, Exception):
            self._end("✗", "red", "failed after ")
        else:
            self._end("-", "yellow", "interrupted after ")

    def _end(self, sign: str, colour: str, how: str) -> None:
        """Report how the phase ended; no effect without a running phase."""
        if not self._title:
            return
        if self._live is not None:
            self._live.stop()
            self._live = None
        title, self._title = self._title, ""
        say(self._console, Text.assemble((sign, colour), f" {title}", (f"  {how}{self.elapsed_s:.1f} s", "dim")))


class ByteProgress:
    """How many bytes of a file are done: nothing for `SHOWN_AFTER_S`, then a bar, and without a terminal a line every
    `HEARTBEAT_S`. Use it as a context manager, which restores the terminal.

    Args:
        total: bytes in all; None: not known.
        clock: seconds, of any beginning.
    """

    def __init__(
        self, console: Console, title: str, total: int | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console = console
        self._title = title
        self._total = total
        self._clock = clock
        self._done = 0
        self._due_at = clock() + SHOWN_AFTER_S
        self._bar: bars.Progress | None = None
        self._task = bars.TaskID(0)

    def expect(self, total: int) -> None:
        """So many bytes will be done at the end."""
        self._total = total

    def advance(self, count: int) -> None:
        """So many more bytes are done."""
        self._done += count
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done)
        elif self._clock() >= self._due_at:
            self._due_at = self._clock() + HEARTBEAT_S
            self._show()

    def _show(self) -> None:
        if self._console.is_terminal:
            columns = (bars.BarColumn(), bars.DownloadColumn(), bars.TransferSpeedColumn(), bars.TimeRemainingColumn())
            self._bar = bars.Progress(
                bars.TextColumn("{task.description}", markup=False), *columns, console=self._console, transient=True
            )
            self._task = self._bar.add_task(self._title, total=self._total, completed=self._done)
            self._bar.start()
        else:
            of = "" if self._total is None else f" of {self._total / MB:.1f}"
            self._console.print(f"{self._title}: {self._done / MB:.1f}{of} MB", markup=False, highlight=False)

    def __enter__(self) -> ByteProgress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()


def replica_states(status: Mapping[str, Any]) -> str:
    """The replica counts, like `tiny 1/2 (1 starting)  router 1`."""
    parts = []
    for model in status["models"]:
        states = [replica["state"] for replica in model["replicas"]]
        ready = states.count("RUNNING")
        others = sorted({_state(replica) for replica in model["replicas"] if replica["state"] != "RUNNING"})
        rest = f" ({', '.join(others)})" if others else ""
        parts.append(f"{model['name']} {ready}/{model['target']}{rest}")
    if status["routers"]:
        parts.append(f"router {sum(replica['state'] == 'RUNNING' for replica in status['routers'])}")
    return "  ".join(parts)


def _state(replica: Mapping[str, Any]) -> str:
    start = replica.get("start")
    return replica["state"].lower().replace("_", " ") if start is None else start_text(start, steps=True)


def start_text(start: Mapping[str, Any], *, steps: bool = False) -> str:
    """A start's phase, how far it is, its seconds and the last start's: `loading 43%, 12 s, last start 31 s`,
    `downloading 1.20 of 16.06 GB, 9 s`.

    Args:
        steps: without its seconds, and the share in steps of ten, so that a log gets few lines.
    """
    parts = [start["phase"]]
    if start["share"] is not None:
        percent = int(100 * start["share"])
        parts[0] += f" {percent // 10 * 10 if steps else percent}%"
    if start["done_bytes"] is not None:
        digits = 1 if steps else 2
        total = start.get("total_bytes")  # a former release's quota actor, at an upgrade, tells none
        of = "" if total is None else f" of {total / GB:.{digits}f}"
        parts[0] += f" {start['done_bytes'] / GB:.{digits}f}{of} GB"
    if not steps:
        parts.append(f"{start['elapsed_s']:.0f} s")
    if start["last_s"] is not None:
        parts.append(f"last start {start['last_s']:.0f} s")
    return ", ".join(parts)
