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


def make_world(engines: int = 1, slots: int = 4, **tenants: TenantPolicy) -> World:
    found = World(
        {f"e{number}": (slots, TOKENS) for number in range(engines)}, 1, QueuePolicy(1000, 60.0, tenants=tenants)
    )
    found.settle(6)
    return found


def ask(tenant: str, name: str, tokens: int, **more: object) -> SessionRequest:
    more = {"ttl_s": 60.0, "max_share": 0.5} | more
    return SessionRequest(session_name(tenant, name), MODEL, tokens, **more)  # type: ignore[arg-type]


def opened(world: World, tenant: str, name: str, tokens: int, **more: object) -> Session:
    """A session of which all routers have heard."""
    session = world.quota.on_open_session(ask(tenant, name, tokens, **more), world.now)
    world.settle(4)
    if session is None:
        found = world.quota.queue.session_admission.take_outcomes()[session_name(tenant, name)]
        assert isinstance(found, Session), found
        return found
    return session


def refusal(world: World, tenant: str, name: str, tokens: int, **more: object) -> str:
    with pytest.raises(InsufficientMemory) as refused:
        world.quota.on_open_session(ask(tenant, name, tokens, **more), world.now)
    return refused.value.message


# The bound of a tenant.


def test_the_sessions_of_one_tenant_hold_at_most_their_part_of_the_model() -> None:
    world = make_world(engines=3)  # 2,700 tokens
    for number in range(6):
        opened(world, "agents", f"s{number}", 225)
    reported = refusal(world, "agents", "more", 225)
    assert "sessions of one tenant may hold 0.5 of the model's KV tokens, 0 are left of that" in reported
    assert "agents " not in reported
    assert opened(world, "other", "s", 225).request.tokens == 225
    assert opened(world, "agents", "s0", 225).request.tokens == 225  # renewed


def test_an_opening_above_the_bound_waits_for_a_session_of_its_own_tenant() -> None:
    world = make_world()
    opened(world, "agents", "s0", 400)
    opened(world, "other", "s0", 100)
    assert world.quota.on_open_session(ask("agents", "s1", 300, wait_until=world.now + 30.0), world.now) is None
    world.quota.queue.close_session("other s0", world.now)
    world.settle(2)
    assert "agents s1" not in world.quota.sessions.by_session_id
    world.quota.queue.close_session("agents s0", world.now)
    world.settle(2)
    assert "agents s1" in world.quota.sessions.by_session_id


def test_a_tenant_may_have_all_of_a_model_where_the_setting_says_so() -> None:
    assert opened(make_world(), "agents", "s", LIMIT, max_share=1.0).request.tokens == LIMIT


# Closed sessions whose request runs.


def open_use_and_close(world: World, tenant: str, name: str, tokens: int, **more: object) -> Req:
    """A session is opened, a request draws all of it, and it is closed; returns the request, which runs."""
    session = opened(world, tenant, name, tokens, **more)
    lease = world.routers["r0"].queue.sessions[session.request.session_id].lease
    request = world.arrive("r0", NORMAL, tokens=tokens, tenant=tenant, session=lease)
    world.settle(3)
    world.quota.queue.close_session(session.request.session_id, world.now)
    world.settle(3)
    assert request.state == "runs"
    return request


def outcome(world: World, tenant: str, name: str) -> object:
    return world.quota.queue.session_admission.take_outcomes().get(session_name(tenant, name))


def test_a_tenant_that_closes_its_sessions_while_their_requests_run_stays_within_its_part() -> None:
    """By opening, drawing everything, closing, and opening again, it held 880 of 900 with a bound of a quarter."""
    world = make_world(slots=8)
    request = open_use_and_close(world, "agents", "s0", 220, max_share=0.25)
    assert world.quota.on_open_session(ask("agents", "s1", 220, max_share=0.25), world.now) is None
    world.wait(RECALL_S + 0.1)
    world.settle(2)
    refused = outcome(world, "agents", "s1")
    assert isinstance(refused, InsufficientMemory)
    assert "may hold 0.25 of the model's KV tokens, 5 are left of that" in refused.message
    assert opened(world, "other", "s0", 220).request.tokens == 220
    world.finish("r0", f"q{request.number}")
    world.settle(2)
    opened(world, "agents", "s1", 220, max_share=0.25)


def test_what_requests_of_closed_sessions_hold_is_not_guaranteed_to_others_again() -> None:
    world = make_world(slots=8, office=TenantPolicy(share=0.5))
    open_use_and_close(world, "agents", "s0", 400, max_share=1.0)
    refusal(world, "other", "s0", 100)
    assert opened(world, "office", "s0", 450).request.tokens == 450


