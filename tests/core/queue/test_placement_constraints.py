"""Where a request may run: constrained requests, engines with sessions on them, and engines in KV debt."""

from __future__ import annotations

import pytest

from benchmarks.common.own_pools import set_replica
from serve_app.core.queue import Action, Admission, Arrival, QueuePolicy, RefusalReason, Refuse
from serve_app.types import RequestClass
from tests.core.queue.events import CRITICAL, HIGH, LOW, NORMAL, of, where


def make_queue(min_share: float = 0.0, **engines: tuple[int, int]) -> Admission:
    made = Admission(QueuePolicy(100, 60.0, min_share=min_share))
    for engine, (slots, kv_tokens) in engines.items():
        set_replica(made, engine, slots, 0.0, kv_tokens)
    return made


def test_a_request_runs_on_its_one_engine_only_and_others_go_around_it() -> None:
    made = make_queue(a=(1, 1000), b=(1, 1000))
    assert where(made.on_arrive(of("t", "first", only_replica="b"), 0.0)) == {"first": "b"}
    assert made.on_arrive(of("t", "second", only_replica="b"), 0.0) == []
    assert where(made.on_arrive(of("t", "free"), 0.0)) == {"free": "a"}
    made.on_arrive(of("t", "third"), 0.0)
    assert where(made.on_done("free", 1.0)) == {"third": "a"}
    assert where(made.on_done("first", 2.0)) == {"second": "b"}


def test_a_request_does_not_run_where_its_router_cannot_reach() -> None:
    made = make_queue(a=(2, 1000), b=(1, 1000))
    avoiding = {"affinity": "a", "avoid_replicas": frozenset({"a"})}
    assert where(made.on_arrive(of("t", "one", **avoiding), 0.0)) == {"one": "b"}
    assert made.on_arrive(of("t", "two", **avoiding), 0.0) == []
    assert where(made.on_arrive(of("t", "anywhere"), 0.0)) == {"anywhere": "a"}
    assert where(made.on_done("one", 1.0)) == {"two": "b"}


def test_a_constrained_head_keeps_no_engine_that_it_could_not_use() -> None:
    made = make_queue(a=(4, 1000), b=(4, 1000))
    made.on_arrive(of("t", "runs", HIGH, output=890, only_replica="b"), 0.0)
    assert made.on_arrive(of("t", "large", HIGH, output=890, only_replica="b"), 0.0) == []
    assert where(made.on_arrive(of("t", "small"), 0.0)) == {"small": "a"}  # else `a` has more free, and were kept
    assert made.on_arrive(of("t", "small there", only_replica="b"), 0.0) == []  # would delay it
    assert where(made.on_done("runs", 1.0)) == {"large": "b", "small there": "b"}


def with_sessions(make_queue: Admission, replica: str, tokens: int, now: float = 0.0) -> list[Action]:
    """Sessions hold so many KV tokens of a replica from now on."""
    pool = make_queue.capacity.replicas[replica].pool
    pool.space.hold(tokens - pool.space.held)
    return make_queue.on_pool(replica, pool, now, session_kv=tokens)


@pytest.mark.parametrize("min_share", [0.0, 0.3])
def test_what_only_a_session_s_end_can_free_does_not_idle_an_engine(min_share: float) -> None:
    """Sessions hold 700 of 1,000 tokens; a `low` request of 500 held up everybody for its whole wait."""
    made = make_queue(min_share, a=(4, 1000))
    with_sessions(made, "a", 700)
    assert made.on_arrive(of("t", "large", LOW, output=490), 0.0) == []
    assert where(made.on_arrive(of("t", "low", LOW, output=90), 1.0)) == {"low": "a"}
    for number in range(20):  # what trickle the class has earned makes no difference
        name = f"critical {number}"
        assert where(made.on_arrive(of("t", name, CRITICAL, output=150), 2.0)) == {name: "a"}
        made.on_done(name, 2.0)
    assert where(with_sessions(made, "a", 0, now=3.0)) == {"large": "a"}


