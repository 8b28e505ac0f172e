"""Agent sessions that are renewed for ever, and requests of others that wait for their KV tokens."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest

from serve_app.core.memory import session_name
from serve_app.core.queue import QueuePolicy, TenantPolicy
from serve_app.core.shared_queue.session_reclaim import NOTICE_S, parts_of
from serve_app.errors import LeaseNotFound
from serve_app.types import RequestClass
from tests.core.shared_queue.test_session_shares import ask, make_world, opened
from tests.core.shared_queue.world import Req, World

LOW, NORMAL, HIGH, CRITICAL = RequestClass
TOKENS = 100  # of a request
SPAN_S = 3 * NOTICE_S


def hold(world: World, count: int, tokens: int, tenant: str = "agents") -> list[str]:
    return [opened(world, tenant, f"s{n}", tokens, max_share=1.0).request.session_id for n in range(count)]


@dataclass
class Load:
    """Tenants of which so many requests always wait, of a second each; all sessions are renewed all the time."""

    world: World
    tenants: tuple[str, ...]
    depth: int = 6
    level: RequestClass = NORMAL
    reqs: list[tuple[str, Req]] = field(default_factory=list)

    def run(self, span_s: float) -> Counter[str]:
        """Requests that ended, by tenant."""
        world = self.world
        ended = Counter[str]()
        until = world.now + span_s
        while world.now < until:
            for name in world.quota.sessions.by_session_id:
                world.quota.sessions.renew(name, world.now)
            for tenant in self.tenants:
                while sum(req.state == "waits" for name, req in self.reqs if name == tenant) < self.depth:
                    self.reqs.append((tenant, world.arrive("r0", self.level, tokens=TOKENS, tenant=tenant)))
            world.settle(2)
            world.wait(1.0)
            for tenant, req in self.reqs:
                if req.state == "runs":
                    world.finish("r0", f"q{req.number}")
                    ended[tenant] += 1
        world.settle(2)
        return ended

    def leave(self) -> None:
        for _, req in self.reqs:
            if req.state in ("waits", "runs"):
                self.world.cancel("r0", f"q{req.number}")
        self.world.settle(2)


def pass_time(world: World, span_s: float, *tenants: str) -> Counter[str]:
    load = Load(world, tenants)
    ended = load.run(span_s)
    load.leave()
    return ended


def names(world: World) -> set[str]:
    return set(world.quota.sessions.by_session_id)


def test_sessions_that_are_renewed_for_ever_leave_other_tenants_over_half_of_their_rate() -> None:
    """Eight of nine requests' tokens were held by sessions of one tenant for ever: one request a second was left."""
    free = make_world(slots=9)
    alone = pass_time(free, SPAN_S, "one", "two")
    world = make_world(slots=9)
    hold(world, 8, TOKENS)
    pass_time(world, NOTICE_S + 3.0, "one", "two")
    after = pass_time(world, SPAN_S, "one", "two")
    assert len(names(world)) == 3, "a third of the model is the agents' part"
    assert after.total() > alone.total() / 2
    for tenant in ("one", "two"):
        assert after[tenant] >= alone[tenant] / 2
    for name in names(world):
        world.quota.queue.close_session(name, world.now)
    world.bring_to_rest()


def test_a_session_has_notice_and_its_agent_is_informed_why_it_ended() -> None:
    world = make_world(slots=9)
    (name,) = hold(world, 1, 850)
    assert world.quota.sessions.view(name).taken_back_at is None
    load = Load(world, ("one",))
    load.run(3.0)
    began = world.quota.sessions.renew(name, world.now).taken_back_at
    assert began is not None
    assert 0.0 < began - world.now <= NOTICE_S
    load.run(NOTICE_S)
    load.leave()
    with pytest.raises(LeaseNotFound) as gone:
        world.quota.sessions.renew(name, world.now)
    assert gone.value.code == "session_taken_back"
    assert "of whose 900 its tenant's sessions held 850" in gone.value.message
    assert "'s0'" in gone.value.message
    assert "agents" not in gone.value.message
    opened(world, "agents", "s0", 400, max_share=1.0)
    assert world.quota.sessions.renew(name, world.now).request.tokens == 400
    world.quota.queue.close_session(name, world.now)
    with pytest.raises(LeaseNotFound) as gone:
        world.quota.sessions.renew(name, world.now)
    assert gone.value.code == "session_not_found"


