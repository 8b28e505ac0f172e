"""A router refuses by itself whom the line would refuse, and nobody else."""

from __future__ import annotations

import copy

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from serve_app.core.queue import Arrival, QueuePolicy, RefusalReason, Refuse, TenantPolicy
from serve_app.core.shared_queue.messages import MAX_TENANTS_REPORTED, RouterMessage
from serve_app.types import RequestClass
from tests.core.shared_queue.world import MODEL, World
from tests.effort import examples

HIGH = RequestClass.HIGH
NORMAL = RequestClass.NORMAL
LOW = RequestClass.LOW
TENANTS = ("heavy", "light", "other")
WEIGHTS = QueuePolicy(max_queued=1000, max_wait_s=60.0, tenants={"other": TenantPolicy(weight=2.0)})


def measured(
    level: RequestClass, tenant: str | None = None, routers: int = 2, policy: QueuePolicy | None = None
) -> World:
    """A line of one slot in which requests of a class wait, and of which it is known that it frees a slot in 2 s."""
    world = World({"e": (1, 1000)}, routers, policy)
    world.settle(4)
    for _ in range(15):
        world.arrive("r0", level, tenant=tenant)
    for _ in range(4):
        world.settle(2)
        world.now += 1.7
        world.finish("r0", next(iter(world.routers["r0"].running)))
    world.settle(2)
    return world


def message_of(world: World, name: str) -> RouterMessage:
    """What a router has to say now."""
    found = world.routers[name].queue.next_message(world.now)
    assert found is not None
    return found


def test_figures_refuse_at_once_who_cannot_be_served_in_time() -> None:
    world = measured(NORMAL)
    before = len(world.in_transit)
    hopeless = world.arrive("r1", NORMAL, deadline_s=0.1)
    assert (hopeless.state, len(world.in_transit)) == ("refused", before)
    assert world.routers["r1"].queue.next_message(world.now) is None
    assert world.arrive("r1", NORMAL).state == "waits"


def test_a_router_that_refuses_by_figures_says_how_many_wait_of_how_many() -> None:
    world = measured(HIGH, policy=QueuePolicy(max_queued=10, max_wait_s=600.0))
    while world.quota.queue.models.by_name[MODEL].admission.waiting < 10:
        world.arrive("r0", HIGH)
        world.settle(2)
    world.settle(2)
    refused = world.routers["r1"].queue.on_arrive(MODEL, Arrival("probe", LOW, "t", 1, 10), world.now)
    assert [(one.reason, one.full) for one in refused if isinstance(one, Refuse)] == [
        (RefusalReason.QUEUE_FULL, "10 of 10 requests wait")
    ]


def test_figures_do_not_refuse_who_is_next_and_do_refuse_who_is_behind_one_of_its_own_router() -> None:
    world = measured(LOW)
    first = world.arrive("r1", NORMAL, deadline_s=0.1)
    assert first.state == "waits", "all who wait are of a lower class"
    assert world.arrive("r1", NORMAL, deadline_s=0.1).state == "refused"


def test_a_tenant_is_not_refused_for_what_another_has_waiting() -> None:
    world = measured(NORMAL, "heavy")
    assert world.arrive("r1", NORMAL, deadline_s=8.0, tenant="heavy").state == "refused", "ten of its own before it"
    light = world.arrive("r1", NORMAL, deadline_s=8.0, tenant="light")
    assert light.state == "waits", "one of each in turn"
    world.settle(1)
    assert light.state == "waits", "the line says the same"


def test_whoever_was_handed_in_meanwhile_counts_at_once_and_only_once() -> None:
    world = measured(LOW)
    states = [world.arrive("r0", NORMAL, deadline_s=7.0, tenant="light").state for _ in range(5)]
    assert states == ["waits"] * 3 + ["refused"] * 2, "2 s for each, of which some has passed"
    world.settle(1)
    assert world.arrive("r0", NORMAL, deadline_s=7.0, tenant="light").state == "refused"
    assert world.arrive("r0", NORMAL, deadline_s=9.0, tenant="light").state == "waits"