def test_who_waited_in_vain_for_a_session_s_end_is_notified() -> None:
    made = make_queue(a=(4, 1000))
    with_sessions(made, "a", 700)
    made.on_arrive(of("t", "large", output=490), 0.0)
    (refusal,) = made.on_tick(60.0)
    assert isinstance(refusal, Refuse)
    assert refusal.reason is RefusalReason.SESSIONS
    (refusal,) = made.on_arrive(of("t", "too large without them, too", output=1000), 60.0)
    assert isinstance(refusal, Refuse)
    assert refusal.reason is RefusalReason.TOO_LARGE


def test_a_request_for_an_engine_that_is_gone_waits_for_it() -> None:
    made = make_queue(a=(4, 1000))
    made.on_arrive(of("t", "waits", only_replica="b"), 0.0)
    made.on_arrive(of("t", "in vain", only_replica="c"), 0.0)
    assert where(set_replica(made, "b", 1, 5.0, 1000)) == {"waits": "b"}
    (refusal,) = made.on_tick(60.0)
    assert isinstance(refusal, Refuse)
    assert refusal.reason is RefusalReason.NO_REPLICA


def test_growth_of_a_class_stops_this_class_and_those_below_and_none_above() -> None:
    made = make_queue(min_share=0.3, a=(4, 1000))
    made.on_kv_debt("a", NORMAL, 0.0)
    assert made.on_arrive(of("t", "low", LOW), 0.0) == []
    assert made.on_arrive(of("t", "normal"), 0.0) == []
    for number in range(20):
        name = f"high {number}"
        assert where(made.on_arrive(of("t", name, HIGH), 0.0)) == {name: "a"}  # and no trickle for those below
        assert made.on_done(name, 0.0) == []
    assert where(set_replica(made, "b", 1, 1.0, 1000)) == {"low": "b"}  # it is owed that by now
    assert made.on_arrive(of("t", "low again", LOW), 2.0) == []
    assert where(made.on_kv_debt("a", LOW, 2.0)) == {"normal": "a"}
    assert where(made.on_arrive(of("t", "normal now"), 2.0)) == {"normal now": "a"}
    assert where(made.on_kv_debt("a", None, 3.0)) == {"low again": "a"}


def test_debt_goes_with_its_engine() -> None:
    made = make_queue(a=(4, 1000))
    made.on_kv_debt("a", CRITICAL, 0.0)
    made.on_kv_debt("unknown", CRITICAL, 0.0)
    made.on_replica_gone("a", 1.0)
    set_replica(made, "a", 4, 2.0, 1000)
    assert where(made.on_arrive(of("t", "one"), 2.0)) == {"one": "a"}
    set_replica(made, "unknown", 4, 2.0, 10_000)
    assert where(made.on_arrive(of("t", "two"), 2.0)) == {"two": "unknown"}


def test_what_another_engine_has_begun_has_a_part_of_its_answer_and_may_wait_longer() -> None:
    made = make_queue(a=(1, 1000))
    made.on_arrive(of("t", "runs"), 0.0)
    made.on_arrive(of("t", "new"), 1.0)
    made.on_arrive(of("t", "begun", fingerprint="f"), 1.0)
    assert [one.request_id for one in made.queue.begun()] == ["begun"]
    (refusal,) = made.on_tick(61.0)
    assert refusal.request_id == "new"


def test_an_arrival_of_a_release_with_fewer_fields_has_their_defaults() -> None:
    arrival = Arrival("r", RequestClass.LOW, "t", fingerprint="f", produced_tokens=3)
    state = arrival.__getstate__()  # type: ignore[no-untyped-call]
    older = Arrival.__new__(Arrival)
    older.__setstate__(state[:-1])
    assert (older.fingerprint, older.produced_tokens) == (None, 3)
