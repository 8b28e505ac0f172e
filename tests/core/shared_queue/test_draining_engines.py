"""An engine that drains gets no request of any router, and keeps those that it has."""

from __future__ import annotations

from serve_app.core.memory import DrainRequest
from serve_app.types import RequestClass
from tests.core.shared_queue.world import World

LOW = RequestClass.LOW


def test_no_router_places_a_request_on_an_engine_that_drains() -> None:
    world = World({"e": (8, 800), "f": (8, 800)}, 2)
    world.settle(4)
    held = world.arrive("r0", LOW)
    home = held.engine
    world.quota.drain(DrainRequest(home), world.now)
    world.settle(4)
    asked = [world.arrive(router, LOW) for router in ("r0", "r1") for _ in range(4)]
    world.settle(4)
    assert held.state == "runs"
    placed = [one for one in asked if one.state == "runs"]
    assert {one.engine for one in placed} == {"e", "f"} - {home}
    assert len(placed) == 8
    for router in ("r0", "r1"):
        assert world.routers[router].queue.accounts.credit(home) == (0, 0)
    waits = world.arrive("r1", LOW)
    world.settle(4)
    assert waits.state == "waits"
    world.finish("r0", f"q{held.number}")
    world.settle(4)
    assert waits.state == "waits", "what comes free on an engine that drains is nobody's"
