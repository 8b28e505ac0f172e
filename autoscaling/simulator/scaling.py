"""Serve's controller and our policy in virtual time: the reported numbers, the decision, the delays, the target.

The numbers are as old as in production: each router and the engines report theirs every `metrics_interval_s`, routers
in turn, and a decision is made every `control_s` from the newest. What a router has not reported for `STALE_INTERVALS`
counts no more. Serve's delays follow the decision (`serve_delays`), then its bounds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from autoscaling.policies import STALE_INTERVALS, Cause, ClassSignals, Decision, ReplicaPolicy, Signals, merged
from autoscaling.simulator.clock import Clock
from autoscaling.simulator.fleet import Fleet, FleetCounts
from autoscaling.simulator.router import VirtualRouter
from autoscaling.simulator.serve_delays import AT_ONCE, NOTHING_STANDS, StandingDecision, target_after_delays
from autoscaling.simulator.world import ModelPlan
from serve_app.core.shared_queue import ClassCounts
from serve_app.core.token_rates import TokenRates


class TargetChange(NamedTuple):
    """A new target of a model, and the decision that has led to it."""

    at_s: float
    model: str
    before: int
    target: int
    reason: str
    cause: Cause


class RouterNumbers(NamedTuple):
    """What a router has reported of a model."""

    at_s: float
    waiting: int
    granted: int
    rows: int
    classes: tuple[ClassCounts, ...]
    waiting_tokens: int
    rates: TokenRates


@dataclass(slots=True)
class ModelScaling:
    """The scaling of one model.

    Args:
        is_silent: whether a router, by its place, reports no numbers now.
        changes: of its target, in order. causes: of all decisions. cause: of the last one.
    """

    plan: ModelPlan
    policy: ReplicaPolicy
    clock: Clock
    fleet: Fleet
    routers: Sequence[VirtualRouter]
    is_silent: Callable[[int], bool]
    changes: list[TargetChange] = field(default_factory=list)
    causes: Counter[Cause] = field(default_factory=Counter)
    cause: Cause | None = None
    _reported: dict[int, RouterNumbers] = field(default_factory=dict)
    _engines: FleetCounts = field(default_factory=FleetCounts)
    _standing: StandingDecision = NOTHING_STANDS

    def start(self) -> None:
        """Begin to report."""
        scaling = self.plan.scaling
        interval_s = scaling.metrics_interval_s
        for place in range(len(self.routers)):
            first_s = interval_s * place / len(self.routers)
            self.clock.after(first_s, partial(self._report_for_ever, place))
        self.clock.every(interval_s, self.report_engines)

    def signals(self) -> Signals:
        """What the policy sees now."""
        scaling = self.plan.scaling
        now = self.clock.now
        stale_s = STALE_INTERVALS * scaling.metrics_interval_s
        fresh = [numbers for numbers in self._reported.values() if now - numbers.at_s <= stale_s]
        counts = self.fleet.counts(self.plan.name)
        engines = self._engines
        classes = _merged([counts for numbers in fresh for counts in numbers.classes])
        return Signals(
            running=counts.running,
            target=counts.target,
            waiting=float(sum(numbers.waiting for numbers in fresh)),
            granted=float(sum(numbers.granted for numbers in fresh)),
            rows=float(sum(min(numbers.rows, numbers.waiting + numbers.granted) for numbers in fresh)),
            executing=float(engines.executing),
            complete=len(fresh) == len(self.routers),
            cold_start_requested=not counts.running and any(self._waiting(router) for router in self.routers),
            min_replicas=scaling.min_replicas,
            max_replicas=scaling.max_replicas,
            target_ongoing=scaling.target_ongoing,
            look_back_s=scaling.look_back_s,
            now=now,
            blocked=float(counts.blocked),
            unplaced=counts.unplaced,
            stopping=counts.stopping,
            in_time=sum([one.in_time for one in classes]),
            slots=engines.slots,
            start_s=self.plan.profile.start_s,
            classes=classes,
            waiting_tokens=float(sum([numbers.waiting_tokens for numbers in fresh])),
            arrived_tokens_s=sum([numbers.rates.arrived for numbers in fresh]),
            served_tokens_s=sum([numbers.rates.served for numbers in fresh]),
            kv_use=engines.kv_use,
            slot_use=engines.slot_use,
            starting_s=counts.starting_s,
            room=self.fleet.room(self.plan.name),
        )

    def decide(self) -> tuple[Signals, Decision]:
        """What the policy sees and wants."""
        signals = self.signals()
        return signals, self.policy.decide(signals)

    def follow(self, signals: Signals, decision: Decision) -> None:
        """What Serve's controller makes of a decision."""
        scaling = self.plan.scaling
        model = self.plan.name
        delays = AT_ONCE if self.policy.has_own_delays else scaling.delays
        self.cause = decision.cause
        self.causes[decision.cause] += 1
        target, self._standing = target_after_delays(
            decision.replicas, signals.running, signals.target, delays, self._standing, signals.now
        )
        target = min(max(target, scaling.min_replicas), scaling.max_replicas)
        if target != signals.target:
            change = TargetChange(signals.now, model, signals.target, target, decision.reason, decision.cause)
            self.changes.append(change)
            self.fleet.set_target(model, target)
        self.fleet.look_at_nodes()
        self.fleet.follow_target(model)

    def _waiting(self, router: VirtualRouter) -> int:
        return router.queue.pending.count(self.plan.name)

    def _report_for_ever(self, place: int) -> None:
        if not self.is_silent(place):
            self.report_router(place)
        self.clock.after(self.plan.scaling.metrics_interval_s, partial(self._report_for_ever, place))

    def report_router(self, place: int) -> None:
        """A router reports its numbers."""
        router = self.routers[place]
        model = self.plan.name
        now = self.clock.now
        granted = router.queue.in_flight.count(model)
        classes = router.by_class(model)
        tokens = router.queue.pending.tokens(model)
        rates = router.flows[model].rates(now)
        self._reported[place] = RouterNumbers(
            now, self._waiting(router), granted, router.rows[model], classes, tokens, rates
        )

    def report_engines(self) -> None:
        """All engines report their numbers."""
        self._engines = self.fleet.counts(self.plan.name)


def _merged(counts: Iterable[ClassCounts]) -> tuple[ClassSignals, ...]:
    """The classes of all routers, from the highest, as `autoscaling.readings` reads them."""
    ordered = sorted(counts, key=lambda part: part.request_class, reverse=True)
    return merged(ClassSignals(part.request_class.label, *part[1:]) for part in ordered)
