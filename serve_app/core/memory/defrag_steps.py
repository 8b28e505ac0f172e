"""Defragmentation for a waiting engine: which other engines drain, one at a time, until it fits.

A plan has the place where each of them restarts. A step drains the first engine of the plan and reserves its place
there. Serve starts it again, the longest waiting engine has its old memory by then, and the next step is planned from
the new state.

Invariant: an engine is drained only if a plan shows that the first waiting engine fits afterwards.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import dataclass

from serve_app.core.memory.engine_grants import BlockedEngine, EngineGrants
from serve_app.core.memory.leases import Hold, LeaseKind, Phase
from serve_app.core.memory.ledger import Ledger
from serve_app.core.placement import Move, PlacedReplica, Workload, plan_moves
from serve_app.errors import InsufficientMemory, LeaseNotFound

MAX_STEPS = 64  # of one `begin`: beyond that, restarted engines fill the freed memory again


@dataclass(frozen=True, slots=True)
class DefragPlan:
    """A waiting engine, and the steps after which it fits."""

    waits: BlockedEngine
    steps: tuple[Move, ...]


class Relocation:
    """Plans the defragmentation, and carries out its steps while active."""

    def __init__(self, ledger: Ledger, grants: EngineGrants) -> None:
        self._ledger = ledger
        self._grants = grants
        self._steps_left = 0

    @property
    def active(self) -> bool:
        """Whether `begin` was called and steps may remain."""
        return self._steps_left > 0

    def fragmentation(self) -> tuple[float, dict[str, float]]:
        """The share of free memory that an engine of a present model could not use, all models equally likely; of the
        cluster, and of each node. Models that do not fit on any empty device are left out."""
        nodes: dict[str, list[int]] = {}
        for use in self._ledger.devices():
            nodes.setdefault(use.device.node, []).append(use.free_bytes)
        largest = max((use.device.capacity_bytes for use in self._ledger.devices()), default=0)
        expected = Workload(Counter(one for one in self._grants.expected().values() if one.amount <= largest))
        by_node = {node: expected.fragmentation([free]) for node, free in nodes.items()}
        return expected.fragmentation(list(nodes.values())), by_node

    def plan(self, now: float) -> DefragPlan | None:
        """A plan to fit the first waiting engine that can be helped; None: none waits, or no plan helps."""
        for waits in self._grants.blocked(now):
            report = self._grants.last_report(waits.owner)
            nodes = {rank.node for rank in report.ranks} if report is not None else set()
            if report is None or len(nodes) != 1:
                continue  # pipeline stages wait where Ray placed them; no engine moves for those
            (node,) = nodes
            uses = sorted(self._ledger.devices(), key=lambda use: use.device.index)
            free = {use.device.key: use.free_bytes for use in uses}
            moves = plan_moves(free, self._movable(), node, len(report.ranks), report.least_bytes)
            if moves:
                return DefragPlan(waits, moves)
        return None

    def begin(self) -> None:
        """Start to defragment for waiting engines, one step at a time."""
        self._steps_left = MAX_STEPS

    def step(self, now: float) -> Move | None:
        """Drain the next engine; None: one still drains, or nothing is left to do."""
        if not self.active or self._grants.drains.active():
            return None
        plan = self.plan(now)
        if plan is None:
            self._steps_left = 0
            return None
        self._steps_left -= 1
        step = plan.steps[0]
        self._grants.drain(step.owner, "defragmentation moves it", now)
        self._reserve_target(step, now)
        return step

    def _reserve_target(self, step: Move, now: float) -> None:
        """Reserve the place where a drained engine restarts, if the ledger chooses it."""
        report = self._grants.last_report(step.owner)
        if report is None or len(step.target) != 1 or report.ranks[0].device is not None:
            return
        amount = self._ledger.lease(step.owner).holds[0].amount
        with contextlib.suppress(InsufficientMemory, LeaseNotFound):  # within its own memory: Ray places
            self._grants.reservations.add(step.model, Hold(step.target[0], amount), now, replaces=step.owner)

    def _movable(self) -> list[PlacedReplica]:
        """Running engines on a single node that do not drain."""
        leaving = set(self._grants.drains.active())
        found = []
        for lease in self._ledger.leases(LeaseKind.ENGINE):
            nodes = {hold.on.rpartition("/")[0] for hold in lease.holds}
            if len(nodes) == 1 and lease.phase is Phase.COMMITTED and lease.lease_id not in leaving:
                devices = tuple(hold.on for hold in lease.holds)
                report = self._grants.last_report(lease.lease_id)
                model = "" if report is None else report.model
                amount = max(hold.amount for hold in lease.holds)
                found.append(PlacedReplica(lease.lease_id, model, devices, amount))
        return found
