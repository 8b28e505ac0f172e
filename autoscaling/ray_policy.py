"""The adapter between Serve's controller and the scaling policies: an application-level policy class.

It runs in the controller at every tick of its loop (0.1 s), so it never blocks and never raises: an exception would
stop the scaling of this application and of all after it. On an error a deployment keeps its present target, the error
is counted, and the first error of each kind is logged with the deployment's name.

Invariant: only numbers of replicas that Serve counts as running and that reported lately are used.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from ray.serve.config import AutoscalingContext
from ray.util.metrics import Counter

from autoscaling import readings
from autoscaling.placement_hook import StartPlacer, placer_of_this_process
from autoscaling.policies import (
    POLICIES,
    STALE_INTERVALS,
    BudgetedModel,
    Cause,
    Decision,
    OngoingRequestsPolicy,
    ReplicaPolicy,
    Signals,
    within_gpu_budget,
    within_scale_up_limit,
)
from autoscaling.readings import RouterCounts
from autoscaling.recorded_decisions import DecisionRecorder, keep_decisions
from autoscaling.scaling_events import ScalingEvents
from autoscaling.snapshot import shown, snapshot_of
from autoscaling.unplaced import NONE, ReplicaCounts, UnplacedReplicas
from serve_app.names import ROUTER
from serve_app.ray_adapter import end_on_sigterm, session_folder
from serve_app.settings import DEFAULT_POLICY
from serve_app.system import keep_events, set_up_log

logger = logging.getLogger("ray.serve")

Contexts = Mapping[Any, AutoscalingContext]  # by Serve's DeploymentID
States = dict[Any, dict[str, Any]]
# By replica: its newest timestamp, and when that was first seen by the local clock. Of a replica's clock only the
# progress counts.
Reports = dict[Hashable, tuple[float, float]]


def newest_reports(
    before: Reports, reported: Iterable[tuple[Hashable, float]], running: Iterable[Hashable], now: float
) -> Reports:
    """The newest reports of the running replicas; those reported now were seen now, if their timestamps differ."""
    alive = frozenset(running)
    seen = {replica: entry for replica, entry in before.items() if replica in alive}
    for replica, at in reported:
        if replica in alive and (replica not in seen or seen[replica][0] != at):
            seen[replica] = (at, now)
    return seen


@dataclass(slots=True)
class _Deployment:
    """What is remembered of a deployment; one that is removed and added again starts anew."""

    policy: ReplicaPolicy = field(default_factory=OngoingRequestsPolicy)
    advisor: ReplicaPolicy | None = None
    advice: Decision | None = None  # its last one
    policy_name: str = DEFAULT_POLICY
    recorder: DecisionRecorder | None = None
    signals: Signals | None = None  # of the last decision
    reports: Reports = field(default_factory=dict)
    target: int | None = None  # the last one; a change is logged with its reason
    reason: str = ""
    starting: Mapping[str, float] = field(default_factory=dict)  # by replica, when it was first seen
    seen: tuple[Signals, Decision] | None = None  # at the last decision that did not fail


class ScalingPolicy:
    """An application's scaling policy: engine deployments follow their load, the router deployment is not scaled.

    Args:
        clock: seconds, monotonic.
        policies: by deployment, the names of the policy that decides and of one that advises, or None; a deployment
            that is missing has the default and no advice.
        budget: `max_gpus` of all these deployments together, and `gpus` of a replica, by deployment; None: no bound.
        starts: arguments of `placer_of_this_process`; None: Ray alone decides where engines start.
        record: whether decisions are kept with their signals (`recorded_decisions`).
        placing: a start placer instead of it, for tests.
        unplaced: for tests.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        starts: Mapping[str, Any] | None = None,
        policies: Mapping[str, tuple[str, str | None]] = MappingProxyType({}),
        budget: Mapping[str, Any] | None = None,
        record: bool = False,
        placing: StartPlacer | None = None,
        unplaced: UnplacedReplicas | None = None,
    ) -> None:
        end_on_sigterm()  # of the controller
        set_up_log("controller")
        self._events = ScalingEvents(keep_events(session_folder(), f"controller-{os.getpid()}"))
        source = f"controller-{os.getpid()}"
        self._decisions = keep_decisions(session_folder(), source) if record else None
        self._clock = clock
        self._placing = placing
        self._unplaced = unplaced or UnplacedReplicas()
        self._policies = policies
        self._budget = budget
        if starts is not None:
            try:
                self._placing = placer_of_this_process(**starts)
            except Exception:  # it would prevent the application's deployment
                logger.exception(
                    "Ray alone places the engines of %s because the start placer failed. Report this traceback",
                    starts.get("application"),
                )
        self.deployments: dict[str, _Deployment] = {}
        self._logged: set[tuple[str, str]] = set()
        self._uncounted = 0
        self.errors = Counter(
            "serve_app_scaling_errors",
            description="Scaling decisions that failed; the deployment kept its target.",
            tag_keys=("deployment", "error"),
        )

    def __call__(self, contexts: Contexts) -> tuple[dict[Any, int], States]:
        """Decisions and reasons by deployment id; Serve applies delays and bounds to them."""
        try:
            return self._decide_all(contexts)
        except Exception as error:  # noqa: BLE001 - see above: no exception may reach the controller
            self._failed("application", error)
            return {}, {}

    def _decide_all(self, contexts: Contexts) -> tuple[dict[Any, int], States]:
        now = self._clock()
        if self._placing is not None:
            self._placing.tick()
        named = {context.deployment_name: (deployment, context) for deployment, context in contexts.items()}
        unplaced = self._unplaced.tick({context.app_name for context in contexts.values()})
        self.deployments = {name: self.deployments.get(name) or self._new(name) for name in named}
        counts, routers = self._routers(named, now)
        decisions: dict[Any, int] = {}
        states: States = {}
        scaled = {name: (context.running_replicas, context.target_num_replicas) for name, (_, context) in named.items()}
        self._events.on_deployments(scaled | {name: (one.running, one.target) for name, one in unplaced.items()})
        decided: dict[str, Decision] = {}
        for name, (_, context) in named.items():
            if name == ROUTER:
                continue
            try:
                known = counts.get(name, RouterCounts())
                decided[name] = self._decide(name, context, known, routers, unplaced.get(name, NONE), now)
            except Exception as error:  # noqa: BLE001 - an error of one model must not affect others
                self._failed(name, error)
                decided[name] = Decision(context.target_num_replicas, 0.0, "the policy failed", Cause.FAILED)
        for name, decision in self._within_budget(named, decided).items():
            deployment, context = named[name]
            # Instead of Serve's count, which includes each channel, call of `info` and cold start call. Serve reads it
            # later: for its log and gauge, and, if no replica runs, to start one replica without a policy. In that case
            # it gets zero, since the policy may want several replicas at once.
            if decision.cause is not Cause.FAILED:
                context.total_num_requests = decision.load if context.current_num_replicas else 0.0
            decisions[deployment] = decision.replicas
            states[deployment] = _state(decision, context.target_num_replicas)
            try:
                states[deployment] = self._kept(name, decision, context.target_num_replicas)
            except Exception as error:  # noqa: BLE001 - as above
                self._failed(name, error)
        if self._events.is_snapshot_due(now):
            decided_on = {name: memory.seen for name, memory in self.deployments.items() if memory.seen is not None}
            self._events.snapshot({name: snapshot_of(*seen) for name, seen in decided_on.items()}, now, time.time())
        return decisions, states

    def _new(self, name: str) -> _Deployment:
        policy, advisor = self._policies.get(name, (DEFAULT_POLICY, None))
        recorder = None if self._decisions is None else DecisionRecorder(name, policy, self._decisions.write)
        advising = None if advisor is None else POLICIES[advisor]()
        return _Deployment(POLICIES[policy](), advising, policy_name=policy, recorder=recorder)

    def _routers(self, named: Mapping[str, Any], now: float) -> tuple[dict[str, RouterCounts], frozenset[Hashable]]:
        """The routers' counts, by engine deployment, and the running routers."""
        if ROUTER not in named:
            return {}, frozenset()
        context = named[ROUTER][1]
        running = frozenset(context.running_replicas)
        try:
            raw = context.raw_metrics or {}
            usable = self._usable(ROUTER, context, raw, now)
            return readings.router_counts(raw, usable), running
        except Exception as error:  # noqa: BLE001 - the engines' own numbers remain usable
            self._failed(ROUTER, error)
            return {}, running

    def _decide(
        self,
        name: str,
        context: AutoscalingContext,
        counts: RouterCounts,
        routers: frozenset[Hashable],
        replicas: ReplicaCounts,
        now: float,
    ) -> Decision:
        memory = self.deployments[name]
        signals = self._signals(name, context, counts, routers, replicas, now)
        decision = memory.policy.decide(signals)
        if memory.recorder is not None:
            memory.recorder.add(signals, decision)
        self._advise(name, memory, signals)
        if self._placing is not None:
            more = max(0, decision.replicas - max(signals.target, signals.min_replicas, 1))
            decision = within_scale_up_limit(
                decision, more, self._placing.scale_up_limit(context.deployment_id, signals.target, more)
            )
        memory.signals = signals
        return decision

    def _signals(
        self,
        name: str,
        context: AutoscalingContext,
        counts: RouterCounts,
        routers: frozenset[Hashable],
        replicas: ReplicaCounts,
        now: float,
    ) -> Signals:
        config: Any = context.config
        raw = context.raw_metrics or {}
        queued = readings.count(context.total_queued_requests) or 0.0
        engines = readings.engine_figures(raw, self._usable(name, context, raw, now))
        target = context.target_num_replicas
        return Signals(
            running=context.current_num_replicas,
            target=target,
            waiting=counts.waiting,
            granted=counts.granted,
            rows=counts.rows,
            executing=engines.executing,
            complete=bool(routers) and routers <= counts.routers,
            cold_start_requested=not context.current_num_replicas and queued > 0,
            min_replicas=context.capacity_adjusted_min_replicas,
            max_replicas=context.capacity_adjusted_max_replicas,
            target_ongoing=config.get_target_ongoing_requests(),
            look_back_s=config.look_back_period_s,
            now=now,
            blocked=counts.blocked,
            unplaced=replicas.unplaced,
            outdated=replicas.outdated,
            stopping=replicas.stopping,
            in_time=counts.in_time,
            slots=engines.slots,
            start_s=engines.start_s,
            classes=counts.classes,
            waiting_tokens=counts.waiting_tokens,
            arrived_tokens_s=counts.arrived_tokens_s,
            served_tokens_s=counts.served_tokens_s,
            kv_use=engines.kv_use,
            slot_use=engines.slot_use,
            starting_s=_starting_s(self.deployments[name], replicas.starting, now),
            room=None if self._placing is None else self._placing.room(context.deployment_id, target),
        )

    def _advise(self, name: str, memory: _Deployment, signals: Signals) -> None:
        """Ask the second policy, of its own last number: what the other one wants is no start of its own."""
        if memory.advisor is None:
            return
        advised = signals.target if memory.advice is None else memory.advice.replicas
        memory.advice = None
        try:
            memory.advice = memory.advisor.decide(replace(signals, target=advised))
        except Exception as error:  # noqa: BLE001 - advice changes nothing, not even so
            self._failed(name, error)

    def _within_budget(
        self, named: Mapping[str, tuple[Any, AutoscalingContext]], decided: Mapping[str, Decision]
    ) -> Mapping[str, Decision]:
        """The decisions within the bound of all GPUs, if there is one."""
        if self._budget is None:
            return decided
        gpus = self._budget["gpus"]
        models = [
            BudgetedModel(name, named[name][1].target_num_replicas, decision, gpus.get(name, 0.0))
            for name, decision in decided.items()
        ]
        return within_gpu_budget(models, self._budget["max_gpus"])

    def _kept(self, name: str, decision: Decision, target: int) -> dict[str, Any]:
        """Keep a decision for the events, and as what Serve shows of it."""
        memory = self.deployments[name]
        if decision.cause is Cause.FAILED or memory.signals is None:
            return _state(decision, target)
        if memory.target is not None and memory.target != target:
            self._events.on_target(name, memory.target, target, memory.reason)
        memory.target = target
        memory.reason = decision.reason
        memory.seen = memory.signals, decision
        also = {"policy": memory.policy_name, "signals": shown(memory.signals)}
        return _state(decision, target, memory.advice) | also

    def _usable(
        self, name: str, context: AutoscalingContext, raw: readings.Raw, now: float
    ) -> Callable[[Hashable], bool]:
        """Whether a replica's numbers count: it runs, and its reports are fresh."""
        config: Any = context.config
        stale_s = STALE_INTERVALS * config.metrics_interval_s
        memory = self.deployments[name]
        seen = newest_reports(memory.reports, readings.latest_reports(raw), context.running_replicas, now)
        memory.reports = seen
        return lambda replica: replica in seen and now - seen[replica][1] <= stale_s

    def _failed(self, name: str, error: Exception) -> None:
        """Count and log `error`; called while it is handled."""
        kind = type(error).__name__
        if (name, kind) not in self._logged:
            self._logged.add((name, kind))
            logger.exception(
                "Deployment %s keeps its replicas because its scaling policy failed. Report this traceback", name
            )
        try:
            self.errors.inc(tags={"deployment": name, "error": kind})
        except Exception:
            if not self._uncounted:
                logger.exception("Deployment %s has scaling errors that no metric counts. Report this traceback", name)
            self._uncounted += 1


def _starting_s(memory: _Deployment, starting: frozenset[str], now: float) -> float:
    """For how long the oldest of the replicas that start now has started, since it was first seen; 0: none does."""
    memory.starting = {replica: memory.starting.get(replica, now) for replica in starting}
    return now - min(memory.starting.values(), default=now)


def _state(decision: Decision, target: int, advice: Decision | None = None) -> dict[str, Any]:
    """What Serve keeps of a decision until the next one, for status and scrapes (`operations.scraped`)."""
    advised = {} if advice is None else {"advised": advice.replicas, "advice": advice.reason}
    return advised | {
        "reason": decision.reason,
        "cause": decision.cause.value,
        "wanted": decision.replicas,
        "target": target,
    }
