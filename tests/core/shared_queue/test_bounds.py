"""What a router says and keeps is bounded, however much waits and runs there."""

from __future__ import annotations

from collections import Counter

import pytest

from serve_app.core.queue import Arrival, Refuse
from serve_app.core.queue.admission import QueuePolicy
from serve_app.core.shared_queue.delivery import ARRIVAL_WINDOW, BATCH, WINDOW
from serve_app.core.shared_queue.messages import StatusRequest, TokenProgress
from serve_app.types import RequestClass
from tests.core.shared_queue.world import MODEL, Message, World
from tests.effort import effort

NORMAL = RequestClass.NORMAL
HIGH = RequestClass.HIGH
LOW = RequestClass.LOW
ROUND_TRIP_S = 0.02
MANY = effort(3000, 9000)  # some times what a router has in transit at most
TOKENS_AT_ONCE = 5  # of 50 a second: fewer calls, as many tokens


def outcomes(world: World) -> Counter[str]:
    return Counter(req.state for router in world.routers.values() for req in router.requests.values())


def serve_all(world: World, rounds: int) -> None:
    """Everything that runs ends at once, round after round."""
    for _ in range(rounds):
        world.settle(1)
        for name, router in world.routers.items():
            for request_id in list(router.running):
                world.finish(name, request_id)
        if not outcomes(world)["waits"]:
            return


def test_thousands_running_at_50_tokens_a_second_reset_nothing() -> None:
    span_s = effort(6.0, 60.0)
    running = effort(800, 2000)  # tokens of each do not fit into three messages
    # the queue grants each of them
    world = World({"e": (running, 10**6)}, 1, QueuePolicy(max_queued=0, max_wait_s=60.0))
    world.settle(4)
    queue = world.routers["r0"].queue
    link = world.routers["r0"].queue.router_session
    reqs = [world.arrive("r0", NORMAL, 1, 100) for _ in range(running)]
    world.settle(8)
    assert all(req.state == "runs" for req in reqs)
    tickets = {run.ticket: f"q{number}" for number, run in enumerate(queue.in_flight.running.values(), 1)}
    incarnation = link.incarnation
    reported_at = dict.fromkeys(tickets, world.now)
    most_kept = most_reported = 0
    oldest_s = 0.0
    answer: Message | None = None
    begun = world.now
    step = 0
    while world.now < begun + span_s:
        step += 1
        if not step % TOKENS_AT_ONCE:
            for request_id in world.routers["r0"].running:
                queue.in_flight.progress(request_id, TOKENS_AT_ONCE)
        if answer is not None:
            world.deliver(answer)
        world.finish("r0", next(iter(world.routers["r0"].running)))
        world.arrive("r0", NORMAL, 1, 100)
        reported = queue.next_message(world.now)
        assert reported is not None
        for event in reported.events:
            if isinstance(event, TokenProgress) and event.ticket in reported_at:
                oldest_s = max(oldest_s, world.now - reported_at[event.ticket])
                reported_at[event.ticket] = world.now
        most_reported, most_kept = (
            max(most_reported, len(reported.events)),
            max(most_kept, len(link.sending) + len(link.progress)),
        )
        answer = world.deliver(Message("r0", world.now, reported))
        world.now += ROUND_TRIP_S
        if not step % 25:
            world.wait(0.0)
            world.quota.on_tick(world.now)
            for name in world.reports:
                world.engine_speaks(name)
    assert link.incarnation == incarnation, "no reset"
    assert most_reported <= BATCH
    assert most_kept <= running + 2 * BATCH, "memory is flat"
    assert oldest_s <= 2 * running / BATCH * ROUND_TRIP_S + 0.5, "each of them is told of in its turn"


@pytest.mark.parametrize("restart", [False, True], ids=["as it is", "the actor dies"])
def test_thousands_that_wait_in_one_router_take_two_incarnations_at_most(restart: bool) -> None:
    world = World({"e": (500, 10**6)}, 1, QueuePolicy(max_queued=20_000, max_wait_s=600.0))
    world.settle(4)
    link = world.routers["r0"].queue.router_session
    incarnation = link.incarnation
    for number in range(MANY):
        world.arrive("r0", list(RequestClass)[number % 4], 1, 100)
    world.settle(2)
    assert len(link.sending) <= ARRIVAL_WINDOW
    if restart:
        world.crash()
        for router in world.routers.values():
            world.perform(router, router.queue.on_lost(world.now))
    serve_all(world, 60)
    assert outcomes(world) == {"done": MANY}
    assert link.incarnation <= incarnation + 2
    world.settle(4)
    world.accounted()


def test_thousands_that_come_while_the_actor_is_away_wait_within_the_models_bounds_and_all_end_once() -> None:
    world = World({"e": (50, 10**6)}, 1, QueuePolicy(max_queued=1000, max_wait_s=600.0))
    world.settle(4)
    router = world.routers["r0"]
    link = router.queue.router_session
    incarnation = router.queue.router_session.incarnation
    router.queue.on_lost(world.now)
    refusals: list[Refuse] = []
    perform = world.perform

    def noting(router: object, actions: list) -> None:  # type: ignore[type-arg]
        refusals.extend(action for action in actions if isinstance(action, Refuse))
        perform(router, actions)  # type: ignore[arg-type]

    world.perform = noting  # type: ignore[method-assign]
    for _ in range(MANY):
        world.arrive("r0", NORMAL, 1, 100)
    assert router.queue.pending.count(MODEL) == 1000
    assert {(one.reason.value, bool(one.retry_after_s)) for one in refusals} == {("queue_full", True)}
    assert {one.full for one in refusals} == {"1000 of 1000 requests wait"}
    assert len(link.sending) <= ARRIVAL_WINDOW
    world.crash()
    serve_all(world, 60)
    assert outcomes(world) == {"done": MANY - len(refusals), "refused": len(refusals)}
    assert link.incarnation <= incarnation + 2
    world.settle(4)
    world.accounted()


def test_tokens_that_wait_are_bounded_too_and_what_was_accepted_is_not_refused() -> None:
    world = World({"e": (1, 100)}, 1, QueuePolicy(max_queued=100, max_wait_s=60.0, max_queued_tokens=250))
    queue = world.routers["r0"].queue
    reqs = [world.arrive("r0", NORMAL, 1, 100) for _ in range(5)]
    assert [req.state for req in reqs] == ["waits"] * 3 + ["refused"] * 2
    assert queue.on_arrive(MODEL, Arrival("again", NORMAL, "t", 1, 100, accepted=True), world.now) == []


def test_who_asks_often_where_it_stands_asks_the_actor_once_an_answer() -> None:
    world = World({"e": (1, 1000)}, 1)
    world.settle(4)
    world.arrive("r0", LOW)
    waits = world.arrive("r0", HIGH)
    world.settle(2)
    queue = world.routers["r0"].queue
    for _ in range(3 * WINDOW):
        queue.status(f"q{waits.number}")
    reported = queue.next_message(world.now)
    assert reported is not None
    assert sum(isinstance(event, StatusRequest) for event in reported.events) == 1
    assert len(queue.router_session.sending) < ARRIVAL_WINDOW