def test_a_notice_ends_when_nobody_else_waits_any_more() -> None:
    world = make_world(slots=9)
    (name,) = hold(world, 1, 850)
    load = Load(world, ("one",))
    load.run(NOTICE_S / 2)
    assert world.quota.sessions.view(name).taken_back_at is not None
    load.leave()
    world.wait(2.0)
    world.settle(2)
    assert world.quota.sessions.view(name).taken_back_at is None
    pass_time(world, NOTICE_S / 2, "one")
    assert name in names(world)


@pytest.mark.parametrize(("tenant", "slots"), [("agents", 9), ("one", 1)], ids=["its own requests", "slots lack"])
def test_no_session_is_taken_back_for_its_own_tenant_or_while_slots_are_what_lacks(tenant: str, slots: int) -> None:
    world = make_world(slots=slots)
    (name,) = hold(world, 1, 750)
    pass_time(world, SPAN_S, tenant)
    assert names(world) == {name}


def test_a_tenant_keeps_its_part_by_weight_or_guaranteed_share() -> None:
    for rights, kept in ((TenantPolicy(weight=2.0), 6), (TenantPolicy(share=0.7), 7)):
        world = make_world(slots=9, agents=rights)
        hold(world, 8, TOKENS)
        pass_time(world, SPAN_S, "one")
        assert len(names(world)) == kept


def test_a_session_whose_request_runs_is_taken_back_and_the_request_keeps_its_tokens() -> None:
    world = make_world(slots=9)
    (name,) = hold(world, 1, 850)
    lease = world.routers["r0"].queue.sessions[name].lease
    load = Load(world, ("one",))
    load.run(2.0)
    step = world.arrive("r0", NORMAL, tokens=50, tenant="agents", session=lease)
    world.settle(1)
    assert step.state == "runs"
    load.run(NOTICE_S + 2.0)
    assert name not in names(world)
    assert step.state == "runs"
    assert world.quota.ledger.lease(lease).amount == 50
    world.finish("r0", f"q{step.number}")
    world.settle(2)
    assert lease not in world.quota.ledger
    load.leave()
    world.bring_to_rest()


def test_a_session_that_is_never_idle_is_taken_back() -> None:
    """An agent whose next request was there before the last one had ended kept its session for ever."""
    world = make_world(slots=9)
    (name,) = hold(world, 1, 850)
    lease = world.routers["r0"].queue.sessions[name].lease
    load = Load(world, ("one", "two"), 3)
    steps = list[Req]()
    began = world.now
    while name in names(world) and world.now < began + SPAN_S:
        steps.append(world.arrive("r0", NORMAL, tokens=10, tenant="agents", session=lease))
        world.settle(2)
        for step in steps[:-1]:
            if step.state == "runs":
                world.finish("r0", f"q{step.number}")
        world.settle(2)
        assert steps[-1].state == "runs"
        load.run(1.0)
    assert NOTICE_S < world.now - began < NOTICE_S + 5.0


@pytest.mark.parametrize(("level", "kept"), [(LOW, 4), (HIGH, 4), (CRITICAL, 3)])
def test_no_session_is_taken_back_for_requests_of_a_lower_class(level: RequestClass, kept: int) -> None:
    world = make_world(slots=9)
    for number in range(4):
        opened(world, "agents", f"s{number}", 110, max_share=0.5, request_class=CRITICAL)
    load = Load(world, ("one", "two"), level=level)
    load.run(SPAN_S)
    assert len(names(world)) == kept
    load.leave()


