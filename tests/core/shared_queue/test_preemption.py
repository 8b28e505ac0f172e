"""Requests that are told to stop for others: through the actor, the network and the routers."""

from __future__ import annotations

from serve_app.core.queue import Preempt, QueuePolicy
from serve_app.core.queue.policy import BEGUN_WAIT_S
from serve_app.core.queue.preemption import STOP_S
from serve_app.core.queue.stoppable_runs import RESUMED_S
from serve_app.core.times import FENCE_S
from serve_app.types import RequestClass
from tests.core.shared_queue.test_faults import answer
from tests.core.shared_queue.world import Message, Req, World

HIGH = RequestClass.HIGH
NORMAL = RequestClass.NORMAL
LOW = RequestClass.LOW


def connected(slots: int = 2, routers: int = 2, tokens: int = 1000) -> World:
    """A world whose requests can be stopped."""
    world = World({"e": (slots, tokens)}, routers)
    world.preemptible = True
    world.settle(4)
    return world


def full(world: World, name: str = "r0", level: RequestClass = LOW) -> list[Req]:
    """Requests run in all slots."""
    reqs = [world.arrive(name, level) for _ in range(world.size["e"][0])]
    world.settle(3)
    assert all(req.state == "runs" for req in reqs)
    return reqs


def obey_all(world: World) -> int:
    """All requests that were told to stop do so; returns how many."""
    reported = [
        (name, request_id)
        for name, router in world.routers.items()
        for request_id, req in router.running.items()
        if req.arrival is not None and req.stops > req.arrival.preempted
    ]
    for name, request_id in reported:
        world.obey(name, request_id)
    return len(reported)


def stop_in(message: Message) -> bool:
    assert message.reply is not None
    return any(isinstance(action, Preempt) for action in message.reply.actions)


def test_a_request_stops_at_another_router_and_goes_on_when_there_is_room() -> None:
    world = connected(routers=3)
    low = full(world)
    high = world.arrive("r1", HIGH)
    world.settle(2)
    assert sum(req.stops for req in low) == 1
    assert high.state == "waits"
    assert obey_all(world) == 1
    world.settle(2)
    assert (high.state, sorted(req.state for req in low)) == ("runs", ["runs", "waits"])
    world.finish("r1", f"q{high.number}")
    world.settle(2)
    assert [req.state for req in low] == ["runs", "runs"]
    world.accounted()
    world.bring_to_rest()


def test_a_message_that_says_so_is_repeated_when_it_is_lost_and_counts_once_when_it_comes_twice() -> None:
    world = connected()
    low = full(world)
    world.arrive("r1", HIGH)
    world.settle_one("r1")
    lost = answer(world, "r0")
    assert stop_in(lost)
    world.give_up("r0")
    again = answer(world, "r0")
    assert stop_in(again)
    for message in (again, lost, again):
        world.deliver(message)  # `World.check_stop` refuses a second one
    world.settle(2)
    assert sum(req.stops for req in low) == 1
    world.bring_to_rest()


def test_a_request_that_ends_while_it_is_asked_to_stop_is_not_stopped() -> None:
    world = connected(slots=1)
    (low,) = full(world)
    high = world.arrive("r1", HIGH)
    world.settle_one("r1")
    late = answer(world, "r0")
    world.finish("r0", f"q{low.number}")
    world.deliver(late)
    world.settle(3)
    assert (low.stops, high.state) == (0, "runs")
    world.bring_to_rest()


def test_a_stop_of_the_incarnation_before_is_ignored_and_the_run_is_stopped_in_the_next_one() -> None:
    world = connected(slots=1)
    (low,) = full(world)
    high = world.arrive("r1", HIGH)
    world.settle_one("r1")
    late = answer(world, "r0")
    assert stop_in(late)
    queue = world.routers["r0"].queue
    queue.begin_incarnation(queue.router_session.epoch, world.now)
    world.deliver(late)
    assert low.stops == 0
    world.settle(4)
    assert (low.stops, low.state, high.state) == (1, "runs", "waits")
    world.accounted()
    assert obey_all(world) == 1
    world.settle(4)
    assert high.state == "runs"
    world.bring_to_rest()


