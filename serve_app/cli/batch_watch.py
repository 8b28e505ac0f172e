"""`serve-app batch watch`: follows a batch until it has ended.

Decides the rate of its rows, its expected end, and what is shown: a bar on a terminal, elsewhere a line a change.

Invariant: an endpoint that does not answer ends no watch, and a watch that ends changes nothing of the batch.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.text import Text

from serve_app.cli.layout import GAP, Listing, fill, say
from serve_app.core.batches import ENDED, BatchStatus
from serve_app.errors import Unavailable

RATE_WINDOW_S = 60.0  # the rate is that of the last minute: a pause is seen soon, a group of results is no peak
POLL_S = 1.0  # on a terminal
PIPED_POLL_S = 5.0  # elsewhere, where each change is a line of a log
MAX_POLL_S = 15.0  # while the endpoint is away
MAX_BAR_COLUMNS = 80
MINUTE_S = 60
HOUR_S = 3600
DAY_S = 86_400

Batch = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Sample:
    """How many rows had ended, failed ones included, at a moment in seconds."""

    at_s: float
    ended: int


@dataclass(frozen=True, slots=True)
class Forecast:
    """Rows that end in a second, and seconds until the last one has; None: not known, or never at this rate."""

    rows_per_s: float | None
    left_s: float | None


def forecast(samples: Sequence[Sample], total: int) -> Forecast:
    """The rate over the last minute, and what it means for the rest.

    Args:
        samples: the oldest first. The rate is taken from the newest one that is `RATE_WINDOW_S` older than the last
            one to the last one; if all are younger, from the first one.
        total: rows in all; 0: not known yet.
    """
    if not samples or not total:
        return Forecast(None, None)
    last = samples[-1]
    before = samples[_first_needed(samples)]
    span_s = last.at_s - before.at_s
    left = max(0, total - last.ended)
    rate = max(0, last.ended - before.ended) / span_s if span_s > 0 else None
    if not left:
        return Forecast(rate, 0.0)
    return Forecast(rate, left / rate if rate else None)


def _first_needed(samples: Sequence[Sample]) -> int:
    """The index of the sample from which the rate is taken."""
    start_s = samples[-1].at_s - RATE_WINDOW_S
    return max((index for index, one in enumerate(samples) if one.at_s <= start_s), default=0)


def counts(batch: Batch) -> tuple[int, int, int]:
    """Rows completed, failed, and in all; all 0 while they are not known."""
    found = batch.get("request_counts") or {}
    return int(found.get("completed") or 0), int(found.get("failed") or 0), int(found.get("total") or 0)


class Watch:
    """Asks for a batch again and again.

    Args:
        poll: gives the batch, or raises `Unavailable` where a later try can succeed.
        poll_s: seconds between two answers.
        clock: seconds since 1970.
    """

    def __init__(
        self,
        poll: Callable[[], dict[str, Any]],
        poll_s: float,
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._poll = poll
        self._poll_s = poll_s
        self._clock = clock
        self._sleep = sleep
        self._samples: list[Sample] = []

    def run(self, batch: dict[str, Any], display: BarDisplay | LineDisplay) -> dict[str, Any]:
        """Show a batch until it has ended; returns it then."""
        with display:
            while True:
                self._show(batch, display)
                if batch["status"] in ENDED:
                    return batch
                self._sleep(self._poll_s)
                batch = self._next(display)

    def _next(self, display: BarDisplay | LineDisplay) -> dict[str, Any]:
        began = self._clock()
        wait_s = self._poll_s
        while True:
            try:
                return self._poll()
            except Unavailable as error:
                display.away(error.message, self._clock() - began)
            self._sleep(wait_s)
            wait_s = min(MAX_POLL_S, 2 * wait_s)

    def _show(self, batch: dict[str, Any], display: BarDisplay | LineDisplay) -> None:
        now = self._clock()
        completed, failed, total = counts(batch)
        if not self._samples and batch.get("in_progress_at"):
            self._samples.append(Sample(batch["in_progress_at"], 0))  # a rate at the first look: that since it began
        self._samples.append(Sample(now, completed + failed))
        del self._samples[: _first_needed(self._samples)]
        runs = batch["status"] == BatchStatus.IN_PROGRESS  # rows that a cancel ends are no rate, nor is a look later
        display.update(batch, forecast(self._samples, total) if runs else Forecast(None, None), now)


class BarDisplay:
    """A bar on a terminal and the figures above it, which are gone at the end."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._shown: list[Text | ProgressBar] = []

    def update(self, batch: Batch, expected: Forecast, now: float) -> None:
        completed, failed, total = counts(batch)
        parts = [f"{batch['id']}: {batch['status']}"]
        parts += [f"{completed + failed:,} of {total:,} rows"] if total else []
        parts += [f"{failed:,} failed"] if failed else []
        parts += [] if expected.rows_per_s is None else [f"{expected.rows_per_s:,.1f} rows/s"]
        if expected.left_s:
            parts.append(f"ends in {duration(expected.left_s)}, {moment(now + expected.left_s)[11:16]}Z")
        self._shown = [self._lines(parts)]
        if total:
            width = min(self._console.width, MAX_BAR_COLUMNS)
            self._shown.append(ProgressBar(total=total, completed=completed + failed, width=width))
        self._live.update(Group(*self._shown), refresh=True)

    def away(self, message: str, since_s: float) -> None:
        words = f"No answer for {duration(since_s)}: {message}. The watch goes on.".split()
        note = self._lines(words, gap=" ", style="yellow")
        self._live.update(Group(*self._shown, note), refresh=True)

    def _lines(self, parts: Sequence[str], gap: str = GAP, style: str = "") -> Text:
        return Text("\n".join(fill(parts, self._console.width, gap=gap)), style=style)

    def __enter__(self) -> BarDisplay:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()


