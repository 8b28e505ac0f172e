"""Slots kept free for the classes from `high` up: whom that helps, what it costs, and that nobody starves of it."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.core.admission import Action, Admission, Grant, Policy
from serve_app.core.waiting.headroom import kept
from serve_app.types import RequestClass
from tests.core.admission_line import CRITICAL, HIGH, LOW, NORMAL, arrival, arrive, where

SLOTS = 8
LONG_S = 600.0  # many fade times: what was granted before is forgotten


def line(share: float = 0.25, slots: int = SLOTS, trickle: float = 0.0) -> Admission:
    made = Admission(Policy(1000, 3600.0, lift_after_s=(3600.0,) * 3, trickle_share=trickle, headroom_share=share))
    made.on_replica("r", slots, 0.0)
    return made


def names(prefix: str, count: int) -> list[str]:
    return [f"{prefix}{n}" for n in range(count)]


def granted(actions: Iterable[Action]) -> list[str]:
    return [action.request_id for action in actions if isinstance(action, Grant)]


def test_while_high_comes_its_slots_stay_free_for_it() -> None:
    made = line()
    arrive(made, "h0", "h1", cls=HIGH)
    for name in ("h0", "h1"):
        made.on_done(name, 0.1)
    assert len(granted(arrive(made, *names("n", 20), now=0.2))) == SLOTS - 2
    assert granted(arrive(made, "h2", "h3", cls=HIGH, now=0.3)) == ["h2", "h3"]
    assert made.waiting == 14


def test_nothing_is_kept_where_high_does_not_come() -> None:
    made = line()
    assert len(granted(arrive(made, *names("n", 20)))) == SLOTS


def test_what_was_kept_is_given_out_once_high_stays_away() -> None:
    made = line()
    arrive(made, "h0", "h1", cls=HIGH)
    made.on_done("h0", 0.1)
    made.on_done("h1", 0.1)
    arrive(made, *names("n", 20), now=0.2)
    assert len(granted(made.on_done("n0", LONG_S))) == 3  # its own slot and the two


def test_critical_counts_as_high_and_may_take_what_is_kept() -> None:
    made = line()
    arrive(made, "c0", "c1", cls=CRITICAL)
    made.on_done("c0", 0.1)
    made.on_done("c1", 0.1)
    arrive(made, *names("l", 20), cls=LOW, now=0.2)
    assert granted(arrive(made, "h", "c", cls=HIGH, now=0.3)) == ["h", "c"]


def test_off_by_default() -> None:
    made = line(share=Policy(1, 1.0).headroom_share)
    arrive(made, "h0", cls=HIGH)
    made.on_done("h0", 0.1)
    assert len(granted(arrive(made, *names("n", 20), now=0.2))) == SLOTS


def test_a_replica_too_small_for_it_keeps_nothing() -> None:
    made = line(share=0.5, slots=1)
    arrive(made, "h0", cls=HIGH)
    made.on_done("h0", 0.1)
    assert where(arrive(made, "n", now=0.2)) == {"n": "r"}


def test_a_request_of_all_slots_still_runs() -> None:
    made = line(share=0.5)
    arrive(made, *names("h", 4), cls=HIGH)
    arrive(made, "whole", slots=SLOTS, now=0.1)
    actions = [action for name in names("h", 4) for action in made.on_done(name, 0.2)]
    assert where(actions) == {"whole": "r"}


def test_the_trickle_goes_into_it() -> None:
    """High has all slots but those that are kept, for ever, and never waits: only the trickle lets `low` run."""

    def served(trickle: float) -> int:
        made, taken = line(trickle=trickle), 0
        arrive(made, *names("h", SLOTS - 1), cls=HIGH)
        waiting = set(names("l", 10))
        arrive(made, *sorted(waiting), cls=LOW)
        for n in range(100):
            actions = arrive(made, f"h{n + SLOTS - 1}", cls=HIGH, now=0.1 * n)
            for name in granted([*actions, *made.on_done(f"h{n}", 0.1 * n)]):
                if name in waiting:
                    waiting.remove(name)
                    taken += 1
                    made.on_done(name, 0.1 * n)
        return taken

    assert served(trickle=0.0) == 0
    assert served(trickle=0.05) >= 4


def test_who_comes_below_it_is_told_a_wait() -> None:
    made = line()
    arrive(made, "h0", "h1", cls=HIGH)
    made.on_done("h0", 1.0)
    made.on_done("h1", 1.0)
    arrive(made, *names("n", SLOTS - 2), now=1.0)
    assert made.predicted_wait_s(HIGH) == 0.0
    assert (made.predicted_wait_s(NORMAL) or 0.0) > 0.0


@pytest.mark.parametrize("share", [-0.1, 0.51, float("nan")])
def test_a_share_out_of_range_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match="headroom_share"):
        Policy(1, 1.0, headroom_share=share)


@given(st.floats(0, 0.5), st.integers(0, 500), st.floats(0, 1e4))
def test_it_is_never_all_there_is_and_never_more_than_came(share: float, slots: int, lately: float) -> None:
    found = kept(share, slots, lately)
    assert 0 <= found <= lately + 0.5
    assert found < max(1, slots)


Step = tuple[RequestClass, int, bool]


@settings(max_examples=200)
@given(st.lists(st.tuples(st.sampled_from(RequestClass), st.integers(1, 4), st.booleans()), max_size=60))
def test_everybody_runs_in_the_end_whatever_is_kept(steps: list[Step]) -> None:
    made, running, done, now = line(share=0.5, trickle=0.05), [], set[str](), 0.0
    for number, (cls, slots, ends) in enumerate(steps):
        now += 0.01
        running += granted(made.on_arrive(arrival(f"r{number}", cls, slots), now))
        if ends and running:
            done.add(running[0])
            running += granted(made.on_done(running.pop(0), now))
    while running:
        now += 0.01
        done.add(running[0])
        running += granted(made.on_done(running.pop(0), now))
    assert made.waiting == 0
    assert done == {f"r{number}" for number in range(len(steps))}
