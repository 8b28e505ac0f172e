"""One model in one router: how its requests get to a replica, and to another one when that replica is lost.

A request that takes slots waits in the queue (`serve_app.router.model_queue`) for its grant; work that takes no slot
(tokenizing) goes to any replica at once. Then both are submitted on a channel of `serve_app.router.replicas`, wait for
the first frames and relay them.

Invariant: a request survives the loss of its replica at any time. If its client has received nothing, it begins anew;
else another replica continues it and drops what the client has, if the engines can do that (`router.runs`).

An answer that is not streamed is collected before the client receives any of it, so until then it begins anew. What
the lost engine made of it is discarded: it counts as the tenant's queue use, but not as tokens sent to it. Of a
continued stream each token counts once; in the queue its prompt counts once for each run.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace

from serve_app.core.kv_budget import KvBudget
from serve_app.core.queue import Arrival, Preempt, WaitReason
from serve_app.core.routing import AffinityKey, RetryBudget, TargetReason
from serve_app.core.times import MAX_RETRY_PAUSE_S
from serve_app.core.token_rates import TokenFlow, TokenRates
from serve_app.errors import EngineUnreachable, NotFound, ServeAppError
from serve_app.ray_adapter import Handle
from serve_app.router.cold_start import ColdStartTrigger
from serve_app.router.model_queue import ModelQueue
from serve_app.router.queue_client import QueueClient
from serve_app.router.replicas import ReplicaSet, ResultReporter
from serve_app.router.request_grant import RequestGrant
from serve_app.router.runs import Aside, LossLimit, RequestRuns, RunEnd, RunResult
from serve_app.router.unqueued import UnqueuedTurns
from serve_app.settings import AdmissionSettings, ModelSettings
from serve_app.system import EventKind, event
from serve_app.transport import EngineInfo, Frame, ResponseStream, Submit, UnreadBytes

logger = logging.getLogger("ray.serve")

RETRY_PAUSE_S = 0.05  # before a failed replica that stays in use may get the same request again; doubles each time
UNQUEUED_RETRY_S = 0.25  # between attempts of work that takes no slot and so cannot wait in the queue

MakeSubmit = Callable[[int], Submit]  # makes the request from its number in the channel
Relay = Callable[[ResponseStream, list[Frame]], Awaitable[None]]


class ModelRouter:
    """The queue, the replicas and the channels of one model, for one router replica.

    Args:
        settings: of the model.
        handle: its engine deployment.
        admission: bounds of the queue.
        router_id: this router's name.
        routers: how many router replicas share the engines.
        client: the queue client of all models.
        unread: counts unread bytes of all requests of this router; None: counts this model's alone.
    """

    def __init__(
        self,
        settings: ModelSettings,
        handle: Handle,
        admission: AdmissionSettings,
        router_id: str,
        routers: int,
        client: QueueClient,
        unread: UnreadBytes | None = None,
    ) -> None:
        self.settings = settings
        self._admission = admission
        self._handle = handle
        self.unread = UnreadBytes() if unread is None else unread
        self.queue = ModelQueue(client, settings.name, admission.queue_policy())
        self.replica_set = ReplicaSet(handle, router_id, self.queue, settings, routers, self.unread, self.stop_drained)
        self.cold_start = ColdStartTrigger(settings.name, handle.call_any_replica)
        self.placed: Counter[tuple[str, str]] = Counter()  # grants, by kind of affinity key and how they were placed
        self._reported_start_s: float | None = None  # seconds of the last start that `_warn_slow_start` checked
        self._unqueued = UnqueuedTurns(lambda: len(self.replica_set.running))
        self._drained: asyncio.Event | None = None  # set once the last request of a closing model has ended
        self._flow = TokenFlow()  # of the requests that count for the number of replicas
        self.active = Counter[bool]()  # requests from arrival to end, by whether they count for the number of replicas
        self._pausing = 0  # requests between two attempts, in no queue meanwhile
        self.retry_budget = RetryBudget()
        self._running: dict[str, RequestGrant] = {}  # granted requests, by id
        self.queue.on_preempt = self._on_preempt

    async def start(self) -> None:
        """Follow the replica set; returns once the first set is known."""
        await self._handle.watch(self._replicas_changed)
        self._update_cold_start()
        self.queue.open()

    def configure(self, settings: ModelSettings, admission: AdmissionSettings, routers: int) -> None:
        """Apply changed settings, also to waiting requests; a smaller queue refuses none of these."""
        self.settings = settings
        self._admission = admission
        self.replica_set.configure(settings, routers)
        self.queue.configure(admission.queue_policy())
        self._update_cold_start()

    async def close(self) -> None:
        """Close a model that is gone: refuse waiting requests, wait for running ones, then release the engines."""
        self._drained = asyncio.Event()
        self.queue.refuse_all(self._not_found_error)
        self.replica_set.close()
        await self.cold_start.close()
        if self.active.total():
            await self._drained.wait()
        self.queue.close()
        await self._handle.close()

    @property
    def waiting(self) -> int:
        """Number of requests that wait: in the queue, for a first replica, or between two attempts."""
        return self.queue.waiting + self.cold_start.unqueued_waiting + self._pausing

    @property
    def waiting_anywhere(self) -> int:
        """The same of all routers, as far as this one knows."""
        return max(self.waiting, self.queue.waiting_anywhere)

    def others_wait(self, tenant: str) -> bool:
        """Whether a request of a tenant other than this one waits at any router, as far as this one knows."""
        aside = self.cold_start.unqueued_waiting + self._pausing  # whose these are is not counted
        return aside > 0 or self.queue.core.others_wait(self.settings.name, tenant)

    def token_rates(self, now: float) -> TokenRates:
        """Tokens a second of the requests that count for the number of replicas. O(requests that run here)."""
        return self._flow.rates(now, sum(grant.served_tokens for grant in self._running.values() if grant.is_load))

    @property
    def ready(self) -> bool:
        """Whether a replica runs."""
        return bool(self.replica_set.running)

    @property
    def limits(self) -> EngineInfo:
        """The limits of the model's engines: while none has reported them, those of the settings, any length if they
        have none, and blocks of one token."""
        model = self.settings
        longest = model.max_model_len or sys.maxsize
        return self.replica_set.info or EngineInfo(model.name, [], longest, model.max_num_seqs, 0, 0)

    async def info(self) -> EngineInfo | None:
        """The limits of the model's engines; None while no engine has reported them."""
        if self.replica_set.info is None and self.ready:
            await self.replica_set.fetch_info()
        return self.replica_set.info

    async def serve(
        self, request: Arrival, make: MakeSubmit, relay: Relay, key: AffinityKey | None, runs: RequestRuns
    ) -> None:
        """Wait for a grant, submit the request, and pass the stream with its first frames to `relay`.

        When it is stopped for others (`Preempt`), it waits again and is continued with what it has produced.

        When its replica is lost, the request waits again, ahead of what has arrived since, and begins anew or is
        continued from where its client is; `relay` then gets the next run's stream with its first frames. It pauses
        first if the lost replica stays in use (a transient failure, or no more replicas may be ejected).

        Raises:
            Overloaded, Unavailable: refused by the queue. EngineFailed: too many engines were lost, the client has a
                part of what cannot be continued, or no replica took it. NotFound: the model is gone.
        """
        trace = runs.trace
        name = request.request_id
        with self._count_active(self._is_load(runs), request.cost_tokens):
            trace.ahead = self.queue.core.ahead(self.settings.name, request.request_class)
            limit = LossLimit(self._admission.max_wait_s, time.monotonic())
            avoid: str | None = None
            pause_s = RETRY_PAUSE_S
            error: ServeAppError | None = None  # with which its last run ended
            while True:
                try:
                    self._check_open()
                    grant = await self.acquire(request, key, avoid, runs)
                except ServeAppError as refused:
                    if (refusal := runs.on_refused(refused, error)) is not None:
                        raise refusal from None
                    continue
                if not isinstance(error, EngineUnreachable):
                    limit.begin(time.monotonic())
                self._running[name] = grant
                try:
                    result = await self._try_replica(grant.replica_id, make, relay, limit, runs, grant)
                finally:
                    self._release(self._running.pop(name))
                    trace.kv_token_s += grant.kv_token_s
                error = result.error
                match result.end:
                    case RunEnd.ANSWERED:
                        self.retry_budget.on_answer()
                        return
                    case RunEnd.FAILED:
                        raise runs.on_failed(result)
                    case RunEnd.STOPPED:
                        runs.on_stopped(result.stream, keeps_place=grant.keeps_place, is_drained=grant.is_drained)
                        avoid = None
                    case RunEnd.RESTARTS | RunEnd.CONTINUES if runs.is_sent_back(error, grant.replica_id):
                        avoid = None
                    case RunEnd.RESTARTS if runs.may_leave and not self._has_other(grant.replica_id):
                        raise runs.on_failed(result)
                    case RunEnd.RESTARTS | RunEnd.CONTINUES:
                        end = result.end.value
                        logger.warning("Request %s lost replica %s and %s: %s", name, grant.replica_id, end, error)
                        runs.on_lost(result, limit, time.monotonic())
                        avoid = grant.replica_id
                        if self.replica_set.is_usable(avoid):
                            await self._pause(pause_s)
                            pause_s = min(2.0 * pause_s, MAX_RETRY_PAUSE_S)

    def _has_other(self, replica_id: str) -> bool:
        """Whether another replica takes requests."""
        replicas = self.replica_set
        return any(replicas.is_usable(name) for name in replicas.running if name != replica_id)

    async def _pause(self, pause_s: float) -> None:
        """Between two attempts of a request."""
        self._pausing += 1
        try:
            await asyncio.sleep(max(pause_s, self.retry_budget.take(time.monotonic())))
        finally:
            self._pausing -= 1

    def _may_leave(self, runs: RequestRuns) -> bool:
        """Whether a request goes to another model instead of waiting for a replica of this one; if the model starts
        from zero, it waits, since nothing else would start it."""
        return runs.may_leave and not runs.client_has_part and not self.cold_start.scales_from_zero

    def _on_preempt(self, stop: Preempt) -> None:
        grant = self._running.get(stop.request_id)
        if grant is not None and self._drained is None:  # else no replica would take it
            grant.stop(keeps_place=stop.keeps_place)

    def stop_drained(self, replica_id: str) -> int:
        """Stop the requests on a replica that drains and that others can continue without loss; returns how many stay
        there."""
        on_it = [grant for grant in self._running.values() if grant.replica_id == replica_id]
        for grant in on_it:
            if grant.arrival.preemptible and self._drained is None:
                grant.stop(is_drained=True)
        stay = sum(not grant.is_stopping for grant in on_it)
        moved = len(on_it) - stay
        logger.info(
            "Replica %s drains: %d requests continue elsewhere, %d stay",
            *(replica_id, moved, stay),
            extra=event(EventKind.HEALTH, self.settings.name, replica=replica_id, moved=moved, stay=stay),
        )
        return stay

    async def serve_unqueued(self, make: MakeSubmit, relay: Relay, runs: RequestRuns, tenant: str) -> None:
        """As `serve` for work that takes no slot (tokenizing): in turns of the tenants (`router.unqueued`) on any
        replica, or on the first one to start; after a loss on the next one."""
        with self._count_active():
            limit = LossLimit(self._admission.max_wait_s, time.monotonic())
            while True:
                now = time.monotonic()
                runs.on_queued(now)
                runs.aside = Aside(WaitReason.NO_REPLICA, now)
                if self._may_leave(runs) and not self.ready:
                    raise self.queue.no_replica_error()
                await self.cold_start.wait_for_replica(self._admission.no_replica_wait_s, self._admission.max_queued)
                runs.aside = Aside(WaitReason.TURN, now)
                async with self._unqueued.turn(tenant, self._admission.max_wait_s) as end_turn:
                    self._check_open()
                    replica_id = self.replica_set.next_replica(runs.operation)
                    result = await self._try_replica(replica_id, make, relay, limit, runs, on_ended=end_turn)
                match result.end:
                    case RunEnd.ANSWERED:
                        return
                    case RunEnd.FAILED:
                        raise runs.on_failed(result)
                    case _ if runs.is_sent_back(result.error, replica_id):
                        continue
                    case _:
                        runs.on_lost(result, limit, time.monotonic())
                await asyncio.sleep(max(UNQUEUED_RETRY_S, self.retry_budget.take(time.monotonic())))

    async def acquire(
        self, request: Arrival, key: AffinityKey | None, avoid: str | None, runs: RequestRuns
    ) -> RequestGrant:
        """Wait in the queue for a grant; on the replica of the affinity key, if it has free slots.

        Args:
            avoid: the replica on which the request was lost; None: it was not.

        Raises:
            Overloaded, Unavailable: refused.
        """
        ignorant = self.replica_set.ignorant_of(runs.operation)
        if self.replica_set.info is None and self.ready:
            self.replica_set.refresh_info()
        target = self.replica_set.choose_target(request, key, avoid)
        affinity = None if target is None or target.replica_id in ignorant else target.replica_id
        trace = runs.trace
        measure = runs.trace.measure
        to_continue = runs.to_continue
        produced = 0 if to_continue is None else to_continue.tokens
        request = replace(runs.with_counted_prompt(request), produced_tokens=produced)
        has_run = runs.has_run
        was_granted = has_run or bool(runs.sent_back)
        budget = KvBudget(request, self.replica_set.info, measure.cost.max_output_tokens, measure.at_once)
        now = time.monotonic()
        first_queued_at = runs.on_queued(now)
        arrival = replace(
            request,
            affinity=affinity,
            avoid_replicas=ignorant,
            accepted=request.accepted or was_granted,
            cost_tokens=budget.tokens,
            session=request.session if not has_run and affinity == request.affinity else None,
            deadline=None if was_granted else request.deadline,  # it was granted in time
            age_s=now - first_queued_at if was_granted and runs.keeps_place else 0.0,
            preemptible=request.preemptible and self._continues,
            preempted=trace.preempted,
            fingerprint=None if to_continue is None else to_continue.fingerprint,
        )
        with self.cold_start.count_waiting():
            check = functools.partial(self.replica_set.ignorant_of, runs.operation)
            granted = await self.queue.acquire(arrival, may_leave=self._may_leave(runs), check=check)
        if target is not None and affinity == granted.replica_id:
            trace.reason = target.reason
            trace.route = target.route
        else:
            trace.reason = TargetReason.MOST_FREE
            trace.route = None
        trace.waited_s = granted.waited_s
        trace.waited_for = granted.waited_for
        self.placed["none" if key is None else key.reason, trace.route or trace.reason] += 1
        is_load = self._is_load(runs)
        return RequestGrant(self.queue, self.replica_set, arrival, granted.replica_id, budget, is_load)

    async def _try_replica(
        self,
        replica_id: str,
        make: MakeSubmit,
        relay: Relay,
        limit: LossLimit,
        runs: RequestRuns,
        grant: RequestGrant | None = None,
        on_ended: Callable[[], None] = lambda: None,
    ) -> RunResult:
        """Submit a request and relay its frames; returns how the run has ended.

        Args:
            grant: released as soon as the replica is done with the request, before a slow client has read everything;
                `on_ended` is called then, too. None: the work takes no slot.
        """
        runs.on_replica(replica_id, time.monotonic())
        stream: ResponseStream | None = None
        failure: ServeAppError | None = None
        reporter = ResultReporter(self.replica_set, replica_id, time.monotonic())

        def ended() -> None:
            if stream is None:
                return  # the connection broke before the request was submitted
            on_ended()
            if runs.timeline is not None:
                runs.timeline.on_done(time.monotonic())
            if stream.error is not None:
                reporter.on_error(stream.error, connection_lost=stream.connection_lost)
                reporter.report()  # first: the slots of a replica that is ejected now are not granted again
            if grant is None:
                self.replica_set.drop_gone()
            else:
                grant.release(stream.usage)

        def make_run(number: int) -> Submit:
            return runs.begin(make(number))

        on_tokens = None if grant is None else grant.on_output
        try:
            channel = self.replica_set.channel(replica_id)
            async with channel.run(make_run, ended, on_tokens, runs.to_continue) as stream:
                runs.pace = stream.pace
                if grant is not None:
                    grant.on_submitted(stream)
                frames = await stream.next()
                reporter.on_first_frame(frames[0].status)
                runs.on_first_frame(time.monotonic())
                await relay(stream, frames)
        except ServeAppError as error:
            failure = error
            if stream is None:
                reporter.on_error(error)
        finally:
            reporter.report()
        return runs.on_ended(failure, stream, limit, time.monotonic(), engines_continue=self._continues)

    @property
    def _continues(self) -> bool:
        """Whether the model's engines can continue what another one has begun."""
        return self.replica_set.info is not None and self.replica_set.info.continues

    @contextlib.contextmanager
    def _count_active(self, is_load: bool = True, tokens: int = 0) -> Iterator[None]:
        """Count a request from its arrival to its end, and the tokens that it is estimated to need."""
        self._check_open()
        self._flow.arrived += tokens * is_load
        self.active[is_load] += 1
        try:
            yield
        finally:
            self.active[is_load] -= 1
            if self._drained is not None and not self.active.total():
                self._drained.set()

    def _release(self, grant: RequestGrant) -> None:
        """A run is over."""
        grant.release()
        if grant.is_load:
            arrival = grant.arrival
            self._flow.on_run_end(grant.served_tokens, 0 if arrival.has_begun else arrival.cost_tokens)

    def _is_load(self, runs: RequestRuns) -> bool:
        """Whether a request counts for the number of replicas."""
        return self.settings.replicas.counts(is_row=runs.trace.is_row)

    def _check_open(self) -> None:
        """Raises NotFound once the model is gone: no request begins, and one that lost its replica is not retried."""
        if self._drained is not None:
            raise self._not_found_error()

    def _not_found_error(self) -> NotFound:
        return NotFound(
            f"the model {self.settings.name!r} was taken out of service", param="model", code="model_not_found"
        )

    def _update_cold_start(self) -> None:
        self.cold_start.update(scales_from_zero=not self.settings.replicas.min_replicas, running=self.ready)

    def _replicas_changed(self, names: frozenset[str]) -> None:
        new = names - self.replica_set.running
        self.replica_set.set_running(names)
        self._update_cold_start()
        self._warn_slow_start()
        if new:
            self.replica_set.refresh_info()

    def _warn_slow_start(self) -> None:
        """Log a warning, once per start, if requests are refused before a replica can start."""
        start_s = self.queue.replica_start.measured_s
        if start_s is None or start_s == self._reported_start_s:
            return
        self._reported_start_s = start_s
        held_s = min(self._admission.no_replica_wait_s, self._admission.max_wait_s)
        if start_s > held_s:
            logger.warning(
                "Model %s needs %.0f s to start a replica, and requests are refused after %.0f s. Set "
                "admission.no_replica_wait_s and max_wait_s above the first figure, or min_replicas to 1",
                self.settings.name,
                start_s,
                held_s,
            )
