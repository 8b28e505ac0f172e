"""Making room for an engine that waits: which others drain, one at a time, until it fits.

What is planned is where each of them restarts; what is done is that the first of the plan drains and ends, and that its
place there is kept. Serve starts it again, who waited longer has its memory by then, and the next step is planned from
what is there after that.

Invariant: nobody is drained unless a plan says that it lets the first engine in the line fit.
"""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from dataclasses import dataclass

from serve_app.core.memory.grants import Blocked, Grants
from serve_app.core.memory.leases import Hold, Kind, Lease, Phase
from serve_app.core.memory.ledger import Ledger
from serve_app.core.placing.defrag import DefragmentationPlan, plan_defragmentation
from serve_app.core.placing.fragmentation import Workload
from serve_app.core.placing.placement import Demand, Node, Placement, Slot
from serve_app.core.placing.replicas import Replica
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
    """Who waits, and the steps after which it fits. `exact`: no plan moves fewer bytes."""

    waits: Blocked
    steps: tuple[Step, ...]
    exact: bool


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
        largest = max((size for node in nodes for size in node.total), default=0)
        expected = Workload(Counter(one for one in self._grants.expected().values() if one.amount <= largest))
        return expected.fragmentation(nodes), {node.node_id: expected.fragmentation([node]) for node in nodes}

    def plan(self, now: float) -> Plan | None:
        """How the first engine in the line would fit; None: nobody waits, or nothing helps."""
        for waits in self._grants.blocked(now):
            told = self._grants.told(waits.owner)
            nodes = {rank.node for rank in told.ranks} if told is not None else set()
            if told is None or len(nodes) != 1:
                continue  # a pipeline's stages wait where Ray has put them; nothing is moved for those
            demand = Demand(len(told.ranks), told.least_bytes, models=frozenset(nodes))
            found = plan_defragmentation(self._nodes(), self._replicas(), demand)
            if found is not None and found.moves:
                return Plan(waits, self._steps(found), found.exact)
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

    def _nodes(self) -> list[Node]:
        """Devices by node. A node's id stands for its model, too: an engine that waits does so on its node."""
        by_node: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
        for use in self._ledger.devices():
            device = use.device
            by_node[device.node].append((device.index, use.free_bytes, device.capacity_bytes))
        return [
            Node(
                node, 0, 0, tuple(free for _, free, _ in sorted(all_)), tuple(total for *_, total in sorted(all_)), node
            )
            for node, all_ in by_node.items()
        ]

    def _replicas(self) -> list[Replica]:
        leaving = set(self._grants.leaving())
        found = []
        for lease in self._ledger.leases(Kind.ENGINE):
            slot = self._slot(lease)
            if slot is None:
                continue
            demand = Demand(len(slot.devices), max(slot.amounts))
            movable = lease.phase is Phase.COMMITTED and lease.lease_id not in leaving
            found.append(Replica(lease.lease_id, demand, Placement((slot,)), movable, lease.amount))
        return found

    def _slot(self, lease: Lease) -> Slot | None:
        """Where an engine of one node is; None: it is on several."""
        places = [hold.on.rpartition("/") for hold in lease.holds]
        nodes = {node for node, _, _ in places}
        if len(nodes) != 1:
            return None
        (node,) = nodes
        order = sorted(use.device.index for use in self._ledger.devices() if use.device.node == node)
        devices = tuple(order.index(int(index)) for _, _, index in places)
        return Slot(node, devices, tuple(hold.amount for hold in lease.holds), 0, 0)

    def _steps(self, found: DefragmentationPlan) -> tuple[Step, ...]:
        steps = []
        for move in found.moves:
            told = self._grants.told(move.replica_id)
            model = "" if told is None else told.model
            source, target = _keys(move.source), _keys(move.target)
            steps.append(Step(move.replica_id, model, source, target, move.bytes_to_move))
        return tuple(steps)


def _keys(placement: Placement) -> tuple[str, ...]:
    return tuple(f"{slot.node_id}/{device}" for slot in placement.slots for device in slot.devices)
