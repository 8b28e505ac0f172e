"""One router: how its requests get to a replica, and to another one when that is lost or needed for others.

It does what `serve_app.router` does, by the same cores: the limits of its tenant, the estimate, the preferred replica,
the KV budget, the queue, the run, the end. A request goes on with the tokens that its client has, as production's do.
Messages between a router and its replicas take no time.

Invariant: every request that is offered ends exactly once.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial

from autoscaling.simulator.clock import Clock
from autoscaling.simulator.engine import SimulatedSequence
from autoscaling.simulator.exchange import RouterLink, VirtualActor
from autoscaling.simulator.profiles import EngineProfile
from autoscaling.simulator.replica import Replica
from autoscaling.simulator.requests import RequestEnd, SimulatedRequest
from autoscaling.simulator.world import ClassPlan, World
from serve_app.core.body_bounds import BYTES_PER_TOKEN
from serve_app.core.estimate import EstimateSource, Estimator, ObservedUse, RequestCost
from serve_app.core.kv_budget import KvBudget
from serve_app.core.limits import Charged, LimitDecision, LimitedRequest
from serve_app.core.queue import Action, Arrival, Grant, Preempt, Refuse
from serve_app.core.receipts import ServiceLevel, SloVerdict, judge
from serve_app.core.routing import FREE_SHARE, BoundedRing
from serve_app.core.shared_queue import ClassCounts
from serve_app.core.token_rates import TokenFlow
from serve_app.types import Outcome, RequestClass

MAX_LOSSES = 3  # as in `serve_app.router.runs`
KV_BLOCK_TOKENS = 16  # vLLM's default
NO_PLAN = ClassPlan()
TOO_LARGE = "too_large"


@dataclass(frozen=True, slots=True)
class ProfileLimits:
    """The limits of an engine, as it would report them."""

    kv_cache_tokens: int
    max_model_len: int
    kv_block_tokens: int = KV_BLOCK_TOKENS


@dataclass(slots=True, eq=False)
class OfferedRequest:
    """A request between its arrival and its end.

    Args:
        queued_s: when it first came to the queue.
        produced: by its earlier runs. `delivered`: what its client has by the last count.
        again: tokens that later runs computed again.
        keeps_place: see `Preempt`.
    """

    number: int
    request_id: str
    request: SimulatedRequest
    cost: RequestCost
    offered_s: float
    queued_s: float = 0.0
    granted_s: float | None = None
    first_s: float | None = None
    produced: int = 0
    delivered: int = 0
    runs: int = 0
    again: int = 0
    losses: int = 0
    preempted: int = 0
    keeps_place: bool = True
    replica: str = ""
    budget: KvBudget | None = None  # of its present run, or of the one that it waits for
    run: RouterRun | None = None
    has_ended: bool = False


@dataclass(slots=True, eq=False)
class RouterRun:
    """A run of a request on a replica."""

    router: VirtualRouter
    offered: OfferedRequest
    replica: Replica
    budget: KvBudget
    sequence: SimulatedSequence

    @property
    def is_row(self) -> bool:
        """See `ReplicaRun`."""
        return self.offered.request.is_row

    def on_tokens(self, produced: int) -> None:
        """See `ReplicaRun`."""
        self.router.on_tokens(self, produced)

    def on_end(self) -> None:
        """See `ReplicaRun`."""
        self.router.on_tokens(self, self.offered.request.output_tokens)
        self.router.on_answered(self)

    def on_stop(self) -> None:
        """See `ReplicaRun`."""
        self.router.stop(self, keeps_place=True)

    def on_lost(self, produced: int) -> None:
        """See `ReplicaRun`."""
        self.router.on_tokens(self, produced)
        self.router.on_lost(self)


class VirtualRouter:
    """See the module.

    Args:
        replica: the replica of this name; None: it is gone.
        draw: of the replica choice.
        on_end: takes what has become of each request.
    """

    def __init__(
        self,
        name: str,
        world: World,
        clock: Clock,
        actor: VirtualActor,
        replica: Callable[[str], Replica | None],
        draw: random.Random,
        on_end: Callable[[RequestEnd], None],
    ) -> None:
        self.name = name
        self._world = world
        self._clock = clock
        self._replica = replica
        self._draw = draw
        self._on_end = on_end
        self._estimator = Estimator()
        self._rings = {plan.name: BoundedRing(free_share=FREE_SHARE / world.routers) for plan in world.models}
        self._limits = {plan.name: _limits_of(plan.profile) for plan in world.models}
        self._open: dict[str, OfferedRequest] = {}  # by request id
        self._levels = {level: ServiceLevel(plan.ttft_slo_s) for level, plan in world.classes.items()}
        # of the requests that count for the number of replicas
        self.flows: dict[str, TokenFlow] = {plan.name: TokenFlow() for plan in world.models}
        self.rows: Counter[str] = Counter()  # of batches among them, by model
        self.link = RouterLink(
            name, clock, actor, lambda: world.delay_s, self._carry_out, self._on_charged, world.turn_s
        )
        self.queue = self.link.queue
        for plan in world.models:
            self.queue.serve(plan.name, plan.queue)

    # Replicas

    def set_replica(self, model: str, name: str, *, usable: bool) -> None:
        """Whether a replica takes requests now; one that does not is dropped once it runs none of this router."""
        ring = self._rings[model]
        if usable:
            ring.set_slots(name, self._world.model(model).profile.slots)
        ring.set_open(name, usable)
        self.link.after(self.queue.set_reachability(model, name, usable, self._clock.now))
        self._drop_unused(model, name, usable=usable)

    def _drop_unused(self, model: str, name: str, *, usable: bool) -> None:
        if not usable and not self.queue.in_flight.by_engine.get(name):
            self._rings[model].drop_replica(name)
            self.queue.in_flight.drop_engine(name)
            self.link.after(())

    def by_class(self, model: str) -> tuple[ClassCounts, ...]:
        """Its requests by class."""
        return self.queue.by_class(model, self._levels, self._clock.now)

    # Requests

    def offer(self, number: int, request: SimulatedRequest) -> None:
        """A client asks."""
        now = self._clock.now
        size = round(request.prompt_tokens * BYTES_PER_TOKEN)
        cost = self._cost(request, size)
        offered = OfferedRequest(number, f"q{number}", request, cost, now)
        if request.prompt_tokens + request.output_tokens > self._limits[request.model].max_model_len:
            self._end(offered, Outcome.BAD_REQUEST, TOO_LARGE)
            return
        self._open[offered.request_id] = offered
        self.rows[request.model] += request.is_row
        patience_s = self._plan(request).patience_s
        if patience_s is not None:
            self._clock.after(patience_s, partial(self._leave, offered))
        if self._world.request_s:
            self._clock.after(self._world.request_s, partial(self._arrive, offered))
        else:
            self._arrive(offered)

    def _arrive(self, offered: OfferedRequest) -> None:
        """A request is read, and its client may have left meanwhile."""
        if offered.has_ended:
            return
        now = self._clock.now
        request = offered.request
        limits = self._world.limits.get(request.tenant)
        if limits is None:
            self._enter(offered)
            return
        charged = LimitedRequest(
            offered.request_id,
            ((f"tenant:{request.tenant}", limits),),
            offered.cost.tokens,
            0,
            request.fingerprint or b"%d" % offered.number,
            is_repeat=request.is_repeat,
        )
        decision = self.queue.charge(charged, now)
        self.link.after(())
        if decision is not None:
            self._on_charged(decision)

    def on_tokens(self, run: RouterRun, produced: int) -> None:
        """A run has produced so many tokens by now, with those of earlier runs."""
        offered = run.offered
        more = produced - offered.delivered
        if more <= 0:
            return
        now = self._clock.now
        offered.delivered = produced
        prompt = 0
        if offered.first_s is None:
            offered.first_s = now
            if not offered.preempted:  # else an earlier run has paid for it
                prompt = offered.request.prompt_tokens
                run.budget.correct_prompt(prompt)
        lacking = run.budget.on_output(more)
        if not run.is_row:
            self.flows[offered.request.model].served += more + prompt
        self.queue.in_flight.progress(offered.request_id, more, prompt)
        if lacking:
            self.queue.in_flight.grow(offered.request_id, lacking, now)
            self.link.after(())
        if prompt or lacking:
            run.replica.batch.set_mark(run.sequence, produced + run.budget.until_request)

    def on_answered(self, run: RouterRun) -> None:
        """A run has produced all."""
        request = run.offered.request
        self._estimator.observe(
            ObservedUse(
                request.tenant,
                request.model,
                round(request.prompt_tokens * BYTES_PER_TOKEN),
                request.prompt_tokens,
                request.output_tokens,
                is_cut_off=request.max_tokens is not None and request.output_tokens >= request.max_tokens,
            )
        )
        self._end(run.offered, Outcome.OK)
        self._release(run)

    def on_lost(self, run: RouterRun) -> None:
        """The replica of a run has died."""
        offered = run.offered
        offered.losses += 1
        self._release(run)
        if offered.losses >= MAX_LOSSES:
            self._end(offered, Outcome.ENGINE_FAILED)
        else:
            offered.produced = offered.delivered
            offered.keeps_place = True
            self._enter(offered, is_lost=True)

    def stop(self, run: RouterRun, *, keeps_place: bool) -> None:
        """Stop a run at its replica; the request goes on with what it has produced, here or elsewhere."""
        offered = run.offered
        if offered.run is not run:
            return  # it has ended meanwhile
        self.on_tokens(run, run.replica.stop(run))
        offered.produced = offered.delivered
        offered.preempted += 1
        offered.keeps_place = keeps_place
        self._release(run)
        self._enter(offered)

    # Inside

    def _cost(self, request: SimulatedRequest, size: int) -> RequestCost:
        """The estimate, as `serve_app.http.measuring` makes it: the client's bound until answers were observed."""
        bound = request.max_tokens
        cost = self._estimator.estimate(request.tenant, request.model, size, bound)
        if bound is not None and cost.source is EstimateSource.PRIOR:
            return cost._replace(output_tokens=bound)
        return cost

    def _plan(self, request: SimulatedRequest) -> ClassPlan:
        return self._world.classes.get(request.request_class, NO_PLAN)

    def _on_charged(self, decision: LimitDecision) -> None:
        offered = self._open.get(decision.request_id)
        if offered is None:
            return
        if isinstance(decision, Charged):
            self._enter(offered)
        else:
            self._end(offered, Outcome.REFUSED, decision.reason.value, decision.retry_after_s)

    def _enter(self, offered: OfferedRequest, *, is_lost: bool = False) -> None:
        """A request comes to the queue, for the first time or again. `is_lost`: after the loss of its replica."""
        now = self._clock.now
        request = offered.request
        has_run = offered.runs > 0
        if not has_run:
            offered.queued_s = now
            self.flows[request.model].arrived += 0 if request.is_row else offered.cost.tokens
        plan = self._plan(request)
        prompt = request.prompt_tokens if offered.first_s is not None else offered.cost.prompt_tokens
        arrival = Arrival(
            offered.request_id,
            request.request_class,
            request.tenant,
            cost_tokens=max(1, prompt + offered.cost.output_tokens),
            deadline=None if has_run or plan.deadline_s is None else offered.offered_s + plan.deadline_s,
            affinity=self._preferred(request, is_lost=is_lost),
            accepted=has_run,
            prompt_tokens=prompt,
            age_s=now - offered.queued_s if has_run and offered.keeps_place else 0.0,
            preemptible=self._world.preempts,
            preempted=offered.preempted,
            produced_tokens=offered.produced,
        )
        offered.budget = KvBudget(arrival, self._limits[request.model], request.max_tokens)
        arrival = replace(arrival, cost_tokens=offered.budget.tokens)
        self.link.after(self.queue.on_arrive(request.model, arrival, now))

    def _preferred(self, request: SimulatedRequest, *, is_lost: bool) -> str | None:
        """The replica on which a request should run; None: the queue chooses."""
        key: str | None = None
        if request.session is not None:
            key = f"{request.tenant}\0{request.session}"
        elif request.prefix_blocks:
            key = f"{request.tenant}\0{request.prefix_blocks[0]}"
        if key is None and not is_lost:
            return None
        choice = self._rings[request.model].choose(key, self._draw)
        return None if choice is None else choice.replica_id

    def _carry_out(self, actions: Iterable[Action]) -> None:
        for action in actions:
            offered = self._open.get(action.request_id)
            if offered is None:
                continue  # it has ended meanwhile
            match action:
                case Grant():
                    self._begin(offered, action.replica_id)
                case Refuse():
                    self._end(offered, Outcome.REFUSED, action.reason.value, action.retry_after_s)
                case Preempt() if offered.run is not None:  # a turn later, as in `serve_app.router.queue_client`
                    self._clock.after(0.0, partial(self.stop, offered.run, keeps_place=action.keeps_place))

    def _begin(self, offered: OfferedRequest, name: str) -> None:
        """A request was granted a replica, which is there while its router may use it."""
        replica = self._replica(name)
        budget = offered.budget
        assert replica is not None
        assert budget is not None
        request = offered.request
        if offered.runs:
            offered.again += request.prompt_tokens + offered.produced
        offered.runs += 1
        offered.replica = name
        if offered.granted_s is None:
            offered.granted_s = self._clock.now
        sequence = SimulatedSequence(
            request.prompt_tokens,
            request.output_tokens,
            RequestClass.CRITICAL - request.request_class,
            offered.produced,
            mark=offered.produced + budget.until_request,
            prefix_blocks=request.prefix_blocks,
            request=offered.request_id,
        )
        offered.run = RouterRun(self, offered, replica, budget, sequence)
        self._rings[request.model].add_load(name, 1)
        replica.begin(offered.run)

    def _release(self, run: RouterRun) -> None:
        """A run is over: its slot and tokens are free."""
        offered = run.offered
        request = offered.request
        name = run.replica.name
        offered.run = None
        ring = self._rings[request.model]
        ring.add_load(name, -1)
        made = run.budget.output_tokens
        prompt = request.prompt_tokens if offered.first_s is not None else None
        self.link.after(self.queue.on_done(offered.request_id, self._clock.now, prompt, made))
        account = self.queue.accounts.by_engine.get(name)
        self._drop_unused(request.model, name, usable=account is None or account.usable)

    def _leave(self, offered: OfferedRequest) -> None:
        """The client has had no first token for too long."""
        if offered.has_ended or offered.first_s is not None:
            return
        self.queue.limits.on_cancel(offered.request_id)
        run = offered.run
        if run is None:
            self._end(offered, Outcome.CANCELLED_QUEUED)
            self.link.after(self.queue.on_cancel(offered.request_id, self._clock.now))
        else:
            self._end(offered, Outcome.CANCELLED_RUNNING)
            run.replica.stop(run)
            self._release(run)

    def _end(
        self, offered: OfferedRequest, outcome: Outcome, refused: str = "", retry_after_s: float | None = None
    ) -> None:
        """A request has ended for its client."""
        offered.has_ended = True
        request = offered.request
        if self._open.pop(offered.request_id, None) is not None:
            self.rows[request.model] -= request.is_row
        now = self._clock.now
        used = offered.request.prompt_tokens + offered.delivered if offered.first_s is not None else None
        self.queue.limits.on_end(offered.request_id, used, 0, now)
        if used and not request.is_row:
            self.flows[request.model].arrived += used - offered.cost.tokens
        first_s = offered.first_s
        ttft_s = None if first_s is None else first_s - offered.offered_s
        level = ServiceLevel(self._plan(request).ttft_slo_s)
        verdict = judge(level, outcome, now - offered.offered_s, ttft_s, None)
        self._on_end(
            RequestEnd(
                offered.number,
                request.request_class,
                request.tenant,
                request.model,
                offered.offered_s,
                offered.granted_s,
                first_s,
                now,
                request.prompt_tokens,
                offered.delivered,
                outcome,
                refused,
                offered.replica,
                offered.runs,
                offered.again,
                verdict is SloVerdict.MET,
                offered.cost.tokens,
                retry_after_s,
            )
        )


def _limits_of(profile: EngineProfile) -> ProfileLimits:
    return ProfileLimits(profile.kv_tokens, profile.kv_tokens)
