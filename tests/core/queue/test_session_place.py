"""The place of a session beside a queue: one request at a time, which uses nothing of the replicas."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.common.own_pools import set_replica
from serve_app.core.pools import Holder, RequestPool, TokenSpace
from serve_app.core.queue import Admission, Arrival, Grant, QueuePolicy, Refuse, SessionPlace, WaitReason
from serve_app.types import RequestClass

LOW, NORMAL, HIGH, CRITICAL = RequestClass
LEASE = "t s#1"
TOKENS = 100


def admission(slots: int = 1, **policy: float) -> Admission:
    found = Admission(QueuePolicy(max_queued=100, max_wait_s=60.0, **policy))  # type: ignore[arg-type]
    set_replica(found, "e", slots, 0.0, 1000)
    return found


def session_place(tokens: int = TOKENS) -> SessionPlace:
    return SessionPlace("e", RequestPool(LEASE, TokenSpace(tokens, tokens), 1))


def request(name: str, cost: int = 10, slots: int = 1, level: RequestClass = NORMAL) -> Arrival:
    return Arrival(name, level, "t", slots, cost, only_replica="e", session=LEASE)


def grants(actions: list[object]) -> list[tuple[str, str]]:
    """The ids that were granted, and the pools."""
    return [(one.request_id, one.pool) for one in actions if isinstance(one, Grant)]


def test_a_request_takes_the_place_whatever_waits_and_leaves_the_replica_to_the_others() -> None:
    queue = admission()
    place = session_place()
    queue.on_arrive(Arrival("first", CRITICAL, "u", 1, 10), 0.0)
    queue.on_arrive(Arrival("second", CRITICAL, "u", 1, 10), 0.0)
    found = queue.on_arrive(request("mine", level=LOW), 1.0, place=place)
    assert found == [Grant("mine", "e", 0.0, None, LEASE)]
    assert (queue.capacity.used, queue.waiting) == (1, 1)
    assert grants(queue.on_done("mine", 2.0)) == [], "its end frees nothing of the replica"
    assert grants(queue.on_done("first", 3.0)) == [("second", "e")]


def test_what_the_place_cannot_take_is_an_ordinary_request_and_takes_nothing_of_it() -> None:
    for arrival in (request("long", TOKENS + 1), request("wide", 10, slots=2)):
        place = session_place()
        assert grants(admission(2).on_arrive(arrival, 0.0, place=place)) == [(arrival.request_id, "e")]
        assert not place.pool.is_used


def test_of_two_the_second_runs_on_the_replica_or_waits_for_whichever_is_free_first() -> None:
    queue = admission()
    place = session_place()
    assert grants(queue.on_arrive(request("a"), 0.0, place=place)) == [("a", LEASE)]
    assert grants(queue.on_arrive(request("b"), 0.0, place=place)) == [("b", "e")]
    assert grants(queue.on_arrive(request("c"), 0.0, place=place)) == []
    assert grants(queue.on_arrive(request("d"), 0.0, place=place)) == []
    (granted,) = queue.on_done("a", 5.0)
    assert granted == Grant("c", "e", 5.0, WaitReason.SESSION, LEASE)
    assert isinstance(granted, Grant)
    assert granted.waited_for is WaitReason.SESSION
    assert grants(queue.on_done("b", 6.0)) == [("d", "e")]
    assert queue.queue.by_session == {}


def test_the_place_of_a_session_that_has_ended_is_granted_to_nobody() -> None:
    queue = admission()
    place = session_place()
    for name in ("a", "b", "c"):
        queue.on_arrive(request(name), 0.0, place=place)
    queue.end_session(LEASE)
    assert grants(queue.on_done("a", 1.0)) == []
    assert grants(queue.on_place_returned(LEASE, 1.0)) == []
    assert grants(queue.on_done("b", 2.0)) == [("c", "e")]


def test_a_request_whose_holder_has_ended_does_not_take_the_place() -> None:
    queue = admission()
    place = session_place()
    ended = Holder("r0")
    queue.on_arrive(request("a"), 0.0, place=place)
    queue.on_arrive(Arrival("other", NORMAL, "u", 1, 10), 0.0)
    queue.on_arrive(request("b"), 0.0, holder=ended, place=place)
    queue.on_arrive(request("c"), 0.0, place=place)
    ended.is_final = True
    assert grants(queue.on_done("a", 1.0)) == [("c", LEASE)]


def test_what_waits_behind_a_request_that_has_taken_the_place_is_served_in_the_same_event() -> None:
    """The request for which a replica was held back took the place, and a small one behind it waited for a tick."""
    queue = admission(4)
    set_replica(queue, "e", 4, 0.0, 100)
    place = session_place(80)
    other = Holder("other")
    place.take(other, 10)
    assert grants(queue.on_arrive(Arrival("big", NORMAL, "u", 1, 50), 1.0)) == [("big", "e")]
    assert grants(queue.on_arrive(request("mine", 60), 1.0, place=place)) == []
    assert grants(queue.on_arrive(Arrival("small", LOW, "u", 1, 20), 1.0)) == []
    other.release()
    assert grants(queue.on_place_returned(LEASE, 2.0)) == [("mine", LEASE), ("small", "e")]


def test_a_replica_that_is_gone_ends_what_runs_in_places_on_it() -> None:
    queue = admission()
    place = session_place()
    queue.on_arrive(request("a"), 0.0, place=place)
    queue.on_replica_gone("e", 1.0)
    assert queue.scheduler.running == queue.scheduler.in_places == {}
    assert not place.pool.is_used


def test_a_request_of_a_session_is_not_too_large_for_a_replica_that_its_place_is_on() -> None:
    queue = admission()
    set_replica(queue, "e", 1, 0.0, 50)  # it has shrunk since
    place = session_place(80)
    assert grants(queue.on_arrive(request("a", 70), 1.0, place=place)) == [("a", LEASE)]
    assert isinstance(queue.on_arrive(request("b", 90), 1.0, place=place)[-1], Refuse)


def test_use_in_the_place_is_charged_to_the_tenant_as_any_other() -> None:
    found = []
    for place in (session_place(), None):
        queue = admission(2)
        queue.on_arrive(Arrival("a", NORMAL, "t", 1, 50, prompt_tokens=20, session=LEASE), 0.0, place=place)
        queue.on_progress("a", 30, 1.0, 25)
        found.append(queue.queue.class_queues[NORMAL].tenant_queues["t"].counter)
        queue.on_done("a", 2.0, 25, 30)
        assert queue.scheduler.use == {}
        assert queue.queue.class_queues[NORMAL].running == 0
    assert found[0] == found[1] > 0


@given(
    st.lists(st.tuples(st.sampled_from(["arrive", "done", "cancel", "end"]), st.integers(0, 5), st.integers(1, 120)))
)
def test_a_place_has_at_most_one_request_and_nothing_of_it_remains(steps: list[tuple[str, int, int]]) -> None:
    queue = admission()
    place = session_place()
    now = 0.0
    is_open = True
    for action, number, cost in steps:
        now += 1.0
        name = f"q{number}"
        if action == "arrive" and name not in queue.scheduler.running and name not in queue.queue.by_id:
            queue.on_arrive(request(name, cost, level=RequestClass(number % 4)), now, place=place if is_open else None)
        elif action == "done":
            queue.on_done(name, now)
        elif action == "cancel":
            queue.on_cancel(name, now)
        elif action == "end":
            is_open = False
            queue.end_session(LEASE)
        in_places = queue.scheduler.in_places
        assert place.pool.used_slots == len(in_places) <= 1
        assert place.pool.used_tokens == sum(run.arrival.cost for run in in_places.values())
        fits = [one for one in queue.queue.by_id.values() if one.place is not None and one.cost <= TOKENS]
        assert not fits or in_places, "the place is free and a request waits that fits"
        assert queue.capacity.used == sum(run.place is None for run in queue.scheduler.running.values()) <= 1
    for name in list(queue.scheduler.running) + list(queue.queue.by_id):
        queue.on_cancel(name, now)
    for name in list(queue.scheduler.running):
        queue.on_cancel(name, now)
    assert queue.queue.by_session == queue.scheduler.in_places == queue.scheduler.use == {}
    assert not place.pool.is_used
