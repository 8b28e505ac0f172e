"""When a replica counts as one that takes requests and answers none; the clock is a number."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from serve_app.core.routing.silence import BASE_TOKENS, FACTOR, MIN_FRAMES, FirstFrames
from serve_app.core.times import SILENCE_FLOOR_S


def known(ttff_s: float, tokens: int = 100, frames: int = MIN_FRAMES) -> tuple[FirstFrames, float]:
    """A replica that has answered one request after the other, each after this time; and the time."""
    first_frames = FirstFrames()
    now = 0.0
    for number in range(frames):
        first_frames.on_sent(number, tokens, now)
        now += ttff_s
        first_frames.on_frame(number, now)
        first_frames.on_end(number)
    return first_frames, now


def test_a_replica_is_silent_after_several_times_what_it_used_to_take() -> None:
    for ttff_s in (1.0, 10.0):
        replica, now = known(ttff_s)
        replica.on_sent(99, 100, now)
        assert not replica.is_silent(now + FACTOR * ttff_s - 0.1)
        assert replica.is_silent(now + FACTOR * ttff_s + 0.1)


def test_a_quick_replica_may_still_stand_still_for_a_moment() -> None:
    replica, now = known(0.01)
    replica.on_sent(99, 100, now)
    assert not replica.is_silent(now + SILENCE_FLOOR_S)
    assert replica.is_silent(now + SILENCE_FLOOR_S + 0.1)


def test_a_long_prompt_and_those_before_it_have_their_time() -> None:
    replica, now = known(1.0)
    for number in range(100, 110):
        replica.on_sent(number, 10_000, now)
    explained_s = (BASE_TOKENS + 100_000) / (BASE_TOKENS + 100)
    assert not replica.is_silent(now + FACTOR * explained_s - 1.0)
    assert replica.is_silent(now + FACTOR * explained_s + 1.0)


def test_a_replica_without_history_or_without_requests_is_not_silent() -> None:
    young, now = known(0.1, frames=MIN_FRAMES - 1)
    young.on_sent(99, 100, now)
    assert not young.is_silent(now + 1e6)
    idle, now = known(0.1)
    assert not idle.is_silent(now + 1e6)
    idle.on_sent(99, 100, now)
    idle.on_end(99)  # its client has left
    assert not idle.is_silent(now + 1e6)
    assert (idle.waiting, idle.waiting_tokens) == (0, 0)


def test_a_request_that_waits_while_others_are_answered_makes_no_replica_silent() -> None:
    replica, now = known(0.1)
    replica.on_sent(1_000, 100, now)
    for number in range(100):
        replica.on_sent(number, 100, now)
        now += 1.0
        replica.on_frame(number, now)
        assert not replica.is_silent(now)
    assert replica.is_silent(now + max(SILENCE_FLOOR_S, FACTOR * 100.0))


def test_a_replica_is_silent_whoever_has_given_up_waiting_for_it() -> None:
    replica, now = known(0.1)
    begun = now
    while not replica.is_silent(now):
        replica.on_sent(int(now - begun) + 1_000, 10, now)
        replica.on_end(int(now - begun) + 999)  # the client of the one before leaves
        now += 1.0
        assert now - begun < 2 * (SILENCE_FLOOR_S + FACTOR * 0.1)


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from("sfe"), st.integers(0, 1000)), max_size=60))
def test_what_waits_is_what_was_sent_without_a_frame_or_an_end(events: list[tuple[int, str, int]]) -> None:
    replica = FirstFrames()
    waiting = dict[int, int]()
    for now, (number, kind, tokens) in enumerate(events):
        if kind == "s" and number not in waiting:
            replica.on_sent(number, tokens, float(now))
            waiting[number] = tokens
        elif kind != "s":
            (replica.on_frame if kind == "f" else lambda number, now: replica.on_end(number))(number, float(now))
            waiting.pop(number, None)
        assert (replica.waiting, replica.waiting_tokens) == (len(waiting), sum(waiting.values()))
