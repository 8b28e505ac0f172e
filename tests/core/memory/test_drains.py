"""Engines that drain: since when, until when, and what is known of them; the clock is a number."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from serve_app.core.memory.drains import KEPT_S, Drains
from serve_app.core.memory.reports import DrainReport, EngineReport, Rank
from serve_app.core.times import MOVE_S

ENGINE = EngineReport("e", "m", (Rank("n"), Rank("o")), 10, 10, drain_s=60.0)


def test_an_engine_has_the_time_it_was_given_and_less_each_second() -> None:
    drains = Drains()
    assert drains.on_report(ENGINE, 0.0) is None
    drains.begin(ENGINE, "an order", 30.0)
    assert [drains.on_report(ENGINE, now) for now in (0.0, 10.0, 40.0)] == [30.0, 20.0, 0.0]
    assert drains.active() == ["e"]


@given(st.lists(st.floats(0.0, 1e6), min_size=1))
def test_a_deadline_only_comes_nearer(deadlines: list[float]) -> None:
    drains = Drains()
    for until in deadlines:
        drains.begin(ENGINE, "an order", until)
    assert drains.on_report(ENGINE, 0.0) == min(deadlines)


def test_an_engine_on_a_node_that_leaves_serves_while_there_is_time() -> None:
    """Serve may replace it elsewhere by then."""
    drains = Drains()
    drains.on_leaving_nodes({"o": 100.0})  # of its second rank
    begins = 100.0 - MOVE_S - ENGINE.drain_s
    assert drains.on_report(ENGINE, begins - 0.1) is None
    assert drains.on_report(ENGINE, begins) == ENGINE.drain_s
    assert drains.on_report(replace(ENGINE, owner="f", ranks=(Rank("p"),)), begins) is None


def test_an_engine_on_a_node_that_leaves_at_once_drains_at_once_with_what_is_left() -> None:
    drains = Drains()
    drains.on_leaving_nodes({"n": 20.0})
    assert drains.on_report(ENGINE, 0.0) == 20.0 - MOVE_S
    drains = Drains()
    drains.on_leaving_nodes({"n": MOVE_S - 1.0})
    assert drains.on_report(ENGINE, 0.0) == 0.0


def test_an_actor_that_has_just_started_learns_it_from_the_engine() -> None:
    drains = Drains()
    assert drains.on_report(replace(ENGINE, drain=DrainReport(7.0, running=2)), 0.0) == 7.0
    (drain,) = drains.all()
    assert (drain.progress.running, drain.until) == (2, 7.0)


def test_the_last_figures_of_a_drain_can_be_asked_for_after_its_end() -> None:
    drains = Drains()
    drains.begin(ENGINE, "an order", 30.0)
    drains.on_ended("e", 31.0, DrainReport(0.0, finished=4, moved=1))
    drains.keep(set(), 32.0)
    assert drains.active() == []
    (drain,) = drains.all()
    assert (drain.ended_at, drain.progress.finished, drain.progress.moved, drain.is_final) == (31.0, 4, 1, True)
    drains.on_ended("another", 31.0 + KEPT_S + 1.0)
    assert drains.all() == []


def test_an_engine_that_is_gone_without_a_word_drains_no_longer() -> None:
    drains = Drains()
    drains.begin(ENGINE, "an order", 30.0)
    drains.on_report(replace(ENGINE, drain=DrainReport(20.0, finished=3)), 10.0)
    drains.keep({"e"}, 11.0)
    assert drains.active() == ["e"]
    drains.keep(set(), 12.0)
    assert drains.active() == []
    assert drains.all()[0].progress.finished == 3
    assert not drains.all()[0].is_final, "what it ran at its end is not known"
    drains.on_ended("e", 13.0, DrainReport(0.0, finished=4))
    assert (drains.all()[0].progress.finished, drains.all()[0].is_final) == (4, True), "its last word came late"
