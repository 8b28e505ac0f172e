"""The bar of a map on a terminal, and the lines where there is none."""

from __future__ import annotations

import io

from rich.console import Console

from serve_app.client.map_progress import LINE_S, BarReporter, MapProgress


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def progress(done: int, waiting: int = 0, total: int | None = 2000) -> MapProgress:
    return MapProgress(done, failed=1, in_flight=3, waiting=waiting, tokens=50 * done, total=total)


def test_without_a_terminal_a_line_is_printed_from_time_to_time_and_at_the_end() -> None:
    out = io.StringIO()
    clock = Clock()
    bar = BarReporter(Console(file=out, width=20), clock)
    bar(progress(1))
    assert out.getvalue() == ""
    clock.now += LINE_S
    bar(progress(1200, waiting=2))
    bar(progress(1201))
    assert out.getvalue() == "map: 1,200 of 2,000, 1 failed, 2 refused for now, 80.0 items/s, 4,000 tokens/s\n"
    clock.now += 1
    bar(progress(1600))
    bar.close()
    bar.close()
    assert out.getvalue().splitlines()[1:] == ["map: 1,600 of 2,000, 1 failed, 100.0 items/s, 5,000 tokens/s"]


def test_a_map_that_was_never_read_prints_nothing() -> None:
    out = io.StringIO()
    BarReporter(Console(file=out), Clock()).close()
    assert out.getvalue() == ""


def test_on_a_terminal_a_bar_shows_the_last_figures() -> None:
    out = io.StringIO()
    clock = Clock()
    bar = BarReporter(Console(file=out, force_terminal=True, width=120), clock)
    clock.now += 10
    bar(progress(10, total=None))
    bar(progress(2000))
    bar.close()
    last = out.getvalue().splitlines()[-2]
    assert "2000/2000" in last
    assert "1 failed, 200.0 items/s, 10,000 tokens/s" in last