def test_an_arrival_is_answered_with_the_queue_as_it_is_then() -> None:
    world = measured(LOW)
    world.arrive("r0", NORMAL, tenant="light")
    reply = world.quota.on_exchange(message_of(world, "r0"), world.now)
    (figures,) = reply.figures
    queued = figures.classes[NORMAL]
    assert (queued.waiting, queued.backlog.slots, queued.tenant_slots) == (1, 1, {"light": 1})
    assert figures.classes[HIGH].backlog.slots_above == 0
    assert figures.classes[LOW].backlog.slots_above == 1


def test_a_request_has_no_position_before_the_actor_has_taken_it_and_what_it_refuses_never_has_one() -> None:
    world = World({"e": (1, 1000)}, 1, QueuePolicy(max_queued=1, max_wait_s=60.0))
    world.settle(4)
    router_queue = world.routers["r0"].queue
    assert world.arrive("r0", NORMAL).state == "runs"
    waits = world.arrive("r0", NORMAL)
    refused = world.arrive("r0", NORMAL)
    ids = [f"q{req.number}" for req in (waits, refused)]
    assert [router_queue.status(request_id) for request_id in ids] == [None, None]
    world.settle_one("r0")
    assert (waits.state, refused.state) == ("waits", "refused")
    found = router_queue.status(ids[0])
    assert found is not None
    assert found.position == 1


def test_while_the_actor_is_away_a_request_it_has_not_taken_has_the_position_of_its_router() -> None:
    world = World({"e": (1, 1000)}, 1)
    world.settle(4)
    router_queue = world.routers["r0"].queue
    world.arrive("r0", NORMAL)
    waits = world.arrive("r0", NORMAL)
    world.in_transit.clear()
    router_queue.on_lost(world.now)
    found = router_queue.status(f"q{waits.number}")
    assert found is not None
    assert found.position == 1


def test_an_older_answer_that_comes_late_changes_no_figures() -> None:
    world = measured(LOW)
    link = world.routers["r0"].queue.router_session
    replies = []
    for _ in range(2):
        world.arrive("r0", NORMAL, tenant="light")
        replies.append(world.quota.on_exchange(message_of(world, "r0"), world.now))
    for reply in reversed(replies):
        world.routers["r0"].queue.on_reply(reply, world.now, world.now)
        assert link.figures[MODEL].classes[NORMAL].waiting == 2


def test_figures_of_a_queue_end_with_it() -> None:
    world = measured(LOW, routers=1)
    router = world.routers["r0"]
    assert MODEL in router.queue.router_session.figures
    for request_id in list(router.requests):
        if router.requests[request_id].state == "waits":
            world.cancel("r0", request_id)
    world.settle(4)
    assert router.queue.router_session.figures == {}
    assert world.quota.queue.router_sessions.figures_by_model == {}


def test_beyond_some_tenants_a_router_asks_instead_of_refusing_by_half_of_what_counts() -> None:
    world = measured(LOW, routers=1, policy=QueuePolicy(max_queued=1000, max_wait_s=600.0))
    for number in range(MAX_TENANTS_REPORTED + 1):
        for _ in range(2):
            world.arrive("r0", NORMAL, tenant=f"n{number}")
    world.settle(2)
    assert world.routers["r0"].queue.router_session.figures[MODEL].classes[NORMAL].tenant_slots is None
    sure = world.arrive("r0", NORMAL, deadline_s=30.0, tenant="n0")
    assert sure.state == "refused", "every tenant of the others goes before a single one"
    asked = world.arrive("r0", NORMAL, deadline_s=90.0, tenant="n0")
    assert asked.state == "waits", "it may have nobody before it, for all that its router knows"
    world.settle(1)
    assert asked.state == "refused"


STEPS = st.lists(
    st.tuples(st.sampled_from((HIGH, NORMAL, LOW)), st.sampled_from(TENANTS), st.integers(1, 3), st.integers(0, 3)),
    max_size=14,
)


