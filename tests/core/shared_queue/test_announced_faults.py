"""Running requests that are announced: whatever ends or returns around them, every count stays as it was."""

from __future__ import annotations

from collections import Counter

import pytest

from serve_app.core.memory import SESSIONS_OWNER
from serve_app.core.queue import QueuePolicy
from serve_app.core.shared_queue import delivery
from serve_app.core.shared_queue.messages import Done
from serve_app.types import RequestClass
from tests.core.shared_queue.test_faults import connected
from tests.core.shared_queue.world import MODEL, World

LOW, NORMAL, HIGH, CRITICAL = RequestClass


def make_world(engines: dict[str, tuple[int, int]], routers: int = 1, policy: QueuePolicy | None = None) -> World:
    found = World(engines, routers) if policy is None else World(engines, routers, policy)
    found.settle(8)
    return found


def end_session(world: World, name: str) -> None:
    """The actor ends a router's session, which begins anew."""
    world.quota.queue.applied.unsure.add(name)
    world.settle(6)


def test_a_burst_after_short_answers_on_credit_is_not_refused_for_a_forecast_that_measured_their_announcements() -> (
    None
):
    """Answers of 20 ms seemed to last half a second, as their begins and ends are told: 256 of 300 were refused."""
    world = make_world({"e": (16, 10_000)})
    router = world.routers["r0"]
    for step in range(400):
        first = world.arrive("r0", NORMAL, tokens=50)
        world.now += 0.02
        world.finish("r0", f"q{first.number}")
        if step % 20 == 0:
            world.settle(1)
    burst = [world.arrive("r0", NORMAL, tokens=50, deadline_s=2.0) for _ in range(100)]
    for _ in range(20):
        world.settle_one("r0")
        for name in list(router.running):
            world.finish("r0", name)
    assert [one.state for one in burst] == ["done"] * 100


def test_requests_on_credit_use_all_engines_on_which_there_is_credit() -> None:
    world = make_world({"e0": (16, 10_000), "e1": (16, 10_000)})
    used = Counter[str]()
    for number in range(60):
        first = world.arrive("r0", NORMAL, tokens=50)
        used[first.engine] += 1
        world.finish("r0", f"q{first.number}")
        if number % 5 == 4:
            world.settle(1)
    assert min(used["e0"], used["e1"]) > 20


def test_an_engine_that_returns_does_not_wait_for_a_report_of_the_openings_of_sessions() -> None:
    world = make_world({"e": (4, 1000)}, 2)
    world.quota.queue.accounts.charge(SESSIONS_OWNER, "e", 1, 14)  # as in the moment of a granted opening
    world.quota.queue.drop_engine("e", world.now)
    world.settle(10)
    first = world.arrive("r0", NORMAL)
    world.settle(6)
    assert first.state == "runs"
    world.bring_to_rest()


def test_the_requests_of_a_router_whose_account_is_empty_end_with_their_engine_too() -> None:
    world = make_world({"e": (2, 100)}, 2)
    first = [world.arrive("r0", NORMAL, tokens=10) for _ in range(2)]
    world.settle(2)
    second = [world.arrive("r1", NORMAL, tokens=30) for _ in range(2)]
    for _ in range(80):
        world.settle_one("r1")  # the other one is silent, and its account is granted anew
        world.wait(0.2)
        if all(one.state == "runs" for one in second):
            break
    world.routers["r1"].queue.in_flight.grow(f"q{second[0].number}", 40, world.now)
    for _ in range(2):
        world.settle_one("r1")
    world.settle(4)
    assert [one.state for one in (*first, *second)] == ["runs"] * 4
    world.end_engine("e")
    world.check_books()
    assert world.quota.queue.requests.by_ticket == {}


def test_an_end_as_the_release_before_says_it_returns_what_the_request_has_grown_by() -> None:
    world = connected(slots=4, routers=1)
    for _ in range(4):
        world.arrive("r0", NORMAL, tokens=50)
    world.settle(1)
    router_queue = world.routers["r0"].queue
    name, run = next((one, run) for one, run in router_queue.in_flight.running.items() if not run.on_credit)
    before = world.quota.queue.accounts.account("r0", "e")
    router_queue.router_session.takes_begun = False  # then it grows by the actor's grants alone
    router_queue.in_flight.grow(name, 200, world.now)
    sent = world.routers["r0"].queue.next_message(world.now)
    assert sent is not None
    world.quota.on_exchange(sent, world.now)
    assert world.quota.queue.accounts.account("r0", "e") == (before[0], before[1] + 200)
    world.quota.queue.requests.done("r0", Done(run.ticket, 5, 5), world.now)
    after = world.quota.queue.accounts.account("r0", "e")
    assert after == (before[0] - 1, before[1] - 50)


def test_a_session_begins_however_many_requests_lack_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two events of each were more than may be unacknowledged: each message began another incarnation, for ever."""
    monkeypatch.setattr("serve_app.core.shared_queue.delivery.MAX_UNACKED_EVENTS", 20)
    assert delivery.MAX_UNACKED_EVENTS == 20
    world = make_world({"e": (100, 1000)})
    for _ in range(40):
        world.arrive("r0", NORMAL, tokens=10)
        world.settle(1)
    router_queue = world.routers["r0"].queue
    for name in list(router_queue.in_flight.running):
        router_queue.in_flight.grow(name, 1000, world.now)
        world.settle(1)
    end_session(world, "r0")
    assert not router_queue.alone
    assert len(world.quota.queue.requests.by_ticket) == 40


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_tenant_pays_once_for_a_request_that_outlives_an_incarnation_unannounced(is_lost: bool) -> None:
    world = make_world({"e": (8, 100_000)})
    router = world.routers["r0"]
    world.arrive("r0", NORMAL, tokens=50, tenant="other")  # its class is not idle
    world.settle(2)
    first = world.arrive("r0", NORMAL, tokens=1100, tenant="a")
    if not is_lost:
        world.settle(2)
    router.queue.in_flight.progress(f"q{first.number}", 1000, 100)
    if is_lost:
        world.speak("r0", beat=True)
        world.in_transit.clear()  # and with it the announcement
    else:
        world.settle(2)
    router.queue.begin_incarnation(router.queue.router_session.epoch, world.now)
    if is_lost:
        world.settle(3)
    router.running.pop(f"q{first.number}").state = "done"
    router.queue.on_done(f"q{first.number}", world.now, 100, 1000)
    world.settle(4)
    queue = world.quota.queue.models.by_name[MODEL].admission.queue
    assert queue.class_queues[NORMAL].tenant_queues["a"].counter == 100 + 2 * 1000


def test_a_request_that_was_due_by_the_minimum_share_is_not_stopped_after_its_session_has_ended_either() -> None:
    world = make_world({"e": (1, 10_000)}, policy=QueuePolicy(max_queued=1000, max_wait_s=60.0, min_share=0.2))
    router = world.routers["r0"]
    world.arrive("r0", HIGH, tokens=50)
    world.settle(1)
    world.preemptible = True
    low = world.arrive("r0", LOW, tokens=50)
    world.preemptible = False
    for _ in range(25):
        world.arrive("r0", HIGH, tokens=50)
    for _ in range(30):
        world.settle(1)
        if low.state == "runs":
            break
        for name in list(router.running):
            world.finish("r0", name)
    assert low.state == "runs"
    world.wait(1.0)
    end_session(world, "r0")
    assert low.stops == 0