def test_a_stop_that_comes_too_late_is_not_used_and_another_request_stops() -> None:
    world = connected(routers=3)
    first = world.arrive("r0", LOW)
    second = world.arrive("r2", LOW)
    world.settle(3)
    assert (first.state, second.state) == ("runs", "runs")
    world.arrive("r1", HIGH)
    world.settle_one("r1")
    silent = next(name for name in ("r0", "r2") if stop_in(answer(world, name)))  # and does not arrive
    other = {"r0": "r2", "r2": "r0"}[silent]
    for _ in range(8):
        world.wait(STOP_S / 4)
        world.settle_one(other)
        world.settle_one("r1")
    stopped = {"r0": first, "r2": second}
    assert (stopped[silent].stops, stopped[other].stops) == (0, 1)
    world.bring_to_rest()


def test_a_request_that_has_begun_on_credit_stops_as_one_that_the_actor_has_granted() -> None:
    world = connected(slots=1, routers=2)
    here = full(world, level=NORMAL)
    assert [req.here for req in here] == [True]
    world.wait(RESUMED_S)
    high = world.arrive("r1", HIGH)
    world.settle(2)
    assert (high.state, here[0].stops) == ("waits", 1)
    assert obey_all(world) == 1
    world.settle(2)
    assert high.state == "runs"
    world.accounted()
    world.bring_to_rest()


def test_what_runs_unknown_to_the_actor_is_announced_as_soon_as_a_request_waits() -> None:
    world = connected(slots=1, routers=2)
    low = world.arrive("r0", LOW)
    assert low.here
    world.arrive("r1", HIGH)
    world.settle_one("r1")
    assert low.stops == 0, "the actor does not know it"
    world.watch("r0")
    answered = world.deliver(world.in_transit.pop(0))
    assert answered is not None
    world.deliver(answered)
    world.speak("r0")  # no heartbeat is due
    answered = world.deliver(world.in_transit.pop(0))
    assert answered is not None
    world.deliver(answered)
    assert low.stops == 1
    world.bring_to_rest()


def test_requests_of_every_class_and_length_begin_on_credit() -> None:
    for level, tokens in ((LOW, 10), (NORMAL, 20_000), (HIGH, 20_000)):
        world = connected(routers=1, tokens=100_000)
        req = world.arrive("r0", level, tokens=tokens)
        assert (req.state, req.here) == ("runs", True), (level, tokens)
        world.bring_to_rest()


def test_without_the_actor_low_requests_run_on_credit() -> None:
    world = connected(routers=1)
    world.give_up("r0")
    low = world.arrive("r0", LOW)
    assert (low.state, low.here) == ("runs", True)
    assert world.now < world.routers["r0"].queue.credit_valid_until <= world.now + FENCE_S
    world.bring_to_rest()


def test_the_next_actor_stops_what_runs_since_the_one_before() -> None:
    world = connected()
    low = full(world)
    world.crash()
    world.settle(6)
    high = world.arrive("r1", HIGH)
    world.settle(4)
    assert sum(req.stops for req in low) == 1
    assert obey_all(world) == 1
    world.settle(2)
    assert high.state == "runs"
    world.accounted()
    world.bring_to_rest()


def test_what_has_run_for_longest_loses_most_also_at_the_next_actor() -> None:
    world = connected()
    old = world.arrive("r0", LOW)
    world.settle(1)
    world.wait(5.0)
    young = world.arrive("r0", LOW)
    world.settle(1)
    world.crash()
    world.settle(6)
    world.arrive("r1", HIGH)
    world.settle(2)
    assert (old.stops, young.stops) == (0, 1)
    world.bring_to_rest()


def test_a_router_leaves_it_to_the_actor_how_long_a_request_waits_that_has_begun() -> None:
    world = World({"e": (1, 1000)}, 2, QueuePolicy(1000, 10.0))
    world.preemptible = True
    world.settle(4)
    low = world.arrive("r0", LOW, tokens=900)
    world.settle(2)
    high = world.arrive("r1", HIGH)
    world.settle(2)
    assert obey_all(world) == 1
    begun_s = world.now
    while world.now < begun_s + 1.1 * BEGUN_WAIT_S:  # `low` earns half a token with each answer of `high`
        following = world.arrive("r1", HIGH)
        world.settle(2)
        assert high.state == "runs"
        world.finish("r1", f"q{high.number}")
        high = following
        world.settle(1)
        world.wait(FENCE_S / 2)
        assert low.state == "waits"
    for router in world.routers.values():
        world.perform(router, router.queue.on_lost(world.now))
    world.now += 10.0 + BEGUN_WAIT_S + 2 * FENCE_S
    router = world.routers["r0"]
    world.perform(router, router.queue.on_tick(world.now))
    assert low.state == "refused"