@settings(max_examples=examples(150), suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(STEPS, STEPS, st.sampled_from((HIGH, NORMAL, LOW)), st.sampled_from(TENANTS), st.sampled_from((0.8, 1.25)))
def test_a_router_refuses_exactly_whom_the_queue_would(
    before: list[tuple[RequestClass, str, int, int]],
    since: list[tuple[RequestClass, str, int, int]],
    level: RequestClass,
    tenant: str,
    patience: float,
) -> None:
    """One router, which knows all who come: at `patience` of the wait that the line would forecast, or beyond the
    longest wait. Between the figures and the arrival the measured rate fades by some percent, so a forecast that is
    nearer than a tenth to the longest wait is nobody's to agree about, be it the probe's or that of one before it; and
    the actor knows all only if one message had room for them."""
    world = measured(LOW, routers=1, policy=WEIGHTS)
    for number, (request_class, name, times, finished) in enumerate([*before, *since]):
        for _ in range(times):
            world.arrive("r0", request_class, tenant=name)
        if number < len(before):
            for request_id in list(world.routers["r0"].running)[:finished]:
                world.finish("r0", request_id)
            world.settle(2 if finished else 1)  # the figures after an end come with the next answer
    router_queue = world.routers["r0"].queue
    here = copy.deepcopy(router_queue)
    if router_queue.router_session.is_urgent:
        reply = world.quota.on_exchange(message_of(world, "r0"), world.now)
        assume(not any(isinstance(action, Refuse) for action in reply.actions))  # else the router counts too many
    assume(not router_queue.router_session.is_urgent)
    admission = world.quota.queue.models.by_name[MODEL].admission
    wait_s = admission.forecast.arrival_wait_s(level, 1, tenant)
    assume(wait_s is not None and wait_s > 0.5 and router_queue.router_session.figures)
    assert wait_s is not None
    assume(abs(wait_s - WEIGHTS.max_wait_s) > 0.1 * WEIGHTS.max_wait_s)
    deadline = world.now + patience * wait_s
    arrival = Arrival("probe", level, tenant, 1, 10, deadline)
    by_queue = [one for one in admission.on_arrive(arrival, world.now) if isinstance(one, Refuse)]
    by_router = here.early_refusal.refusal_reason(MODEL, arrival, world.now)
    assert by_router == (by_queue[0].reason if by_queue else None)
    assert by_router in (None, RefusalReason.DEADLINE, RefusalReason.TIMEOUT)
    if by_router is not None:
        retry_s = here.early_refusal.refusal(MODEL, arrival, by_router).retry_after_s
        assert retry_s == pytest.approx(by_queue[0].retry_after_s, rel=0.1)


def test_a_router_knows_whether_another_tenant_waits_at_any_router() -> None:
    world = World({"e": (1, 1000)}, 2)
    world.settle(4)
    world.arrive("r0", LOW, tenant="light")
    queues = [world.routers[name].queue for name in ("r0", "r1")]

    def others_wait() -> list[bool]:
        world.settle(4)
        return [queue.others_wait(MODEL, "light") for queue in queues]

    assert others_wait() == [False, False], "none waits"
    world.arrive("r0", LOW, tenant="light")
    assert others_wait() == [False, False], "its own one waits"
    assert queues[1].ahead(MODEL, LOW) == ((LOW, 1),)
    world.arrive("r0", NORMAL, tenant="heavy")
    assert others_wait() == [True, True]
    assert not queues[1].others_wait("another", "light")


def test_more_tenants_than_the_figures_name_are_others() -> None:
    world = World({"e": (1, 1000)}, 2)
    world.settle(4)
    for number in range(MAX_TENANTS_REPORTED + 2):
        world.arrive("r0", LOW, tenant=f"t{number}")
    world.settle(4)
    assert world.routers["r1"].queue.others_wait(MODEL, "t0")
