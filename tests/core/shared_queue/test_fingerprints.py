"""What an engine has begun continues at engines with the same fingerprint, whichever router asks, and nowhere else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from serve_app.core.memory import DrainRequest, EngineReport, Rank
from serve_app.core.queue import Arrival
from serve_app.types import RequestClass
from tests.core.shared_queue.world import MODEL, World
from tests.core.shared_queue.world_checks import Req

LOW = RequestClass.LOW


def mixed(**fingerprints: str) -> World:
    """Engines of two slots and these fingerprints, and two routers."""
    world = World(dict.fromkeys(fingerprints, (2, 1000)), 2)
    for name, fingerprint in fingerprints.items():
        tell(world, name, fingerprint)
    world.settle(4)
    return world


def tell(world: World, engine: str, fingerprint: str) -> None:
    world.reports[engine] = replace(world.reports[engine], fingerprint=fingerprint)


def begun(world: World, name: str, fingerprint: str) -> Req:
    """A request arrives of which an engine with this fingerprint has made a part."""
    number = next(world.ids)
    router = world.routers[name]
    req = router.requests[f"q{number}"] = Req(number, LOW, 1, 10, world.now)
    req.arrival = Arrival(f"q{number}", LOW, "t", 1, 10, accepted=True, fingerprint=fingerprint)
    world.perform(router, router.queue.on_arrive(MODEL, req.arrival, world.now))
    return req


def avoiding(world: World, name: str, engine: str) -> Req:
    """A request arrives that this engine does not know."""
    number = next(world.ids)
    router = world.routers[name]
    req = router.requests[f"q{number}"] = Req(number, LOW, 1, 10, world.now)
    req.arrival = Arrival(f"q{number}", LOW, "t", 1, 10, avoid_replicas=frozenset((engine,)))
    world.perform(router, router.queue.on_arrive(MODEL, req.arrival, world.now))
    return req


def test_what_has_begun_runs_at_an_engine_with_its_fingerprint_and_waits_for_it_while_others_are_free() -> None:
    world = mixed(e="old", f="new")
    asked = [begun(world, router, "new") for router in ("r0", "r1", "r0")]
    world.settle(4)
    assert sorted(one.state for one in asked) == ["runs", "runs", "waits"]
    assert {one.engine for one in asked if one.state == "runs"} == {"f"}
    free = [world.arrive(router, LOW) for router in ("r0", "r1")]
    world.settle(2)
    assert [(one.state, one.engine) for one in free] == [("runs", "e")] * 2, "it holds nobody up"
    (first, *_) = [one for one in asked if one.state == "runs"]
    world.finish("r0" if f"q{first.number}" in world.routers["r0"].running else "r1", f"q{first.number}")
    world.settle(2)
    assert {one.engine for one in asked} == {"f"}
    world.accounted()
    world.bring_to_rest()


def test_a_request_waits_for_an_engine_that_its_router_has_not_excluded_and_holds_nobody_up() -> None:
    world = mixed(e="x", f="x")
    asked = [avoiding(world, name, "e") for name in ("r0", "r1", "r0")]
    world.settle(4)
    assert sorted(one.state for one in asked) == ["runs", "runs", "waits"]
    assert {one.engine for one in asked if one.state == "runs"} == {"f"}
    free = [world.arrive(router, LOW) for router in ("r0", "r1")]
    world.settle(2)
    assert [(one.state, one.engine) for one in free] == [("runs", "e")] * 2
    (first, *_) = [one for one in asked if one.state == "runs"]
    world.finish("r0" if f"q{first.number}" in world.routers["r0"].running else "r1", f"q{first.number}")
    world.settle(2)
    assert {one.engine for one in asked} == {"f"}
    world.accounted()
    world.bring_to_rest()


def test_what_has_begun_is_refused_at_once_when_engines_run_and_none_with_its_fingerprint_runs_or_starts() -> None:
    world = mixed(e="new")
    asked = begun(world, "r0", "old")
    world.settle(4)
    assert asked.state == "refused"
    world.bring_to_rest()


@pytest.mark.parametrize("fingerprint", ["old", None], ids=["equal", "not yet known"])
def test_it_waits_while_an_engine_starts_that_may_be_equal_and_goes_on_there(fingerprint: str | None) -> None:
    world = mixed(e="new")
    starting = EngineReport("s", MODEL, (Rank("n", 7),), 5000, 5000, fingerprint=fingerprint)  # too large to start
    world.quota.on_engine(starting, world.now)
    asked = begun(world, "r0", "old")
    world.settle(4)
    assert asked.state == "waits"
    world.start_engine("f", 2, 1000)
    tell(world, "f", "old")
    for name in world.routers:
        world.notice(name)
    world.settle(4)
    assert (asked.state, asked.engine) == ("runs", "f")


def test_it_waits_while_no_engine_runs_at_all() -> None:
    world = mixed(e="old")
    world.end_engine("e")
    asked = begun(world, "r0", "old")
    world.settle(4)
    assert asked.state == "waits"


def test_an_engine_that_drains_is_none_that_it_could_wait_for() -> None:
    world = mixed(e="old", f="new")
    world.quota.drain(DrainRequest("e"), world.now)
    world.settle(2)
    asked = begun(world, "r0", "old")
    world.settle(4)
    assert asked.state == "refused"


def test_after_a_crash_of_the_actor_it_still_goes_on_at_an_equal_engine_alone() -> None:
    world = mixed(e="old", f="new")
    world.crash()
    asked = [begun(world, "r0", "new") for _ in range(2)]
    world.settle(12)
    assert [(one.state, one.engine) for one in asked] == [("runs", "f")] * 2
    world.bring_to_rest()


def test_while_the_actor_is_away_a_router_sends_it_where_it_knows_the_fingerprint_and_serves_the_others() -> None:
    world = mixed(e="old", f="new")
    accounts = world.routers["r0"].queue.accounts
    accounts.set_fingerprint("e", "old")
    accounts.set_fingerprint("f", "new")
    world.give_up("r0")
    waits = begun(world, "r0", "older")
    before = begun(world, "r0", "new")
    other = world.arrive("r0", LOW)
    assert (waits.state, before.state, before.engine) == ("waits", "runs", "f")
    assert other.state == "runs", "it does not wait behind one that no engine here may take"


def test_while_the_actor_is_away_what_waits_for_one_engine_holds_up_only_those_that_wait_for_the_same() -> None:
    world = World({"e": (2, 1000), "f": (2, 1000)}, 1)
    world.settle(4)
    running = [avoiding(world, "r0", "e") for _ in range(2)]
    world.settle(4)
    assert [(one.state, one.engine) for one in running] == [("runs", "f")] * 2
    world.give_up("r0")
    waits = [avoiding(world, "r0", "e") for _ in range(2)]
    others = [world.arrive("r0", LOW) for _ in range(3)]
    assert [one.state for one in waits] == ["waits"] * 2
    assert (others[0].state, others[0].engine) == ("runs", "e"), "it does not wait behind them"
    assert others[-1].state == "waits"
    world.finish("r0", f"q{running[0].number}")
    assert [(one.state, one.engine) for one in waits] == [("runs", "f"), ("waits", "")], "in their order"
    assert others[-1].state == "waits"
    for other in others[:-1]:
        world.finish("r0", f"q{other.number}")
    assert (others[-1].state, others[-1].engine) == ("runs", "e")
    assert waits[1].state == "waits"
