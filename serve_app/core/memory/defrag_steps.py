"""Making room for an engine that waits: which others drain, one at a time, until it fits.

What is planned is where each of them restarts; what is done is that the first of the plan drains and ends, and that its
place there is kept. Serve starts it again, who waited longer has its memory by then, and the next step is planned from
what is there after that.

Invariant: nobody is drained unless a plan says that it lets the first engine in the line fit.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import dataclass

from serve_app.core.memory.engine_grants import Blocked, Grants
from serve_app.core.memory.leases import DeviceUse, Hold, Kind, Phase
from serve_app.core.memory.ledger import Ledger
from serve_app.core.placement import Move, Replica, Spot, Workload, make_room
from serve_app.errors import InsufficientMemory, LeaseNotFound

MAX_STEPS = 64  # of one request to make room: past that, what restarts fills what was emptied


@dataclass(frozen=True, slots=True)
class Step:
    """One engine that drains, where it is and where it is expected to restart, and the bytes that has to load."""

    owner: str
    model: str
    source: tuple[str, ...]
    target: tuple[str, ...]
    bytes_to_move: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Who waits, and the steps after which it fits."""

    waits: Blocked
    steps: tuple[Step, ...]


class Relocation:
    """Plans, and steps while some are wanted."""

    def __init__(self, ledger: Ledger, grants: Grants) -> None:
        self._ledger, self._grants = ledger, grants
        self._steps_left = 0

    @property
    def active(self) -> bool:
        """Whether it was told to make room and has not done so, or given up."""
        return self._steps_left > 0

    def fragmentation(self) -> tuple[float, dict[str, float]]:
        """The part of what is free that an engine like those here could not use, one of each model being as likely;
        of the cluster, and of each node. Models that fit nowhere, however empty, are left out."""
        nodes = self._nodes()
        largest = max((use.device.capacity_bytes for use in self._ledger.devices()), default=0)
        expected = Workload(Counter(one for one in self._grants.expected().values() if one.amount <= largest))
        by_node = {node: expected.fragmentation([free]) for node, free in nodes.items()}
        return expected.fragmentation(list(nodes.values())), by_node

    def plan(self, now: float) -> Plan | None:
        """How the first engine in the line would fit; None: nobody waits, or nothing helps."""
        for waits in self._grants.blocked(now):
            told = self._grants.told(waits.owner)
            nodes = {rank.node for rank in told.ranks} if told is not None else set()
            if told is None or len(nodes) != 1:
                continue  # a pipeline's stages wait where Ray has put them; nothing is moved for those
            (node,) = nodes
            moves = make_room(self._nodes(), self._movable(), node, len(told.ranks), told.least_bytes)
            if moves:
                return Plan(waits, tuple(map(self._step, moves)))
        return None

    def begin(self) -> None:
        """Make room for whoever waits, one engine at a time."""
        self._steps_left = MAX_STEPS

    def step(self, now: float) -> Step | None:
        """The next engine to drain, told so; None: one still does, or there is no more to do."""
        if not self.active or self._grants.leaving():
            return None
        plan = self.plan(now)
        if plan is None:
            self._steps_left = 0
            return None
        self._steps_left -= 1
        step = plan.steps[0]
        self._grants.drain(step.owner)
        self._keep_target(step, now)
        return step

    def _keep_target(self, step: Step, now: float) -> None:
        """Keep the place where a drained engine is to restart, where the ledger is the one to choose it."""
        told = self._grants.told(step.owner)
        if told is None or len(step.target) != 1 or told.ranks[0].device is not None:
            return
        amount = self._ledger.lease(step.owner).holds[0].amount
        with contextlib.suppress(InsufficientMemory, LeaseNotFound):  # within what it has itself: Ray places
            self._grants.berths.add(step.model, Hold(step.target[0], amount), now, after=step.owner)

    def _nodes(self) -> dict[str, list[int]]:
        """Bytes free of each device, by node and in the order of their indices."""
        return {node: [use.free_bytes for use in uses] for node, uses in self._uses().items()}

    def _uses(self) -> dict[str, list[DeviceUse]]:
        found: dict[str, list[DeviceUse]] = {}
        for use in sorted(self._ledger.devices(), key=lambda use: use.device.index):
            found.setdefault(use.device.node, []).append(use)
        return found

    def _movable(self) -> list[Replica]:
        """Engines of one node that run and were not told to drain."""
        order = {node: [use.device.key for use in uses] for node, uses in self._uses().items()}
        leaving, found = set(self._grants.leaving()), []
        for lease in self._ledger.leases(Kind.ENGINE):
            nodes = {hold.on.rpartition("/")[0] for hold in lease.holds}
            if len(nodes) == 1 and lease.phase is Phase.COMMITTED and lease.lease_id not in leaving:
                (node,) = nodes
                devices = tuple(order[node].index(hold.on) for hold in lease.holds)
                found.append(Replica(lease.lease_id, Spot(node, devices), max(hold.amount for hold in lease.holds)))
        return found

    def _step(self, move: Move) -> Step:
        told, replica = self._grants.told(move.replica.replica_id), move.replica
        model, uses = "" if told is None else told.model, self._uses()
        source, target = (
            tuple(uses[spot.node][device].device.key for device in spot.devices) for spot in (replica.spot, move.target)
        )
        return Step(replica.replica_id, model, source, target, replica.bytes_to_move)
