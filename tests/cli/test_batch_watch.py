"""`serve-app batch watch`: its rate and expected end, an endpoint that is away, what a pipe and a terminal get."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from serve_app.cli.batch_watch import (
    MAX_POLL_S,
    RATE_WINDOW_S,
    BarDisplay,
    Forecast,
    LineDisplay,
    Sample,
    Watch,
    duration,
    forecast,
)
from serve_app.errors import BadRequest, Unavailable
from tests.requires import requires

requires("linux")

CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")  # what moves a terminal's cursor
START = 1_764_100_000.0  # 2025-11-25 19:46:40 UTC


def batch(status: str, completed: int = 0, failed: int = 0, total: int = 100, **fields: Any) -> dict[str, Any]:
    rows = {"total": total, "completed": completed, "failed": failed}
    return {"id": "batch_1", "status": status, "request_counts": rows} | fields


class Clock:
    """Stands still but for the sleeps."""

    def __init__(self) -> None:
        self.now = START
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


class Shown:
    """A display that remembers."""

    def __init__(self) -> None:
        self.updates: list[tuple[str, Forecast]] = []
        self.aways: list[tuple[str, float]] = []
        self.open = False

    def update(self, batch: Any, expected: Forecast, now: float) -> None:
        assert self.open
        self.updates.append((batch["status"], expected))

    def away(self, message: str, since_s: float) -> None:
        self.aways.append((message, since_s))

    def __enter__(self) -> Shown:
        self.open = True
        return self

    def __exit__(self, *_: object) -> None:
        self.open = False


def watched(answers: Sequence[dict[str, Any] | Exception], display: Any, clock: Clock) -> dict[str, Any]:
    """The last state of a watch that gets these answers, the first of them before it begins."""
    first, *others = answers
    rest: Iterator[dict[str, Any] | Exception] = iter(others)

    def poll() -> dict[str, Any]:
        answer = next(rest)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert isinstance(first, dict)
    return Watch(poll, 1.0, clock, clock.sleep).run(first, display)


@pytest.mark.parametrize(
    ("samples", "total", "expected"),
    [
        ([], 100, Forecast(None, None)),
        ([Sample(0, 0)], 100, Forecast(None, None)),
        ([Sample(0, 0), Sample(10, 20)], 0, Forecast(None, None)),
        ([Sample(0, 0), Sample(10, 20)], 100, Forecast(2.0, 40.0)),
        ([Sample(0, 0), Sample(10, 100)], 100, Forecast(10.0, 0.0)),
        ([Sample(0, 50), Sample(10, 50)], 100, Forecast(0.0, None)),
        ([Sample(5, 0), Sample(5, 50)], 100, Forecast(None, None)),
        ([Sample(9, 0), Sample(5, 50)], 100, Forecast(None, None)),
        ([Sample(0, 50), Sample(10, 40)], 100, Forecast(0.0, None)),
    ],
    ids=[
        "nothing seen",
        "seen once",
        "still validating",
        "runs",
        "all ended",
        "stands still",
        "no time has passed",
        "the clocks differ",
        "counts that fall",
    ],
)
def test_a_forecast_is_that_of_the_rows_that_have_ended(samples: list[Sample], total: int, expected: Forecast) -> None:
    assert forecast(samples, total) == expected


def test_a_rate_is_that_of_the_last_minute() -> None:
    slow = [Sample(second, second) for second in range(600)]
    fast = [Sample(600 + second, 600 + 10 * second) for second in range(61)]
    found = forecast([*slow, *fast], 10_000)
    assert found.rows_per_s == pytest.approx(10.0)
    assert found.left_s == pytest.approx((10_000 - 1200) / 10)


def test_after_a_gap_the_rate_is_that_of_the_gap() -> None:
    """A watch that saw nothing for ten minutes does not take them for a second."""
    found = forecast([Sample(0, 0), Sample(1, 1), Sample(601, 601), Sample(602, 602)], 1000)
    assert found.rows_per_s == pytest.approx(1.0)


def test_a_watch_ends_with_the_batch() -> None:
    shown = Shown()
    clock = Clock()
    answers = [batch("validating", total=0), *(batch("in_progress", done) for done in (0, 10, 20)), batch("completed")]
    assert watched(answers, shown, clock)["status"] == "completed"
    assert [status for status, _ in shown.updates] == ["validating", *["in_progress"] * 3, "completed"]
    assert [expected.rows_per_s for _, expected in shown.updates][1:4] == [0.0, 5.0, pytest.approx(20 / 3)]
    assert clock.slept == [1.0] * 4
    assert not shown.open


def test_the_first_look_knows_the_rate_since_the_batch_began() -> None:
    shown = Shown()
    watched([batch("in_progress", 50, in_progress_at=START - 25), batch("completed", 100)], shown, Clock())
    assert shown.updates[0][1] == Forecast(2.0, 25.0)


def test_a_batch_that_ended_before_the_first_look_has_no_rate() -> None:
    shown = Shown()
    watched([batch("completed", 100, in_progress_at=START - 3600)], shown, Clock())
    assert shown.updates[0][1] == Forecast(None, None)


def test_a_long_watch_forgets_what_no_rate_needs() -> None:
    shown = Shown()
    clock = Clock()
    count = 10 * int(RATE_WINDOW_S)
    watched([*(batch("in_progress", done, total=count) for done in range(count)), batch("completed")], shown, clock)
    assert all(expected.rows_per_s == pytest.approx(1.0) for _, expected in shown.updates[1:-1])


def test_rows_that_a_cancel_ends_are_no_rate() -> None:
    shown = Shown()
    states = [batch("in_progress", 10), batch("cancelling", 12), batch("cancelled", 12, 88)]
    watched(states, shown, Clock())
    assert [expected for _, expected in shown.updates[1:]] == [Forecast(None, None)] * 2


def test_an_endpoint_that_is_away_is_asked_until_it_answers_again() -> None:
    shown = Shown()
    clock = Clock()
    away = [Unavailable("nothing answers") for _ in range(8)]
    assert watched([batch("in_progress"), *away, batch("completed", 100)], shown, clock)["status"] == "completed"
    assert [message for message, _ in shown.aways] == ["nothing answers"] * 8
    assert [since_s for _, since_s in shown.aways][:4] == [0, 1, 3, 7]
    assert clock.slept[:6] == [1, 1, 2, 4, 8, MAX_POLL_S]
    assert max(clock.slept) == MAX_POLL_S


def test_a_refusal_ends_the_watch() -> None:
    shown = Shown()
    with pytest.raises(BadRequest, match="no such batch"):
        watched([batch("in_progress"), BadRequest("no such batch")], shown, Clock())
    assert not shown.open


def piped(answers: Sequence[dict[str, Any] | Exception], *, as_json: bool = False) -> tuple[list[str], list[str]]:
    """The lines on stdout and on stderr."""
    out = io.StringIO()
    errors = io.StringIO()
    display = LineDisplay(Console(file=out), Console(file=errors, width=200), as_json=as_json)
    watched(answers, display, Clock())
    return out.getvalue().splitlines(), errors.getvalue().splitlines()


def test_in_a_pipe_each_change_is_one_line() -> None:
    answers: list[dict[str, Any] | Exception] = [
        batch("validating", total=0),
        batch("in_progress"),
        batch("in_progress"),
        batch("in_progress", 10, 2),
        Unavailable("nothing answers"),
        Unavailable("nothing answers"),
        batch("in_progress", 10, 2),
        batch("completed", 98, 2),
    ]
    lines, errors = piped(answers)
    rows = [line.split("\t") for line in lines]
    assert [row[:1] + row[2:7] for row in rows] == [
        ["progress", "batch_1", "validating", "0", "0", "0"],
        ["progress", "batch_1", "in_progress", "0", "0", "100"],
        ["progress", "batch_1", "in_progress", "10", "2", "100"],
        ["progress", "batch_1", "completed", "98", "2", "100"],
    ]
    assert rows[0][1] == "2025-11-25T19:46:40Z"
    assert rows[0][7:] == ["-", "-"]
    assert rows[2][7:] == ["4.000", "2025-11-25T19:47:05Z"]  # 12 rows in 3 s, 88 to come
    assert errors == ["no answer: nothing answers; the watch goes on", "2025-11-25T19:46:47Z it answers again"]


def test_in_a_pipe_json_is_the_batch_of_each_change() -> None:
    lines, _ = piped([batch("in_progress"), batch("in_progress"), batch("failed")], as_json=True)
    assert [json.loads(line)["status"] for line in lines] == ["in_progress", "failed"]


@pytest.mark.parametrize("width", [50, 80, 120])
def test_a_terminal_has_a_bar_with_the_figures_and_says_when_nothing_answers(width: int) -> None:
    out = io.StringIO()
    display = BarDisplay(Console(file=out, width=width, height=20, force_terminal=True, color_system=None))
    with display:
        display.update(batch("in_progress", 40, 2, 1000), Forecast(4.0, 239.5), START)
        running = out.getvalue()
        display.away("nothing answers at http://127.0.0.1:8000", 75)
    away = out.getvalue().removeprefix(running)
    figures = ("in_progress", "42 of 1,000 rows", "2 failed", "4.0 rows/s", "ends in 4 min, 19:50Z", "━")
    assert [part for part in figures if part not in running] == []
    words = " ".join(CONTROL.sub("", away).split())
    assert "No answer for 1 min 15 s: nothing answers at http://127.0.0.1:8000. The watch goes on." in words
    assert max(map(cell_len, CONTROL.sub("", running + away).replace("\r", "\n").splitlines())) <= width


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (59.4, "59 s"), (60, "1 min"), (200, "3 min 20 s"), (7500, "2 h 5 min"), (100_000, "1 d 3 h")],
)
def test_a_duration_has_two_units(seconds: float, text: str) -> None:
    assert duration(seconds) == text