class LineDisplay:
    """A record for each change of status or counts, tab-separated, or the batch as a line of JSON; that the endpoint is
    away and back goes to `errors`."""

    def __init__(self, console: Console, errors: Console, *, as_json: bool) -> None:
        self._listing = Listing(console)
        self._out = console.file
        self._errors = errors
        self._as_json = as_json
        self._last: tuple[Any, ...] = ()
        self._away = False

    def update(self, batch: Batch, expected: Forecast, now: float) -> None:
        if self._away:
            self._away = False
            say(self._errors, f"{moment(now)} it answers again")
        completed, failed, total = counts(batch)
        state = (batch["status"], completed, failed, total)
        if state == self._last:
            return
        self._last = state
        if self._as_json:
            self._out.write(json.dumps(batch) + "\n")
        else:
            rate = "" if expected.rows_per_s is None else f"{expected.rows_per_s:.3f}"
            end = "" if expected.left_s is None else moment(now + expected.left_s)
            record = ("progress", moment(now), str(batch["id"]), *map(str, state), rate, end)
            self._listing.flow(record[1:], record)
        self._out.flush()

    def away(self, message: str, since_s: float) -> None:
        if not self._away:
            self._away = True
            say(self._errors, f"no answer: {message}; the watch goes on")

    def __enter__(self) -> LineDisplay:
        return self

    def __exit__(self, *_: object) -> None:
        """There is nothing to restore."""


def duration(seconds: float) -> str:
    """Its two largest units: `3 min 20 s`, `2 h 5 min`, `1 d 3 h`."""
    whole = round(seconds)
    for unit_s, unit, next_s, next_unit in (
        (DAY_S, "d", HOUR_S, "h"),
        (HOUR_S, "h", MINUTE_S, "min"),
        (MINUTE_S, "min", 1, "s"),
    ):
        if whole >= unit_s:
            rest = whole % unit_s // next_s
            return f"{whole // unit_s} {unit}" + (f" {rest} {next_unit}" if rest else "")
    return f"{whole} s"


def moment(at_s: float | None) -> str:
    """A time in UTC, to the second; nothing for None."""
    return "" if at_s is None else datetime.fromtimestamp(at_s, UTC).isoformat(timespec="seconds")[:19] + "Z"
