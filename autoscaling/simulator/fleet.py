"""The replicas of all models: their starts, reports, drains and deaths, as Ray Serve and the engines do these.

Rules
- A replica is placed on a node, asks the quota actor for its memory, loads, and takes requests.
- Fewer are wanted: those that do not run yet end first, then those on the nodes with the fewest replicas, the newest
  first, as Serve chooses them. A running one finishes its requests for `drain_s`; what is left goes on elsewhere.
- One that dies takes its requests with it; Serve starts another one with its next look.

Invariant: a replica's GPUs are its own from its place to its end.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

from autoscaling.simulator.clock import Clock
from autoscaling.simulator.exchange import VirtualActor
from autoscaling.simulator.nodes import Nodes
from autoscaling.simulator.replica import Replica, ReplicaState
from autoscaling.simulator.world import ModelPlan, World
from serve_app.core.memory import EngineReport, Rank
from serve_app.core.times import ENGINE_HEARTBEAT_S, NODE_LOOK_S

PRESENT = (ReplicaState.UNPLACED, ReplicaState.WAITING, ReplicaState.STARTING, ReplicaState.RUNNING)
AT_WORK = (ReplicaState.WAITING, ReplicaState.STARTING)  # start, and have a place
END_POLL_S = 0.5  # between looks whether a replica that drains still has requests

# Called with a model, a replica, and whether it takes requests now.
OnReplica = Callable[[str, str, bool], None]


@dataclass(frozen=True, slots=True)
class FleetCounts:
    """Replicas of a model by what they do. `starting`: all that are to run, and do not yet; of these have `unplaced`
    ones no place, and `blocked` ones wait for memory. `executing`: requests, without `rows` of batches. `slots`:
    requests that a running one can run at once, in the mean; 0: none runs. `kv_use`, `slot_use`: see `Signals`.
    `starting_s`: for how long the oldest one that starts and has a place has had it; 0: there is none."""

    running: int = 0
    starting: int = 0
    target: int = 0
    unplaced: int = 0
    blocked: int = 0
    stopping: int = 0
    executing: int = 0
    slots: float = 0.0
    rows: int = 0
    kv_use: float = 0.0
    slot_use: float = 0.0
    starting_s: float = 0.0


class Fleet:
    """See the module.

    Args:
        draw: of the times of starts.
        on_replica: the routers.
    """

    def __init__(
        self, world: World, clock: Clock, nodes: Nodes, actor: VirtualActor, draw: random.Random, on_replica: OnReplica
    ) -> None:
        self._clock = clock
        self._nodes = nodes
        self._actor = actor
        self._draw = draw
        self._on_replica = on_replica
        self._plans: Mapping[str, ModelPlan] = {plan.name: plan for plan in world.models}
        self._targets = {plan.name: plan.scaling.first_replicas for plan in world.models}
        self.replicas: dict[str, Replica] = {}  # by name, of all models, in the order of their starts
        self._started = 0
        self._replica_s = dict.fromkeys(self._plans, 0.0)  # of those that have ended
        clock.every(ENGINE_HEARTBEAT_S, self._report_all)
        clock.every(NODE_LOOK_S, self._look_for_dead)
        clock.every(END_POLL_S, self._end_drained)
        if world.progress_s:
            clock.every(world.progress_s, self._count_tokens)

    def start_first(self) -> None:
        """The replicas that run when the simulation begins."""
        for model, count in self._targets.items():
            for _ in range(count):
                replica = self._start(self._plans[model])
                if replica.state is ReplicaState.STARTING:
                    self._ready(replica)

    def set_target(self, model: str, target: int) -> None:
        """Serve's target number of replicas of a model."""
        self._targets[model] = target

    def follow_target(self, model: str) -> None:
        """Serve's controller looks: starts what is missing, and ends what is too much."""
        plan = self._plans[model]
        present = [one for one in self._of(model) if one.state in PRESENT]
        for replica in present:
            if replica.state is ReplicaState.UNPLACED:
                self._place(replica)
        for _ in range(self._targets[model] - len(present)):
            self._start(plan)
        surplus = len(present) - self._targets[model]
        if surplus > 0:
            for replica in sorted(present, key=self._end_order)[:surplus]:
                self._stop(replica)
        unplaced = [one.plan.profile.gpus for one in self.replicas.values() if one.state is ReplicaState.UNPLACED]
        if unplaced:
            self._nodes.demand(unplaced)

    def look_at_nodes(self) -> None:
        """Nodes may have come or gone."""
        if self._nodes.has_changed:
            self._nodes.has_changed = False
            self._actor.look_at_devices()

    def kill(self, model: str) -> None:
        """The oldest running replica of a model dies."""
        replica = next((one for one in self._of(model) if one.state is ReplicaState.RUNNING), None)
        if replica is None:
            return
        self._end(replica)
        self._on_replica(model, replica.name, False)
        replica.die()

    def counts(self, model: str) -> FleetCounts:
        """How many replicas a model has."""
        replicas = list(self._of(model))
        states = [one.state for one in replicas]
        running = [one for one in replicas if one.state is ReplicaState.RUNNING]
        slots = [one.usable_slots for one in running]
        now = self._clock.now
        return FleetCounts(
            running=len(running),
            starting=sum(state in PRESENT and state is not ReplicaState.RUNNING for state in states),
            target=self._targets[model],
            unplaced=states.count(ReplicaState.UNPLACED),
            blocked=states.count(ReplicaState.WAITING),
            stopping=states.count(ReplicaState.DRAINING),
            executing=sum([len(one.runs) - one.rows for one in replicas]),
            slots=math.fsum(slots) / max(1, len(slots)),
            rows=sum([one.rows for one in replicas]),
            kv_use=math.fsum(min(1.0, one.kv_use) for one in running) / max(1, len(running)),
            slot_use=math.fsum(one.slot_use for one in running) / max(1, len(running)),
            starting_s=max((now - one.placed_s for one in replicas if one.state in AT_WORK), default=0.0),
        )

    def room(self, model: str) -> int:
        """Further replicas of a model for which there are GPUs now."""
        return self._nodes.room(self._plans[model].profile.gpus)

    def replica_s(self, model: str) -> float:
        """Seconds for which replicas of a model have had their GPUs so far."""
        now = self._clock.now
        present = sum(now - one.placed_s for one in self._of(model) if one.place is not None)
        return self._replica_s[model] + present

    # Inside

    def _of(self, model: str) -> Iterator[Replica]:
        return (one for one in self.replicas.values() if one.plan.name == model)

    def _end_order(self, replica: Replica) -> tuple[bool, int, int]:
        on_node = 0 if replica.place is None else self._nodes.replicas_on(replica.place.node)
        return replica.state is ReplicaState.RUNNING, on_node, -replica.number

    def _start(self, plan: ModelPlan) -> Replica:
        self._started += 1
        name = f"{plan.name}-{self._started}"
        replica = self.replicas[name] = Replica(name, self._started, plan, self._clock)
        self._place(replica)
        return replica

    def _place(self, replica: Replica) -> None:
        profile = replica.plan.profile
        place = self._nodes.place(profile.gpus)
        if place is None:
            return
        replica.place = place
        replica.placed_s = self._clock.now
        replica.state = ReplicaState.WAITING
        ranks = tuple(Rank(place.node, gpu) for gpu in place.gpus)
        process = (place.node, ((replica.number, 0),))
        size = profile.memory_bytes
        replica.report = EngineReport(
            replica.name, replica.plan.name, ranks, size, size, processes=(process,), slots=profile.slots
        )
        self._report([replica])

    def _report(self, replicas: Iterable[Replica]) -> None:
        """Replicas report to the quota actor, as an engine does every second; in one event of it, for speed."""
        reports = [(replica, replica.report) for replica in replicas if replica.report is not None]
        if self._actor.away or not reports:
            return
        replies = self._actor.quota.on_engines([report for _, report in reports], self._clock.now)
        for (replica, report), reply in zip(reports, replies, strict=True):
            if reply.holds != report.holds:
                replica.report = report = replace(report, holds=reply.holds)
            if replica.state is ReplicaState.WAITING and reply.may_load:
                replica.state = ReplicaState.STARTING
                replica.report = replace(report, loading=True)
                start_s = replica.plan.profile.draw_start_s(self._draw)
                self._clock.after(start_s, partial(self._ready, replica))

    def _ready(self, replica: Replica) -> None:
        """A replica takes requests from now on, unless it was ended or is ready already."""
        if replica.state is not ReplicaState.STARTING or replica.report is None:
            return
        profile = replica.plan.profile
        replica.state = ReplicaState.RUNNING
        size = profile.gpus * profile.memory_bytes
        replica.report = replace(replica.report, loading=False, kv_tokens=profile.kv_tokens, kv_bytes=size)
        self._report([replica])
        self._actor.moved()
        self._on_replica(replica.plan.name, replica.name, True)

    def _stop(self, replica: Replica) -> None:
        if replica.state is not ReplicaState.RUNNING:
            self._end(replica, is_gone=True)
            return
        replica.state = ReplicaState.DRAINING
        self._on_replica(replica.plan.name, replica.name, False)
        self._clock.after(replica.plan.drain_s, partial(self._move_runs, replica))

    def _move_runs(self, replica: Replica) -> None:
        """A replica has drained for as long as it may: what it still runs goes on elsewhere."""
        for run in list(replica.runs.values()):
            run.on_stop()

    def _end_drained(self) -> None:
        for replica in list(self.replicas.values()):
            if replica.state is ReplicaState.DRAINING and not replica.runs:
                self._end(replica, is_gone=True)

    def _end(self, replica: Replica, *, is_gone: bool = False) -> None:
        """A replica has ended. `is_gone`: in order, and its memory is free; else the quota actor has to find out."""
        replica.state = ReplicaState.ENDED
        del self.replicas[replica.name]
        if replica.place is not None:
            self._nodes.leave(replica.place)
            self._replica_s[replica.plan.name] += self._clock.now - replica.placed_s
        if is_gone and replica.report is not None and not self._actor.away:
            self._actor.quota.on_engine(replace(replica.report, gone=True), self._clock.now)
            self._actor.moved()

    def _report_all(self) -> None:
        self._report(self.replicas.values())
        self._actor.moved()

    def _look_for_dead(self) -> None:
        """The quota actor looks for the processes of silent engines, and of ended ones whose memory is not free yet."""
        quota = self._actor.quota
        silent = [report.owner for report in quota.silent_engines(self._clock.now)]
        for owner in [*silent, *quota.ending_engines()]:
            if owner not in self.replicas:
                quota.on_processes_gone(owner, self._clock.now)
        self._actor.moved()

    def _count_tokens(self) -> None:
        for replica in self.replicas.values():
            replica.count_tokens()
