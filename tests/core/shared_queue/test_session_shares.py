"""What the agent sessions of one tenant leave to the others: of a model's KV tokens, and of guaranteed shares."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.core.memory import Session, SessionRequest, session_name
from serve_app.core.queue import QueuePolicy, TenantPolicy
from serve_app.core.shared_queue.session_admission import RECALL_S
from serve_app.core.shared_queue.session_shares import session_room
from serve_app.errors import InsufficientMemory
from serve_app.types import RequestClass
from tests.core.shared_queue.world import MODEL, Req, World

LOW, NORMAL, HIGH, CRITICAL = RequestClass
# a tenth is kept for growth
TOKENS = 1000
LIMIT = 900


def world(engines: int = 1, slots: int = 4, **tenants: TenantPolicy) -> World:
    found = World(
        {f"e{number}": (slots, TOKENS) for number in range(engines)}, 1, QueuePolicy(1000, 60.0, tenants=tenants)
    )
    found.settle(6)
    return found


def ask(tenant: str, name: str, tokens: int, **more: object) -> SessionRequest:
    more = {"ttl_s": 60.0, "max_share": 0.5} | more
    return SessionRequest(session_name(tenant, name), MODEL, tokens, **more)  # type: ignore[arg-type]


def opened(there: World, tenant: str, name: str, tokens: int, **more: object) -> Session:
    """A session of which all routers have heard."""
    session = there.quota.on_open_session(ask(tenant, name, tokens, **more), there.now)
    there.settle(4)
    if session is None:
        found = there.quota.queue.session_admission.take_outcomes()[session_name(tenant, name)]
        assert isinstance(found, Session), found
        return found
    return session


def refusal(there: World, tenant: str, name: str, tokens: int, **more: object) -> str:
    with pytest.raises(InsufficientMemory) as refused:
        there.quota.on_open_session(ask(tenant, name, tokens, **more), there.now)
    return refused.value.message


# The bound of a tenant.


def test_the_sessions_of_one_tenant_hold_at_most_their_part_of_the_model() -> None:
    there = world(engines=3)  # 2,700 tokens
    for number in range(6):
        opened(there, "agents", f"s{number}", 225)
    told = refusal(there, "agents", "more", 225)
    assert "sessions of one tenant may hold 0.5 of the model's KV tokens, 0 are left of that" in told
    assert "agents " not in told
    assert opened(there, "other", "s", 225).request.tokens == 225
    assert opened(there, "agents", "s0", 225).request.tokens == 225  # renewed


def test_an_opening_above_the_bound_waits_for_a_session_of_its_own_tenant() -> None:
    there = world()
    opened(there, "agents", "s0", 400)
    opened(there, "other", "s0", 100)
    assert there.quota.on_open_session(ask("agents", "s1", 300, wait_until=there.now + 30.0), there.now) is None
    there.quota.queue.close_session("other s0", there.now)
    there.settle(2)
    assert "agents s1" not in there.quota.sessions.by_session_id
    there.quota.queue.close_session("agents s0", there.now)
    there.settle(2)
    assert "agents s1" in there.quota.sessions.by_session_id


def test_a_tenant_may_have_all_of_a_model_where_the_setting_says_so() -> None:
    assert opened(world(), "agents", "s", LIMIT, max_share=1.0).request.tokens == LIMIT


# Closed sessions whose request runs.


def open_use_and_close(there: World, tenant: str, name: str, tokens: int, **more: object) -> Req:
    """A session is opened, a request draws all of it, and it is closed; returns the request, which runs."""
    session = opened(there, tenant, name, tokens, **more)
    lease = there.routers["r0"].line.sessions[session.request.session_id].lease
    request = there.arrive("r0", NORMAL, tokens=tokens, tenant=tenant, session=lease)
    there.settle(3)
    there.quota.queue.close_session(session.request.session_id, there.now)
    there.settle(3)
    assert request.state == "runs"
    return request


def outcome(there: World, tenant: str, name: str) -> object:
    return there.quota.queue.session_admission.take_outcomes().get(session_name(tenant, name))


def test_a_tenant_that_closes_its_sessions_while_their_requests_run_stays_within_its_part() -> None:
    """By opening, drawing everything, closing, and opening again, it held 880 of 900 with a bound of a quarter."""
    there = world(slots=8)
    request = open_use_and_close(there, "agents", "s0", 220, max_share=0.25)
    assert there.quota.on_open_session(ask("agents", "s1", 220, max_share=0.25), there.now) is None
    there.wait(RECALL_S + 0.1)
    there.settle(2)
    refused = outcome(there, "agents", "s1")
    assert isinstance(refused, InsufficientMemory)
    assert "may hold 0.25 of the model's KV tokens, 5 are left of that" in refused.message
    assert opened(there, "other", "s0", 220).request.tokens == 220
    there.finish("r0", f"q{request.number}")
    there.settle(2)
    opened(there, "agents", "s1", 220, max_share=0.25)


def test_what_requests_of_closed_sessions_hold_is_not_guaranteed_to_others_again() -> None:
    there = world(slots=8, desk=TenantPolicy(share=0.5))
    open_use_and_close(there, "agents", "s0", 400, max_share=1.0)
    refusal(there, "other", "s0", 100)
    assert opened(there, "desk", "s0", 450).request.tokens == 450


def test_closed_sessions_count_in_the_number_of_a_tenants_sessions_until_their_requests_end() -> None:
    there = world(slots=8)
    request = open_use_and_close(there, "agents", "s0", 20, per_tenant=1)
    assert there.quota.on_open_session(ask("agents", "s1", 20, per_tenant=1), there.now) is None
    there.wait(RECALL_S + 0.1)
    there.settle(2)
    refused = outcome(there, "agents", "s1")
    assert isinstance(refused, InsufficientMemory)
    assert "its tenant has 1 of 1 sessions, some closed ones in use" in refused.message
    there.finish("r0", f"q{request.number}")
    there.settle(2)
    assert opened(there, "agents", "s1", 20, per_tenant=1).request.tokens == 20


def test_an_opening_that_does_not_wait_is_not_refused_because_the_end_of_a_request_comes_after_the_closing() -> None:
    there = world(slots=8)
    request = open_use_and_close(there, "agents", "s0", 450, per_tenant=1)
    assert there.quota.on_open_session(ask("agents", "s1", 450, per_tenant=1), there.now) is None
    there.finish("r0", f"q{request.number}")
    there.settle(2)
    assert isinstance(outcome(there, "agents", "s1"), Session)


def test_a_closed_session_has_after_a_crash_of_the_actor_what_its_request_held() -> None:
    there = world(slots=8)
    session = opened(there, "agents", "s0", 400)
    lease = there.routers["r0"].line.sessions[session.request.session_id].lease
    request = there.arrive("r0", NORMAL, tokens=100, tenant="agents", session=lease)
    there.settle(3)
    there.quota.queue.close_session(session.request.session_id, there.now)
    there.store()
    there.crash()
    there.engine_speaks("e0")
    there.settle(8)
    assert request.state == "runs"
    assert there.quota.ledger.lease(lease).amount == 100
    assert there.quota.sessions.held_tokens(MODEL, "agents") == 100
    there.finish("r0", f"q{request.number}")
    there.settle(4)
    assert there.quota.sessions.held_tokens(MODEL, "agents") == 0
    assert not there.quota.sessions.count_by_tenant


def test_a_session_that_is_closed_before_its_router_has_reported_keeps_its_tokens_until_then() -> None:
    """Its request's tokens were on nobody's account after a restart of the actor."""
    there = world(slots=8)
    session = opened(there, "agents", "s0", 450)
    lease = there.routers["r0"].line.sessions[session.request.session_id].lease
    request = there.arrive("r0", NORMAL, tokens=400, tenant="agents", session=lease)
    there.settle(3)
    there.store()
    there.crash()
    there.engine_speaks("e0")
    there.quota.queue.close_session(session.request.session_id, there.now)
    assert there.quota.ledger.lease(lease).amount == 450
    there.settle(6)
    assert request.state == "runs"
    assert there.quota.queue.accounts.overdrawn == 0
    assert there.quota.ledger.lease(lease).amount == 400
    there.finish("r0", f"q{request.number}")
    there.settle(4)
    assert lease not in there.quota.ledger


def test_a_closed_session_ends_with_the_request_in_its_place_whatever_else_of_it_runs() -> None:
    there = world(slots=8)
    session = opened(there, "agents", "s0", 400)
    lease = there.routers["r0"].line.sessions[session.request.session_id].lease
    first, second = (there.arrive("r0", NORMAL, tokens=tokens, tenant="agents", session=lease) for tokens in (300, 50))
    there.settle(3)
    there.quota.queue.close_session(session.request.session_id, there.now)
    assert there.quota.ledger.lease(lease).amount == there.quota.sessions.held_tokens(MODEL, "agents") == 300
    there.finish("r0", f"q{first.number}")
    there.settle(3)
    assert second.state == "runs", "it has tokens of the engine, and nothing of the session"
    assert there.quota.sessions.held_tokens(MODEL, "agents") == 0
    assert lease not in there.quota.ledger
    there.finish("r0", f"q{second.number}")
    there.settle(3)
    there.accounted()


# Guaranteed shares.


def test_sessions_get_nothing_of_what_is_guaranteed_to_another_tenant() -> None:
    there = world(desk=TenantPolicy(share=0.6))
    opened(there, "agents", "s0", 300)
    told = refusal(there, "agents", "s1", 100)
    assert "guaranteed to other tenants, 60 are left of that" in told
    assert opened(there, "desk", "s0", 450).request.tokens == 450
    opened(there, "agents", "s1", 60)
    refusal(there, "other", "s0", 50)


def test_a_critical_request_of_a_tenant_with_a_share_runs_beside_sessions_that_are_renewed_for_ever() -> None:
    there = world(engines=2, desk=TenantPolicy(share=0.5))
    number = 0
    while number < 20:
        try:
            opened(there, f"agents{number % 3}", f"s{number}", 100, max_share=1.0)
        except InsufficientMemory:
            break
        number += 1
    assert number == 9
    for _ in range(10):
        for name in list(there.quota.sessions.by_session_id):
            there.quota.sessions.renew(name, there.now)
        critical = there.arrive("r0", CRITICAL, tokens=450, tenant="desk")
        there.settle(2)
        assert critical.state == "runs"
        there.finish("r0", f"q{critical.number}")
        there.settle(2)


@given(
    held=st.dictionaries(st.sampled_from("abcd"), st.integers(1, 300)),
    shares=st.dictionaries(st.sampled_from("abcd"), st.sampled_from([0.1, 0.2, 0.25])),
    asks=st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 300)), max_size=20),
    max_share=st.sampled_from([0.3, 0.5, 1.0]),
)
def test_whoever_opens_sessions_each_guaranteed_share_stays_whole(
    held: dict[str, int], shares: dict[str, float], asks: list[tuple[str, int]], max_share: float
) -> None:
    total = 1000
    has = dict[str, int]()
    for tenant, tokens in [*held.items(), *asks]:
        room = session_room(tenant, has, shares, total, max_share)
        assert room.tokens >= 0
        if tokens <= min(room.tokens, total - sum(has.values())):
            has[tenant] = has.get(tenant, 0) + tokens
    assert all(tokens <= max_share * total for tokens in has.values())
    still_guaranteed = sum(max(0.0, share * total - has.get(tenant, 0)) for tenant, share in shares.items())
    assert total - sum(has.values()) >= still_guaranteed - 1e-6
