"""The page stands alone and escapes what it shows; the picture can be drawn."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from serve_app.cli.simulate import page
from serve_app.cli.simulate.panels import Panel, bars, panels, time_ticks, value_ticks
from tests.cli.simulate.pictured import arm, comparison

ARMS = [arm(f"arm {number}", number, 1.0, 1.0) for number in range(8)]


def test_the_page_has_nothing_from_elsewhere_and_no_script() -> None:
    text = page(comparison(*ARMS))
    assert not re.search(r"https?://|//\w|url\(|@import|<script|<link|<img|\ssrc=|\shref=", text)
    assert "prefers-color-scheme: dark" in text
    assert "width=device-width" in text


def test_what_the_page_shows_is_escaped() -> None:
    text = page(comparison(arm("<i>one</i>", 1.0, 1.0, 1.0)))
    assert "a&lt;b&gt;.csv" in text
    assert "a note &lt;about&gt; it" in text
    assert "&lt;i&gt;one" in text
    assert not re.search(r"<b>\.csv|<about>|<i>one", text)


def test_every_arm_has_a_line_in_each_chart_and_a_bar() -> None:
    found = comparison(*ARMS)
    arrivals, replicas, high, normal = panels(found)
    assert [line.name for line in arrivals.lines] == ["high", "normal"]
    for panel in (replicas, high, normal):
        assert [line.name for line in panel.lines] == [one.name for one in ARMS]
    assert [line.is_dashed for line in replicas.lines] == [False] * 6 + [True] * 2
    assert high.levels == (2.0,)
    title, costs = bars(found)
    assert (title, len(costs)) == ("Cost", 8)
    assert bars(comparison(arm("a", 0.0, 1.0, 1.0)))[0] == "GPU hours"


def test_a_step_without_a_first_token_is_a_gap() -> None:
    text = page(comparison(ARMS[0]))
    (line,) = re.findall(r"First token of high.*?class='line s0' d='([^']*)'", text, re.DOTALL)
    assert line.count("M") == 2


@pytest.mark.parametrize("value", [0.0, 0.004, 1.0, 7.3, 12_345.0])
def test_an_axis_holds_its_values_and_has_a_few_ticks(value: float) -> None:
    for is_log in (False, True):
        found = panels(comparison(ARMS[0]))[1]
        line = found.lines[0]
        panel = Panel("t", "u", 10.0, 10.0, (type(line)("a", 0, [value]),), is_log=is_log)
        low, high = panel.bounds
        assert value <= high
        assert low <= value or is_log
        assert 2 <= len(value_ticks(panel)) <= 7


@pytest.mark.parametrize(
    ("span_s", "names"),
    [(3.0, ["0", "1 s", "2 s", "3 s"]), (7200.0, ["0", "20 min", "40 min", "1 h", "1 h 20 min", "1 h 40 min", "2 h"])],
)
def test_an_axis_of_time_has_round_moments(span_s: float, names: list[str]) -> None:
    assert [name for _, name in time_ticks(span_s)] == names
    assert all(2 <= len(time_ticks(span)) <= 8 for span in (5.0, 61.0, 5000.0, 86_400.0, 3e6))


def test_the_picture_is_written(tmp_path: Path) -> None:
    from serve_app.cli.simulate import plot

    plot.draw(comparison(*ARMS[:2]), tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
