"""The book of engine starts between the controller's loop and the ledger; the clock is a number."""

from __future__ import annotations

import pytest

from autoscaling.policies import ScaleUpLimit
from autoscaling.start_book import ANYWHERE, BUNDLE_WAIT_S, NO_ANSWER, RAY_FULL_WAIT_S, StartBook
from serve_app.core.memory import Start, StartsReply, StartsRequest
from serve_app.core.times import CONTROLLER_SILENT_S, START_FRESH_S, START_WAIT_S

M = "engine-m"


@pytest.fixture
def book() -> StartBook:
    made = StartBook({M: ("m", 60), "engine-u": ("u", None)})
    made.tick((), 0.0)
    return made


def answer(book: StartBook, now: float, held: int = 0, why: str = "", known: bool = True, **places: str) -> None:
    book.record_replies(book.requests(now), [StartsReply(places, held, why, known)], now)


def test_a_start_waits_for_its_place_and_gets_it(book: StartBook) -> None:
    assert book.node_for(M, "r", ["a", "b"], 0.0) is None
    assert book.requests(0.0) == {M: StartsRequest("m", (Start("r", ("a", "b")),), requested_bytes=60)}
    answer(book, 0.1, r="a")
    assert book.node_for(M, "r", ["a", "b"], 0.1) == "a"


def test_what_is_placed_is_kept_for_until_it_has_come(book: StartBook) -> None:
    book.node_for(M, "r", ["a"], 0.0)
    answer(book, 0.1, r="a")
    book.record_placed(M, "r", 0.2)
    book.tick({"r"}, 1.0)
    assert book.requests(1.0)[M].starts == (Start("r", ("a",), placed=True),)
    book.tick((), 2.0)
    assert book.requests(2.0) == {}


def test_a_start_that_nobody_answers_is_rays(book: StartBook) -> None:
    book.node_for(M, "r", ["a"], 0.0)
    assert book.node_for(M, "r", ["a"], START_WAIT_S) is None
    assert book.node_for(M, "r", ["a"], START_WAIT_S + 0.1) == ANYWHERE


def test_an_answer_without_a_place_is_a_sign_of_life(book: StartBook) -> None:
    book.node_for(M, "r", ["a"], 0.0)
    answer(book, START_WAIT_S - 1)
    assert book.node_for(M, "r", ["a"], START_WAIT_S + 1) is None


def test_where_ray_has_no_room_its_bundle_waits_after_a_moment(book: StartBook) -> None:
    assert book.node_for(M, "r", [], 0.0) is None
    assert book.requests(0.0) == {}
    assert book.node_for(M, "r", [], RAY_FULL_WAIT_S + 0.1) == ANYWHERE


def test_a_place_where_ray_has_no_room_any_more_is_asked_for_anew(book: StartBook) -> None:
    book.node_for(M, "r", ["a", "b"], 0.0)
    answer(book, 0.1, r="a")
    assert book.node_for(M, "r", ["b"], 0.2) is None
    assert book.requests(0.2)[M].starts == (Start("r", ("b",)),)
    answer(book, 0.3, r="b")
    assert book.node_for(M, "r", ["b"], 0.4) == "b"


def test_the_policy_waits_for_the_ledgers_word_and_keeps_to_it(book: StartBook) -> None:
    assert book.scale_up_limit(M, 1, 2, ["a"], 0.0) == NO_ANSWER
    assert book.requests(0.0) == {M: StartsRequest("m", (), 2, ("a",), 60)}
    answer(book, 0.1, held=1, why="memory: none")
    assert book.scale_up_limit(M, 1, 2, ["a"], 0.2) == ScaleUpLimit(1, "memory: none")
    assert book.scale_up_limit(M, 1, 2, ["a"], 0.2 + START_FRESH_S) == NO_ANSWER


def test_known_room_is_the_ledgers_last_word_while_it_is_fresh_and_short(book: StartBook) -> None:
    assert book.known_room(M, 1, 0.0) is None
    book.scale_up_limit(M, 1, 2, ["a"], 0.0)
    asked = book.requests(0.0)
    answer(book, 0.1, held=2)
    assert book.known_room(M, 1, 0.2) is None, "there was enough for all that were asked"
    answer(book, 0.3, held=1, why="memory: none")
    assert book.known_room(M, 1, 0.4) == 1
    assert book.known_room(M, 2, 0.4) is None
    assert book.known_room(M, 1, 0.4 + START_FRESH_S) is None
    assert book.requests(0.4) == asked, "to know it reserves nothing"


def test_what_was_kept_for_a_start_counts_once(book: StartBook) -> None:
    book.scale_up_limit(M, 1, 2, ["a"], 0.0)
    answer(book, 0.1, held=1)
    assert book.scale_up_limit(M, 2, 1, ["a"], 0.2) == NO_ANSWER, "the target has risen by it"
    book.node_for(M, "r", ["a"], 0.3)
    answer(book, 0.4, held=1)
    assert book.scale_up_limit(M, 2, 1, ["a"], 0.5) == NO_ANSWER, "the start has no place yet"
    answer(book, 0.6, r="a", held=0, why="full")
    assert book.scale_up_limit(M, 2, 1, ["a"], 0.7) == ScaleUpLimit(0, "full")


def test_an_answer_to_an_earlier_target_counts_for_nothing(book: StartBook) -> None:
    book.scale_up_limit(M, 1, 1, ["a"], 0.0)
    asks = book.requests(0.0)
    book.scale_up_limit(M, 2, 1, ["a"], 0.1)
    book.record_replies(asks, [StartsReply({}, 1)], 0.2)
    assert book.scale_up_limit(M, 2, 1, ["a"], 0.3) == NO_ANSWER


def test_where_ray_has_no_room_or_nothing_is_known_the_target_is_not_held_back(book: StartBook) -> None:
    assert book.scale_up_limit(M, 1, 1, [], 0.0) is None
    assert book.scale_up_limit(M, 1, 0, ["a"], 0.0) is None
    book.scale_up_limit(M, 1, 1, ["a"], 0.0)
    answer(book, 0.1, known=False)
    assert book.scale_up_limit(M, 1, 1, ["a"], 0.2) is None


def test_bundles_that_do_not_come_are_given_up_once(book: StartBook) -> None:
    book.node_for(M, "r", ["a"], 0.0)
    answer(book, 0.1, r="a")
    assert book.node_for(M, "r", ["a"], 0.1) == "a"
    book.record_placed(M, "r", 0.1)
    assert book.overdue(BUNDLE_WAIT_S) == []
    assert book.overdue(BUNDLE_WAIT_S + 1) == ["r"]
    assert book.overdue(BUNDLE_WAIT_S + 2) == []


def test_a_controller_that_is_silent_keeps_nothing(book: StartBook) -> None:
    book.node_for(M, "r", ["a"], 0.0)
    book.scale_up_limit(M, 1, 1, ["a"], 0.0)
    assert book.requests(CONTROLLER_SILENT_S + 0.1) == {}


def test_whole_gpus_and_models_that_say_nothing_are_rays(book: StartBook) -> None:
    assert book.manages(M, {"GPU": 0.25})
    assert book.manages(M, {})
    assert not book.manages(M, {"GPU": 1.0})
    assert book.manages("engine-u", {"GPU": 0.25})
    assert not book.manages("engine-u", {"GPU": 0.0})
    assert not book.manages("Router", {"GPU": 0.0})
