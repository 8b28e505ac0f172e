"""Memory kept for starts under any order of asking, speaking, leaving, silence, lost nodes and crashes of the actor."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from serve_app.core.memory.checkpoint import CheckpointKey
from serve_app.core.memory.leases import Device, Hold, LeaseKind
from serve_app.core.memory.reports import EngineReport, Rank
from serve_app.core.memory.start_reservations import Start, StartsRequest
from serve_app.core.quota import Quota
from serve_app.core.times import ACTOR_TICK_S, RECOVERY_S, RESTART_TTL_S
from serve_app.errors import InsufficientMemory, LeaseConflict
from tests.effort import examples

DEVICES = [Device(node, index, 100, 0) for node in ("a", "b") for index in range(2)]
NODES = st.lists(st.sampled_from(["a", "b"]), unique=True).map(tuple)
SIZES = {"m": 60, "o": 35}
REPLICAS = [f"{model}{number}" for model in SIZES for number in range(4)]


class Machine(RuleBasedStateMachine):
    """The actor's brain between a controller, engines and their end."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        self.stored: dict[CheckpointKey, object] = {}
        self.devices = list(DEVICES)
        self.quota = Quota(1, {}, self.now)
        self.quota.on_devices(self.devices, self.now)
        self.engines: dict[str, tuple[str, tuple[Hold, ...]]] = {}  # replica -> its node, and what it was told it has

    def store(self) -> None:
        changes = self.quota.changes()
        self.quota.checkpoint.stored(changes)
        for key, (keep, value) in changes.items():
            if keep:
                self.stored[key] = value
            else:
                del self.stored[key]

    @rule(replicas=st.lists(st.sampled_from(REPLICAS), unique=True), nodes=NODES, more=st.integers(0, 3))
    def asks(self, replicas: list[str], nodes: tuple[str, ...], more: int) -> None:
        for model, size in SIZES.items():
            starts = tuple(Start(one, nodes) for one in replicas if one[0] == model and one not in self.engines)
            reply = self.quota.on_starts(StartsRequest(model, starts, more, nodes, size), self.now)
            assert reply.reserved_replicas <= more
            for reserved in self.quota.grants.reservations.all():
                if reserved.replica in reply.placements:
                    assert reply.placements[reserved.replica] == reserved.node
                    assert self.quota.ledger.lease(reserved.name).holds == (reserved.hold,)
        self.store()

    @rule(replica=st.sampled_from(REPLICAS), where=st.sampled_from(["a", "b"]), least=st.integers(20, 35))
    def speaks(self, replica: str, where: str, least: int) -> None:
        node, holds = self.engines.get(replica, (where, ()))
        size = SIZES[replica[0]]
        report = EngineReport(replica, replica[0], (Rank(node),), size, least, holds, 100 if holds else 0)
        kept = {reserved.replica: reserved for reserved in self.quota.grants.reservations.all()}
        recovers = self.quota.recovering
        try:
            reply = self.quota.on_engine(report, self.now)
        except (LeaseConflict, InsufficientMemory):
            self.engines.pop(replica, None)
            return
        self.store()
        reserved = kept.get(replica)
        if reserved is not None and not holds and not recovers and reserved.node == node:
            assert reply.holds == (reserved.hold,), "what was kept for it is its own"
        self.engines[replica] = (node, reply.holds)

    @precondition(lambda self: self.engines)
    @rule(data=st.data())
    def leaves(self, data: st.DataObject) -> None:
        replica = data.draw(st.sampled_from(sorted(self.engines)))
        node, _ = self.engines.pop(replica)
        size = SIZES[replica[0]]
        self.quota.on_engine(EngineReport(replica, replica[0], (Rank(node),), size, size, gone=True), self.now)
        self.store()

    @rule(span=st.integers(1, 40), speaking=st.booleans())
    def passes(self, span: int, speaking: bool) -> None:
        for _ in range(span):
            self.now += ACTOR_TICK_S
            if speaking:
                for replica, (node, _) in list(self.engines.items()):
                    self.speaks(replica, node, 30)
            self.quota.on_tick(self.now)
            for owner in self.quota.ending_engines():
                self.quota.on_processes_gone(owner, self.now)
                self.engines.pop(owner, None)
            self.store()

    @rule()
    def makes_room(self) -> None:
        self.quota.relocation.begin()
        self.quota.on_tick(self.now)
        self.store()

    @rule()
    def crashes(self) -> None:
        self.quota = Quota(self.quota.epoch + 1, dict(self.stored), self.now)
        self.quota.on_devices(self.devices, self.now)
        self.store()

    @rule(node=st.sampled_from(["a", "b"]))
    def is_lost_or_comes_back(self, node: str) -> None:
        elsewhere = [device for device in self.devices if device.node != node]
        back = [device for device in DEVICES if device.node == node] if len(elsewhere) == len(self.devices) else []
        self.devices = elsewhere + back
        self.engines = {name: one for name, one in self.engines.items() if back or one[0] != node}
        self.quota.on_devices(self.devices, self.now)
        self.store()

    @invariant()
    def no_device_has_more_on_it_than_there_is(self) -> None:
        held = Counter[str]()
        for lease in self.quota.ledger.leases():
            if lease.kind in (LeaseKind.ENGINE, LeaseKind.RESERVATION):
                for hold in lease.holds:
                    held[hold.on] += hold.amount
        assert all(amount <= 100 for amount in held.values())
        assert held == {use.device.key: use.held_bytes for use in self.quota.ledger.devices() if use.held_bytes}

    @invariant()
    def every_reservation_is_a_lease_and_stored(self) -> None:
        leases = {lease.lease_id: lease.holds for lease in self.quota.ledger.leases(LeaseKind.RESERVATION)}
        assert leases == {reserved.name: (reserved.hold,) for reserved in self.quota.grants.reservations.all()}
        assert {value for (kind, _), value in self.stored.items() if kind == "berth"} == set(
            self.quota.grants.reservations.all()
        )

    @invariant()
    def nobody_has_both_a_grant_and_a_reservation(self) -> None:
        bound = [reserved.replica for reserved in self.quota.grants.reservations.all() if reserved.replica]
        assert len(bound) == len(set(bound))
        assert not [replica for replica in bound if replica in self.quota.ledger]

    def teardown(self) -> None:
        for _ in range(int((RECOVERY_S + 2 * RESTART_TTL_S) / ACTOR_TICK_S)):
            self.passes(1, False)
        assert self.quota.grants.reservations.all() == []
        assert all(use.held_bytes == 0 for use in self.quota.ledger.devices())


TestStarts = Machine.TestCase
TestStarts.settings = settings(max_examples=examples(150), stateful_step_count=40, deadline=None)
