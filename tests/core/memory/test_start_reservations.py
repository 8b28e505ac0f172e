"""Memory kept for engines before they start: chosen over all nodes, taken over by one engine, or free again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from serve_app.core.memory.checkpoint import Checkpoint, CheckpointKey, EntryKind
from serve_app.core.memory.engine_grants import EngineGrants
from serve_app.core.memory.leases import Device, Hold, LeaseKind
from serve_app.core.memory.ledger import Ledger
from serve_app.core.memory.reports import EngineReport, Rank
from serve_app.core.memory.start_reservations import Start, StartsReply, StartsRequest
from serve_app.core.quota import Quota
from serve_app.core.times import RECOVERY_S, RESERVATION_TTL_S, RESTART_TTL_S

TOKENS = 1600
NODES = ("a", "b")


class Shell:
    """Two nodes with two devices of 100 bytes each."""

    def __init__(self) -> None:
        self.now = 100.0
        self.stored: dict[CheckpointKey, object] = {}
        self.quota = Quota(1, {}, self.now)
        self.devices = [Device(node, index, 100, 0) for node in NODES for index in (0, 1)]
        self.quota.on_devices(self.devices, self.now)

    def store(self) -> None:
        changes = self.quota.changes()
        self.quota.checkpoint.stored(changes)
        for key, (keep, value) in changes.items():
            if keep:
                self.stored[key] = value
            else:
                del self.stored[key]

    def crash(self) -> None:
        self.quota = Quota(self.quota.epoch + 1, dict(self.stored), self.now)
        self.quota.on_devices(self.devices, self.now)

    def ask(self, *starts: Start, size: int | None = 60, more: int = 0, nodes: tuple[str, ...] = NODES) -> StartsReply:
        reply = self.quota.on_starts(StartsRequest("m", starts, more, nodes, size), self.now)
        self.store()
        return reply

    def place(self, replica: str, size: int | None = 60, nodes: tuple[str, ...] = NODES) -> tuple[str | None, bool]:
        """The node for a replica, and whether memory is reserved for it there."""
        ((reported, node),) = self.ask(Start(replica, nodes), size=size).placements.items()
        assert reported == replica
        kept = [reserved for reserved in self.quota.grants.reservations.all() if reserved.replica == replica]
        assert all(reserved.node == node and reserved.name in self.quota.ledger for reserved in kept)
        return node, bool(kept)

    def says(self, owner: str, node: str, size: int = 60, model: str = "m", **more: object) -> tuple[Hold, ...]:
        report = EngineReport(owner, model, (Rank(node),), size, int(more.pop("least", size)))  # type: ignore[call-overload]
        reply = self.quota.on_engine(replace(report, **more), self.now)  # type: ignore[arg-type]
        self.store()
        return reply.holds

    def runs(self, owner: str, node: str, size: int = 60, model: str = "m") -> tuple[Hold, ...]:
        holds = self.says(owner, node, size, model)
        return self.says(owner, node, size, model, holds=holds, kv_tokens=TOKENS)

    def wait(self, span_s: float, *alive: tuple[str, str, int, str]) -> None:
        until = self.now + span_s
        while self.now < until:
            self.now += 0.5
            for engine in alive:
                held = self.quota.ledger.lease(engine[0]).holds if engine[0] in self.quota.ledger else ()
                self.says(*engine, holds=held, kv_tokens=TOKENS if held else 0)
            self.quota.on_tick(self.now)
            self.store()

    def free(self) -> int:
        return sum(use.free_bytes for use in self.quota.ledger.devices())


def test_a_start_goes_where_it_leaves_most_room_and_its_engine_gets_the_device_that_was_kept() -> None:
    shell = Shell()
    shell.runs("e", "b", 40)
    (taken,) = shell.quota.ledger.lease("e").holds
    assert shell.place("r") == ("b", True), "60 and 40 fill a device"
    assert shell.says("r", "b") == (Hold(taken.on, 60),)
    assert not shell.quota.grants.reservations.all()


def test_a_start_goes_only_where_ray_has_room() -> None:
    shell = Shell()
    shell.runs("e", "b", 40)
    assert shell.place("r", nodes=("a",))[0] == "a"


def test_what_is_kept_is_nobody_elses() -> None:
    shell = Shell()
    shell.place("r", nodes=("a",))
    shell.place("r2", nodes=("a",))
    assert shell.says("other", "a", model="o") == ()
    assert shell.says("r", "a") == (Hold("a/0", 60),)
    assert shell.says("r2", "a") == (Hold("a/1", 60),)


def test_asking_again_keeps_the_same_place() -> None:
    shell = Shell()
    assert shell.place("r") == shell.place("r")
    assert shell.free() == 340


def test_a_place_that_nobody_asks_for_again_is_free_after_its_time() -> None:
    shell = Shell()
    shell.place("r")
    shell.wait(RESERVATION_TTL_S + 1)
    assert shell.free() == 400
    assert not [key for key in shell.stored if key[0] is EntryKind.RESERVATION]


def test_an_engine_that_started_elsewhere_gives_up_what_was_kept_for_it() -> None:
    shell = Shell()
    elsewhere = "b" if shell.place("r")[0] == "a" else "a"
    (hold,) = shell.says("r", elsewhere)
    assert hold.on.startswith(elsewhere)
    assert shell.free() == 340


def test_who_waits_goes_first() -> None:
    shell = Shell()
    shell.runs("e0", "a", 60)
    shell.runs("e1", "a", 60)
    assert shell.says("waits", "a", 50) == ()
    assert shell.place("r", size=30)[0] == "b"
    assert shell.place("r2", size=30, nodes=("a",)) == ("a", False)


def test_without_room_a_start_waits_where_its_engine_could_ever_be() -> None:
    shell = Shell()
    shell.devices.append(Device("small", 0, 50, 0))
    shell.quota.on_devices(shell.devices, shell.now)
    for node in NODES:
        for index in range(2):
            shell.runs(f"{node}{index}", node, 70 if node == "a" else 60)
    assert shell.place("r", nodes=(*NODES, "small")) == ("b", False)
    assert shell.place("huge", size=150) == (None, False)


def test_the_policy_is_informed_for_how_many_more_there_is_memory_and_what_is_missing() -> None:
    shell = Shell()
    assert shell.ask(more=3).reserved_replicas == 3
    assert shell.ask(more=3) == StartsReply(reserved_replicas=3)
    reply = shell.ask(more=5)
    assert reply.reserved_replicas == 4
    assert reply.why == "memory: at least 0.00 GB needed on one device, 0.00 GB free"
    assert shell.quota.starts.shortages(shell.now) == {"m": reply.why}
    assert shell.quota.starts.shortages(shell.now + 60) == {}


def test_what_the_policy_had_kept_is_the_next_starts() -> None:
    shell = Shell()
    shell.ask(more=1)
    (reserved,) = shell.quota.grants.reservations.all()
    assert shell.place("r") == (reserved.node, True)
    assert shell.free() == 340
    assert shell.says("r", reserved.node) == (reserved.hold,)


def test_while_nothing_is_known_of_a_model_ray_places_it_and_its_last_engine_tells_then() -> None:
    shell = Shell()
    reply = shell.ask(Start("r", NODES), size=None, more=1)
    assert reply == StartsReply({"r": None}, need_known=False)
    shell.runs("r", "a", 30)
    assert shell.ask(size=None, more=1).reserved_replicas == 1
    assert [reserved.hold.amount for reserved in shell.quota.grants.reservations.all()] == [30]


def test_a_start_that_can_do_with_less_takes_what_there_is() -> None:
    shell = Shell()
    for node in NODES:
        for index in range(2):
            shell.runs(f"{node}{index}", node, 70 if (node, index) != ("b", 0) else 50, model="o")
    shell.says("first", "b", 60, least=40)
    shell.says("first", "b", 60, least=40, gone=True)
    assert shell.place("r", size=None) == ("b", True)
    (hold,) = shell.says("r", "b", 60, least=40)
    assert hold.amount == 50


def test_an_engine_that_turns_out_larger_than_what_was_kept_asks_anew() -> None:
    shell = Shell()
    node, _ = shell.place("r")
    assert node is not None
    assert [hold.amount for hold in shell.says("r", node, 90)] == [90]
    assert shell.free() == 310


def test_a_crash_of_the_actor_forgets_no_place() -> None:
    shell = Shell()
    place = shell.place("r")
    shell.crash()
    assert shell.place("r") == place
    shell.wait(1.0)
    assert place[0] is not None
    assert len(shell.says("r", place[0])) == 1
    assert shell.free() == 340


def test_nothing_new_is_kept_while_it_is_not_known_what_others_hold() -> None:
    shell = Shell()
    shell.runs("e", "a")
    shell.crash()
    assert shell.ask(Start("r", NODES), more=1) == StartsReply(why=shell.ask(more=1).why)
    shell.wait(RECOVERY_S + 1)
    assert shell.place("r")[1]


def test_a_place_on_a_lost_node_is_gone_and_another_is_found() -> None:
    shell = Shell()
    assert shell.place("r", nodes=("a",))[0] == "a"
    shell.devices = [device for device in shell.devices if device.node == "b"]
    shell.quota.on_devices(shell.devices, shell.now)
    assert shell.place("r", nodes=("b",)) == ("b", True)


def test_a_drained_engine_restarts_where_that_was_planned() -> None:
    shell = Shell()
    shell.devices = shell.devices[:2]
    shell.quota.on_devices(shell.devices, shell.now)
    places = {name: shell.runs(name, "a", 40)[0].on for name in ("e0", "e1")}
    if places["e0"] == places["e1"]:
        pytest.fail("the engines should be on two devices")
    shell.says("big", "a", 90, model="big")
    shell.quota.relocation.begin()
    step = shell.quota.relocation.step(shell.now)
    assert step is not None
    (reserved,) = shell.quota.grants.reservations.all()
    assert (reserved.replaces, reserved.hold) == (step.owner, Hold(step.target[0], 40))
    assert shell.place("another", 40, ("a",)) == ("a", False), "the line is first"
    stays = next(name for name in places if name != step.owner)
    shell.wait(RESTART_TTL_S * 2, ("e0", "a", 40, "m"), ("e1", "a", 40, "m"), ("big", "a", 90, "big"))
    shell.says(step.owner, "a", 40, gone=True)
    shell.wait(RESTART_TTL_S / 2, (stays, "a", 40, "m"), ("big", "a", 90, "big"))
    assert shell.ask(Start("r", ()), size=40).placements == {}, "Ray is short there, and its place is kept a while"
    assert shell.place("r", 40) == ("a", True)
    assert shell.says("r", "a", 40) == (reserved.hold,)


def test_a_restart_that_ray_put_where_it_was_planned_is_given_what_was_kept() -> None:
    shell = Shell()
    shell.runs("e", "a", 40)
    reserved = shell.quota.grants.reservations.add("m", Hold("b/0", 40), shell.now, replaces="e")
    assert shell.says("another", "b", 40) == (Hold("b/1", 40),), "kept until the engine leaves"
    shell.says("e", "a", 40, gone=True)
    assert shell.says("r", "b", 40) == (reserved.hold,)


def test_an_engine_that_waits_is_counted_once_in_what_is_asked_for() -> None:
    ledger = Ledger()
    for index in range(2):
        ledger.add_device(Device("n", index, 100, 0))
    grants = EngineGrants(ledger, Checkpoint({}))
    seen: list[object] = []
    grants.policy.observe = seen.append  # type: ignore[method-assign]
    report = EngineReport("e", "m", (Rank("n"),), 150, 150)
    for now in range(20):
        grants.report(report, float(now))
    assert len(seen) == 1


def test_a_reservation_is_no_engine() -> None:
    shell = Shell()
    shell.place("r")
    assert list(shell.quota.ledger.leases(LeaseKind.ENGINE)) == []
    assert shell.quota.relocation.plan(shell.now) is None


def test_an_engine_gets_what_was_kept_for_it_by_an_actor_that_died_since() -> None:
    shell = Shell()
    shell.runs("e", "b")
    assert shell.place("r", nodes=("a",))[0] == "a"
    (reserved,) = shell.quota.grants.reservations.all()
    shell.crash()
    shell.says("another", "a", model="o")
    assert shell.says("r", "a") == (reserved.hold,), "and for nobody else, whoever has not spoken yet"


def test_an_engine_that_left_with_its_node_is_not_remembered() -> None:
    shell = Shell()
    shell.runs("e", "a")
    shell.devices = [device for device in shell.devices if device.node == "b"]
    shell.quota.on_devices(shell.devices, shell.now)
    shell.store()
    assert not shell.stored
