"""Sessions in the queue's own books: how they are opened, drawn on and ended, and what they cost everybody else."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import FrameType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.core.memory import (
    Device,
    EngineReport,
    EntryKind,
    Rank,
    Session,
    SessionRequest,
    session_name,
    tenant_session_id,
)
from serve_app.core.queue.admission import QueuePolicy
from serve_app.core.quota import RECOVERING, Quota
from serve_app.core.shared_queue.messages import (
    EngineReachability,
    GiveBack,
    Hello,
    ModelPolicy,
    RouterMessage,
)
from serve_app.core.shared_queue.session_admission import RECALL_S
from serve_app.errors import BadRequest, InsufficientMemory, LeaseConflict, LeaseNotFound, Overloaded, Unavailable
from serve_app.types import RequestClass
from tests.core.shared_queue.world import MODEL, World

LOW, NORMAL, HIGH, CRITICAL = RequestClass
# a tenth is kept for growth
TOKENS = 1000
LIMIT = 900


def make_world(engines: int = 1, routers: int = 1, slots: int = 4) -> World:
    """Engines with routers that know of them and of each other."""
    found = World({f"e{number}": (slots, TOKENS) for number in range(engines)}, routers)
    found.settle(6)
    return found


def ask(name: str, tokens: int, **more: object) -> SessionRequest:
    return SessionRequest(session_name("t0", name), MODEL, tokens, **({"ttl_s": 60.0} | more))  # type: ignore[arg-type]


def opened(world: World, name: str, tokens: int, **more: object) -> Session:
    """A session of which all routers have heard."""
    session = world.quota.on_open_session(ask(name, tokens, **more), world.now)
    world.settle(3)
    if session is None:
        session = world.quota.queue.session_admission.take_outcomes()[session_name("t0", name)]  # type: ignore[assignment]
    assert isinstance(session, Session)
    return session


def lease(world: World, name: str) -> str:
    return world.routers["r0"].queue.sessions[session_name("t0", name)].lease


# Opening


def test_a_session_has_its_tokens_and_they_are_nobody_elses() -> None:
    world = make_world()
    session = opened(world, "s", 600)
    assert (session.engine, session.request.tokens, session.request.session_id) == ("e0", 600, "t0 s")
    with pytest.raises(InsufficientMemory, match="400 KV tokens asked"):
        world.quota.on_open_session(ask("t", 400), world.now)
    assert world.quota.queue.session_admission.waiting() == []


def test_it_is_on_the_engine_with_most_tokens_free() -> None:
    world = make_world(engines=2)
    assert opened(world, "s", 600).engine != opened(world, "t", 500).engine


def test_one_that_could_never_fit_is_refused_at_once_by_name_even_if_it_would_wait() -> None:
    world = make_world()
    with pytest.raises(BadRequest, match=str(LIMIT)) as refused:
        world.quota.on_open_session(ask("s", LIMIT + 1, wait_until=world.now + 100.0), world.now)
    assert refused.value.code == "session_too_large"
    assert "t0" not in refused.value.message
    with pytest.raises(Unavailable, match="no engine of 'other'"):
        world.quota.on_open_session(replace(ask("s", 1), model="other"), world.now)


def test_credit_that_routers_keep_comes_back_for_a_session_that_would_not_wait() -> None:
    world = make_world(routers=2)
    assert world.quota.ledger.free("e0") < LIMIT, "routers have credit"
    assert world.quota.on_open_session(ask("s", LIMIT), world.now) is None
    world.settle(4)
    assert world.quota.sessions.by_session_id.get("t0 s") is not None


def test_one_that_would_not_wait_is_refused_after_the_recall_where_the_tokens_are_in_use() -> None:
    world = make_world()
    for _ in range(2):
        world.arrive("r0", LOW, tokens=300)
    world.settle(2)
    with pytest.raises(InsufficientMemory):
        world.quota.on_open_session(ask("s", 500), world.now)
    world.arrive("r0", LOW, tokens=50)
    assert world.quota.on_open_session(ask("s", 300, wait_until=world.now + RECALL_S), world.now) is None
    world.settle(20)
    (outcome,) = world.quota.queue.session_admission.take_outcomes().values()
    assert isinstance(outcome, InsufficientMemory)


def test_one_that_only_a_sessions_end_can_serve_waits_and_costs_nobody_anything() -> None:
    world = make_world()
    opened(world, "s", 600)
    world.settle(12)
    credit = world.routers["r0"].queue.accounts.credit("e0")
    word = world.quota.queue.router_sessions.state
    assert world.quota.on_open_session(ask("large", 500, wait_until=world.now + 30.0), world.now) is None
    world.settle(6)
    assert world.quota.queue.router_sessions.state == word, "nobody is told that somebody waits"
    assert world.routers["r0"].queue.accounts.credit("e0") == credit
    assert world.arrive("r0", LOW).here
    world.quota.queue.close_session("t0 s", world.now)
    world.settle(4)
    assert world.quota.sessions.by_session_id.get("t0 large") is not None


def test_an_opening_waits_as_its_class_and_its_tenant() -> None:
    world = make_world(slots=1)
    running = world.arrive("r0", NORMAL, tokens=700)
    world.settle(2)
    assert world.quota.on_open_session(ask("s", 500, wait_until=world.now + 30.0, request_class=LOW), world.now) is None
    higher = world.arrive("r0", HIGH, tokens=600)
    world.settle(2)
    world.finish("r0", f"q{running.number}")
    world.settle(4)
    assert higher.state == "runs"
    assert world.quota.sessions.by_session_id.get("t0 s") is None
    world.finish("r0", f"q{higher.number}")
    world.settle(4)
    assert world.quota.sessions.by_session_id.get("t0 s") is not None
    world.quota.queue.close_session("t0 s", world.now)
    world.bring_to_rest()


def test_two_that_are_granted_in_the_same_moment_both_have_their_tokens() -> None:
    world = make_world()
    running = world.arrive("r0", NORMAL, tokens=900)
    world.settle(2)
    for name in ("a", "b"):
        assert world.quota.on_open_session(ask(name, 400, wait_until=world.now + 30.0), world.now) is None
    behind = world.arrive("r0", LOW, tokens=300)
    world.settle(2)
    world.finish("r0", f"q{running.number}")
    world.settle(2)
    assert [world.quota.sessions.by_session_id.get(f"t0 {name}") is not None for name in ("a", "b")] == [True, True]
    assert behind.state == "waits"
    for name in ("a", "b"):
        world.quota.queue.close_session(f"t0 {name}", world.now)
    world.bring_to_rest()


def test_an_engine_takes_no_more_sessions_than_it_has_places_beside_its_queue() -> None:
    world = make_world()
    for number in range(2):
        opened(world, f"s{number}", 10, per_engine=2)
    with pytest.raises(InsufficientMemory, match="2 sessions are open there, 2 at most"):
        world.quota.on_open_session(ask("s2", 10, per_engine=2), world.now)
    assert world.quota.on_open_session(ask("s2", 10, per_engine=2, wait_until=world.now + 10.0), world.now) is None
    world.quota.queue.close_session("t0 s0", world.now)
    assert world.quota.sessions.by_session_id.get("t0 s2") is not None


def test_a_tenant_has_no_more_sessions_than_it_may_and_keeps_nobody_else_from_his() -> None:
    world = make_world()
    for number in range(2):
        opened(world, f"s{number}", 10, per_tenant=2)
    with pytest.raises(Overloaded) as refused:
        world.quota.on_open_session(ask("s2", 10, per_tenant=2), world.now)
    assert refused.value.code == "too_many_sessions"
    other = replace(ask("s2", 10, per_tenant=2), session_id=session_name("another t0", "s2"))
    assert world.quota.on_open_session(other, world.now) is not None
    assert opened(world, "s1", 10, per_tenant=2).request.tokens == 10  # the same again


def test_the_same_ask_again_is_the_same_session_and_another_is_a_conflict() -> None:
    world = make_world()
    first = opened(world, "s", 100)
    assert opened(world, "s", 100).expires_at > first.expires_at
    assert len(world.quota.sessions.by_session_id.values()) == 1
    with pytest.raises(LeaseConflict, match="open with 100 KV tokens"):
        world.quota.on_open_session(ask("s", 200), world.now)


def test_nothing_is_reserved_until_all_routers_have_reported_what_they_hold() -> None:
    world = make_world()
    before = opened(world, "s", 100, requested_size="0.1 GB", granted_bytes=77)
    world.crash()
    for name in world.reports:
        world.engine_speaks(name)
    with pytest.raises(Unavailable) as early:
        world.quota.on_open_session(ask("t", 100), world.now)
    assert early.value.code == RECOVERING
    assert replace(world.quota.sessions.view("t0 s"), expires_at=before.expires_at) == before
    world.settle(6)
    assert world.quota.on_open_session(ask("t", 100), world.now) is not None


@pytest.mark.parametrize(("tokens", "ttl_s"), [(0, 1.0), (1, 0.0)])
def test_an_ask_that_makes_no_sense_is_refused(tokens: int, ttl_s: float) -> None:
    with pytest.raises(ValueError, match="session 't0 s'"):
        ask("s", tokens, ttl_s=ttl_s)


def test_while_the_actor_is_away_a_request_runs_on_its_sessions_engine_while_there_is_credit_and_holds_up_nobody() -> (
    None
):
    world = make_world(engines=2)
    pool = opened(world, "s", 100).engine
    world.give_up("r0")
    steps = [world.arrive("r0", NORMAL, tokens=10, session=lease(world, "s")) for _ in range(3)]
    other = "e0" if pool == "e1" else "e1"
    assert [(one.state, one.engine) for one in steps] == [("runs", pool), ("runs", pool), ("runs", other)]
    assert world.arrive("r0", NORMAL, tokens=10).state == "runs"
    world.bring_to_rest()


def test_while_the_actor_is_away_a_request_whose_sessions_engine_is_gone_runs_anywhere() -> None:
    world = make_world(engines=2)
    pool = opened(world, "s", 100).engine
    world.give_up("r0")
    world.end_engine(pool)
    world.notice("r0")
    step = world.arrive("r0", NORMAL, tokens=10, session=lease(world, "s"))
    assert step.state == "runs"
    assert step.engine != pool
    world.bring_to_rest()


def test_an_opener_is_answered_when_the_routers_know_the_session() -> None:
    world = make_world(routers=2)
    world.quota.on_open_session(ask("s", 10), world.now)
    received = world.quota.queue.router_sessions.acknowledgement_check()
    world.settle_one("r0")
    assert not received()
    world.settle(2)
    assert received()


# Ending


def test_use_renews_a_session_and_silence_ends_it() -> None:
    world = make_world()
    opened(world, "s", 100, ttl_s=3.0)
    for _ in range(4):
        step = world.arrive("r0", NORMAL, tokens=10, session=lease(world, "s"))
        world.settle(8)
        world.finish("r0", f"q{step.number}")
    assert world.quota.sessions.by_session_id.get("t0 s") is not None
    long = world.arrive("r0", NORMAL, tokens=10, session=lease(world, "s"))
    world.settle(40)
    assert world.quota.sessions.by_session_id.get("t0 s") is not None, "a request of it runs"
    world.finish("r0", f"q{long.number}")
    world.settle(40)
    with pytest.raises(LeaseNotFound) as gone:
        world.quota.sessions.renew("t0 s", world.now)
    assert (gone.value.code, "t0" in gone.value.message) == ("session_not_found", False)


def test_a_closed_session_keeps_what_its_requests_hold_until_they_end() -> None:
    world = make_world()
    opened(world, "s", 600)
    step = world.arrive("r0", NORMAL, tokens=200, session=lease(world, "s"))
    world.settle(1)
    before = lease(world, "s")
    world.quota.queue.close_session("t0 s", world.now)
    with pytest.raises(LeaseNotFound):
        world.quota.sessions.view("t0 s")
    assert world.quota.ledger.lease(before).amount == 200
    assert opened(world, "s", 300).request.tokens == 300
    world.finish("r0", f"q{step.number}")
    world.settle(2)
    assert before not in world.quota.ledger
    world.bring_to_rest()


def test_a_closed_session_that_falls_silent_is_ended_once() -> None:
    world = make_world()
    opened(world, "s", 600, ttl_s=2.0)
    world.arrive("r0", NORMAL, tokens=200, session=lease(world, "s"))
    world.settle(1)
    before = lease(world, "s")
    world.quota.queue.close_session("t0 s", world.now)
    assert before in [one.lease_id for one in world.quota.ledger.expire(world.now + 2.5)]
    assert "e0" in world.quota.ledger, "of which the engine is not silent"
    assert world.quota.sessions.end_unused() == []
    world.quota.sessions.forget(before)
    assert world.quota.sessions.end_unused() == []


def test_a_session_ends_with_its_engine_and_its_waiting_requests_go_on_as_any_other() -> None:
    world = make_world(engines=2, slots=1)
    pool = opened(world, "s", 100).engine
    held = [world.arrive("r0", NORMAL, tokens=10) for _ in range(2)]
    world.settle(2)
    first, second = (world.arrive("r0", NORMAL, tokens=60, session=lease(world, "s")) for _ in range(2))
    world.settle(1)
    assert (first.state, second.state) == ("runs", "waits")
    world.end_engine(pool)
    world.notice("r0")
    for name in held:
        if name.engine != pool and name.engine:
            world.finish("r0", f"q{name.number}")
    world.settle(6)
    assert second.state == "runs"
    assert second.engine != pool
    assert world.routers["r0"].queue.sessions == {}
    assert not any(kind is EntryKind.SESSION for kind, _ in world.stored)


# What it costs


def calls_of_an_exchange(waits: bool) -> int:
    """Function calls of 20 routers' exchanges, one each, with 200 engines."""
    quota = Quota(1, {}, 0.0)
    quota.on_devices([Device("n", number, 100, 0) for number in range(200)], 0.0)
    for number in range(200):
        report = EngineReport(f"e{number}", MODEL, (Rank("n", number),), 100, 100, slots=4, measures=False)
        holds = quota.on_engine(report, 0.0).holds
        quota.on_engine(replace(report, holds=holds, kv_tokens=TOKENS, kv_bytes=1), 0.0)
    reaches = [EngineReachability(MODEL, f"e{number}", True) for number in range(200)]
    for router in range(20):
        begin = (Hello(()), ModelPolicy(MODEL, QueuePolicy(max_queued=10, max_wait_s=60.0)), *reaches)
        quota.on_exchange(RouterMessage(f"r{router}", 1, 1, 1, begin, 0, 0), 0.0)
    for number in range(200):
        quota.on_open_session(ask(f"s{number}", LIMIT), 0.0)
    if waits:
        assert quota.on_open_session(ask("waits", 10, wait_until=60.0), 0.0) is None
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    for seq in (1, 2):  # the second: what the session's coming has changed is told
        calls = 0
        for router in range(20):
            report = RouterMessage(f"r{router}", 1, 1, len(reaches) + 2 + seq, (GiveBack("e0", 0, 0),), 0, 0)
            sys.setprofile(count)
            try:
                quota.on_exchange(report, 0.001 * seq)
            finally:
                sys.setprofile(None)
    return calls


def test_a_session_that_waits_makes_no_exchange_dearer() -> None:
    """An exchange that looks at every engine calls something for each."""
    without = calls_of_an_exchange(waits=False)
    beside = calls_of_an_exchange(waits=True)
    assert beside < without + 20 * 200 / 4


# Names and sizes


@given(
    tenants=st.lists(st.text(min_size=1), min_size=2, max_size=2),
    ids=st.lists(st.from_regex(r"[!-~]+", fullmatch=True), min_size=2, max_size=2),
)
def test_no_two_tenants_ids_are_the_same_session(tenants: list[str], ids: list[str]) -> None:
    first, second = (session_name(tenant, own) for tenant, own in zip(tenants, ids, strict=True))
    assert (first == second) == (tenants[0] == tenants[1] and ids[0] == ids[1])
    assert [tenant_session_id(first), tenant_session_id(second)] == ids