@pytest.mark.parametrize(("level", "kept"), [(LOW, 1), (NORMAL, 0)])
def test_no_session_is_taken_back_for_an_opening_of_a_lower_class(level: RequestClass, kept: int) -> None:
    world = make_world()
    hold(world, 1, 850)
    waits = ask("other", "s0", 300, wait_until=world.now + 60.0, request_class=level)
    assert world.quota.on_open_session(waits, world.now) is None
    pass_time(world, NOTICE_S + 3.0)
    assert len(names(world) & {"agents s0"}) == kept


def test_sessions_of_lower_classes_are_taken_back_first_and_idle_ones_before_those_in_use() -> None:
    world = make_world(slots=9)
    for name, level in (("high", HIGH), ("used", LOW), ("idle", LOW)):
        opened(world, "agents", name, 280, max_share=1.0, request_class=level)
    lease = world.routers["r0"].queue.sessions["agents used"].lease
    world.arrive("r0", LOW, tokens=20, tenant="agents", session=lease)
    load = Load(world, ("one",), depth=2, level=HIGH)
    load.run(NOTICE_S + 3.0)
    assert names(world) == {"agents high", "agents used"}
    load.leave()


def test_a_session_is_taken_back_for_another_tenants_that_waits_to_be_opened() -> None:
    world = make_world()
    hold(world, 1, 850)
    waits = ask("other", "s0", 300, wait_until=world.now + 60.0)
    assert world.quota.on_open_session(waits, world.now) is None
    pass_time(world, NOTICE_S + 3.0)
    assert names(world) == {"other s0"}


def test_of_openings_that_wait_the_higher_class_is_first_and_then_who_holds_less() -> None:
    world = make_world()
    opened(world, "a", "s0", 100, max_share=1.0)
    opened(world, "b", "s0", 700, max_share=1.0)
    asks = [("a", NORMAL), ("c", LOW), ("d", NORMAL), ("e", HIGH)]
    for tenant, level in asks:
        waits = ask(tenant, "late", 150, wait_until=world.now + 60.0, request_class=level, max_share=1.0)
        assert world.quota.on_open_session(waits, world.now) is None
    world.quota.queue.close_session("b s0", world.now)
    assert [name for name in world.quota.sessions.by_session_id if name.endswith("late")] == [
        session_name(tenant, "late") for tenant in ("e", "d", "a", "c")
    ]


def test_who_holds_sessions_is_behind_who_waits_without_them() -> None:
    world = make_world(slots=1)
    opened(world, "t0", "s", 300, max_share=1.0)
    running = world.arrive("r0", NORMAL, tokens=10, tenant="another")
    world.settle(2)
    first = world.arrive("r0", NORMAL, tokens=10, tenant="t0")
    second, third = (world.arrive("r0", NORMAL, tokens=10, tenant="t1") for _ in range(2))
    for _ in range(3):
        world.settle(1)
        world.wait(1.0)
    order = []
    for _ in range(3):
        world.finish("r0", f"q{running.number}")
        world.settle(2)
        (running,) = world.routers["r0"].running.values()
        order.append(running.number)
    assert order == [second.number, third.number, first.number]


def test_a_part_is_that_of_the_weight_at_least_the_share_and_leaves_the_others_theirs() -> None:
    tenants = {"a": TenantPolicy(weight=2.0), "b": TenantPolicy(share=0.8), "idle": TenantPolicy(share=0.1)}
    policy = QueuePolicy(10, 10.0, tenants=tenants)
    assert parts_of({"a", "c"}, policy)["a"] == pytest.approx(2 / 3)
    assert parts_of({"a", "b"}, policy)["a"] == pytest.approx(0.2)
    assert parts_of({"a", "b", "c"}, policy)["b"] == 0.8