def test_closed_sessions_count_in_the_number_of_a_tenants_sessions_until_their_requests_end() -> None:
    world = make_world(slots=8)
    request = open_use_and_close(world, "agents", "s0", 20, per_tenant=1)
    assert world.quota.on_open_session(ask("agents", "s1", 20, per_tenant=1), world.now) is None
    world.wait(RECALL_S + 0.1)
    world.settle(2)
    refused = outcome(world, "agents", "s1")
    assert isinstance(refused, InsufficientMemory)
    assert "its tenant has 1 of 1 sessions, some closed ones in use" in refused.message
    world.finish("r0", f"q{request.number}")
    world.settle(2)
    assert opened(world, "agents", "s1", 20, per_tenant=1).request.tokens == 20


def test_an_opening_that_does_not_wait_is_not_refused_because_the_end_of_a_request_comes_after_the_closing() -> None:
    world = make_world(slots=8)
    request = open_use_and_close(world, "agents", "s0", 450, per_tenant=1)
    assert world.quota.on_open_session(ask("agents", "s1", 450, per_tenant=1), world.now) is None
    world.finish("r0", f"q{request.number}")
    world.settle(2)
    assert isinstance(outcome(world, "agents", "s1"), Session)


def test_a_closed_session_has_after_a_crash_of_the_actor_what_its_request_held() -> None:
    world = make_world(slots=8)
    session = opened(world, "agents", "s0", 400)
    lease = world.routers["r0"].queue.sessions[session.request.session_id].lease
    request = world.arrive("r0", NORMAL, tokens=100, tenant="agents", session=lease)
    world.settle(3)
    world.quota.queue.close_session(session.request.session_id, world.now)
    world.store()
    world.crash()
    world.engine_speaks("e0")
    world.settle(8)
    assert request.state == "runs"
    assert world.quota.ledger.lease(lease).amount == 100
    assert world.quota.sessions.held_tokens(MODEL, "agents") == 100
    world.finish("r0", f"q{request.number}")
    world.settle(4)
    assert world.quota.sessions.held_tokens(MODEL, "agents") == 0
    assert not world.quota.sessions.count_by_tenant


def test_a_session_that_is_closed_before_its_router_has_reported_keeps_its_tokens_until_then() -> None:
    """Its request's tokens were on nobody's account after a restart of the actor."""
    world = make_world(slots=8)
    session = opened(world, "agents", "s0", 450)
    lease = world.routers["r0"].queue.sessions[session.request.session_id].lease
    request = world.arrive("r0", NORMAL, tokens=400, tenant="agents", session=lease)
    world.settle(3)
    world.store()
    world.crash()
    world.engine_speaks("e0")
    world.quota.queue.close_session(session.request.session_id, world.now)
    assert world.quota.ledger.lease(lease).amount == 450
    world.settle(6)
    assert request.state == "runs"
    assert world.quota.queue.accounts.overdrawn == 0
    assert world.quota.ledger.lease(lease).amount == 400
    world.finish("r0", f"q{request.number}")
    world.settle(4)
    assert lease not in world.quota.ledger


def test_a_closed_session_ends_with_the_request_in_its_place_whatever_else_of_it_runs() -> None:
    world = make_world(slots=8)
    session = opened(world, "agents", "s0", 400)
    lease = world.routers["r0"].queue.sessions[session.request.session_id].lease
    first, second = (world.arrive("r0", NORMAL, tokens=tokens, tenant="agents", session=lease) for tokens in (300, 50))
    world.settle(3)
    world.quota.queue.close_session(session.request.session_id, world.now)
    assert world.quota.ledger.lease(lease).amount == world.quota.sessions.held_tokens(MODEL, "agents") == 300
    world.finish("r0", f"q{first.number}")
    world.settle(3)
    assert second.state == "runs", "it has tokens of the engine, and nothing of the session"
    assert world.quota.sessions.held_tokens(MODEL, "agents") == 0
    assert lease not in world.quota.ledger
    world.finish("r0", f"q{second.number}")
    world.settle(3)
    world.accounted()


# Guaranteed shares.


def test_sessions_get_nothing_of_what_is_guaranteed_to_another_tenant() -> None:
    world = make_world(office=TenantPolicy(share=0.6))
    opened(world, "agents", "s0", 300)
    reported = refusal(world, "agents", "s1", 100)
    assert "guaranteed to other tenants, 60 are left of that" in reported
    assert opened(world, "office", "s0", 450).request.tokens == 450
    opened(world, "agents", "s1", 60)
    refusal(world, "other", "s0", 50)


def test_a_critical_request_of_a_tenant_with_a_share_runs_beside_sessions_that_are_renewed_for_ever() -> None:
    world = make_world(engines=2, office=TenantPolicy(share=0.5))
    number = 0
    while number < 20:
        try:
            opened(world, f"agents{number % 3}", f"s{number}", 100, max_share=1.0)
        except InsufficientMemory:
            break
        number += 1
    assert number == 9
    for _ in range(10):
        for name in list(world.quota.sessions.by_session_id):
            world.quota.sessions.renew(name, world.now)
        critical = world.arrive("r0", CRITICAL, tokens=450, tenant="office")
        world.settle(2)
        assert critical.state == "runs"
        world.finish("r0", f"q{critical.number}")
        world.settle(2)


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
