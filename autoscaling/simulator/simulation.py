"""One run of a world: requests in, their ends and what the replicas did out.

Invariant: one world, one load and one policy give one history; whatever is drawn comes from the world's seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from autoscaling.policies import BudgetedModel, Decision, OngoingRequestsPolicy, ReplicaPolicy, within_gpu_budget
from autoscaling.simulator.batches import VirtualBatchWorker
from autoscaling.simulator.clock import Clock
from autoscaling.simulator.exchange import VirtualActor
from autoscaling.simulator.fleet import Fleet
from autoscaling.simulator.nodes import Nodes
from autoscaling.simulator.requests import RequestEnd, SimulatedRequest
from autoscaling.simulator.router import VirtualRouter
from autoscaling.simulator.scaling import ModelScaling, TargetChange
from autoscaling.simulator.world import ModelPlan, ReplicaDeath, RouterSilence, World

SETTLE_S = 2.0  # before the first request: routers know the replicas, and have credit
MakePolicy = Callable[[ModelPlan], ReplicaPolicy]


@dataclass(frozen=True, slots=True)
class ReplicaUse:
    """What a model's replicas have cost: hours of their GPUs, from place to end, and their price; and its targets."""

    model: str
    gpu_hours: float
    cost: float
    changes: tuple[TargetChange, ...]


def _ongoing(_: ModelPlan) -> ReplicaPolicy:
    return OngoingRequestsPolicy()


class Simulation:
    """One run.

    Args:
        requests: in the order of `at_s`; read as they come.
        consume: takes each request's end.
        make_policy: the policy of a model.

    Raises:
        ConfigError: a request asks for a model that is not simulated; also later, when it is read.
    """

    def __init__(
        self,
        world: World,
        requests: Iterable[SimulatedRequest],
        consume: Callable[[RequestEnd], None],
        make_policy: MakePolicy = _ongoing,
    ) -> None:
        self.clock = Clock()
        self._consume = consume
        self._requests: Iterator[SimulatedRequest] = iter(requests)
        self._silent_until = [0.0] * world.routers
        self.offered = 0
        self.ended = 0
        self._is_read = False  # whether the last request has come
        self._then: dict[int, Callable[[RequestEnd], None]] = {}  # what takes the end of a request besides, by number
        self._world = world
        self.nodes = Nodes(world.nodes, self.clock)
        self.actor = VirtualActor(self.clock, self.nodes.devices)
        self.fleet = Fleet(
            world, self.clock, self.nodes, self.actor, random.Random(f"{world.seed} starts"), self._on_replica
        )
        self.routers = [
            VirtualRouter(
                f"r{place}",
                world,
                self.clock,
                self.actor,
                self.fleet.replicas.get,
                random.Random(f"{world.seed} router {place}"),
                self._end,
            )
            for place in range(world.routers)
        ]
        self.scalings = [
            ModelScaling(plan, make_policy(plan), self.clock, self.fleet, self.routers, self._is_silent)
            for plan in world.models
        ]
        self.fleet.start_first()
        self.clock.run(SETTLE_S)
        self.began_s = self.clock.now
        for scaling in self.scalings:
            scaling.start()
        self.clock.every(min(plan.scaling.control_s for plan in world.models), self._control)
        self._plan_faults(world)
        self.batches = VirtualBatchWorker(world.batches, self.clock, self.began_s, self.actor, self.offer)
        self._plan_next()

    def run(self, most_s: float = float("inf")) -> None:
        """Until every request and every row has ended, or so many seconds from now."""
        self.clock.run(most_s, self.is_over)

    def is_over(self) -> bool:
        """Whether every request and every row has ended."""
        return self._is_read and self.ended == self.offered and self.batches.is_done

    def offer(self, request: SimulatedRequest, then: Callable[[RequestEnd], None] | None = None) -> None:
        """A client asks now, besides those of the load. `then` takes the request's end, after `consume`."""
        number = self.offered
        self.offered += 1
        if then is not None:
            self._then[number] = then
        self.routers[number % len(self.routers)].offer(number, request)

    def run_for(self, span_s: float) -> None:
        """So many seconds, whatever ends."""
        self.clock.run(span_s)

    def use(self) -> list[ReplicaUse]:
        """What the replicas of each model have cost so far."""
        found = []
        for scaling in self.scalings:
            profile = scaling.plan.profile
            hours = self.fleet.replica_s(scaling.plan.name) * profile.gpus / 3600.0
            found.append(ReplicaUse(scaling.plan.name, hours, hours * profile.gpu_hour_price, tuple(scaling.changes)))
        return found

    @property
    def node_hours(self) -> float:
        """Hours of all nodes so far, whatever ran there."""
        return self.nodes.node_s / 3600.0

    # Inside

    def _control(self) -> None:
        """One look of Serve's controller."""
        decided = {scaling.plan.name: scaling.decide() for scaling in self.scalings}
        wanted: Mapping[str, Decision] = {model: decision for model, (_, decision) in decided.items()}
        if self._world.max_gpus is not None:
            models = [
                BudgetedModel(plan.name, decided[plan.name][0].target, wanted[plan.name], plan.profile.gpus)
                for plan in self._world.models
            ]
            wanted = within_gpu_budget(models, self._world.max_gpus)
        for scaling in self.scalings:
            model = scaling.plan.name
            scaling.follow(decided[model][0], wanted[model])

    def _plan_next(self) -> None:
        request = next(self._requests, None)
        if request is None:
            self._is_read = True
            return
        self._world.model(request.model)
        self.clock.at(self.began_s + request.at_s, lambda: self._come(request))

    def _come(self, request: SimulatedRequest) -> None:
        self.offer(request)
        self._plan_next()

    def _end(self, end: RequestEnd) -> None:
        self.ended += 1
        self._consume(end)
        then = self._then.pop(end.number, None)
        if then is not None:
            then(end)

    def _on_replica(self, model: str, name: str, usable: bool) -> None:
        for router in self.routers:
            router.set_replica(model, name, usable=usable)

    def _is_silent(self, place: int) -> bool:
        return self.clock.now < self._silent_until[place]

    def _plan_faults(self, world: World) -> None:
        for fault in world.faults:
            match fault:
                case ReplicaDeath(at_s, model):
                    self.clock.at(self.began_s + at_s, partial(self.fleet.kill, model))
                case RouterSilence(at_s, for_s, router):
                    self.clock.at(self.began_s + at_s, partial(self._silence, router, for_s))

    def _silence(self, router: int, for_s: float) -> None:
        self._silent_until[router] = self.clock.now + for_s
