"""How a request gets to a replica, and to another one when that replica is lost.

A request that takes slots waits in the queue for its grant; work that takes no slot (tokenizing) goes to any replica at
once. Then both are submitted, wait for the first frames and relay them.

Invariant: a request whose client has received nothing survives the loss of its replica at any time; a request whose
client has received a part is not retried.

An answer that is not streamed is collected before the client receives any of it, so until then it can be retried from
the start. Output of the lost engine is discarded: it counts as the tenant's queue use, but not as tokens sent to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator

from serve_app.core.queue import Arrival
from serve_app.core.routing import AffinityKey, RoutingTarget, TargetReason
from serve_app.errors import EngineFailed, EngineUnreachable, ServeAppError
from serve_app.router.cold_start import ColdStartTrigger
from serve_app.router.kv_budget import KvBudget
from serve_app.router.model_queue import ModelQueue
from serve_app.router.replicas import ReplicaSet
from serve_app.router.request_grant import RequestGrant
from serve_app.router.request_trace import RequestTrace
from serve_app.transport import EngineInfo, Frame, ResponseStream, Submit

logger = logging.getLogger("ray.serve")

MAX_LOSSES = 3  # engines that may die under one request before the request counts as the cause
RETRY_PAUSE_S = 0.05  # before a failed replica that stays in use may get the same request again; doubles each time
MAX_RETRY_PAUSE_S = 1.0  # as long as the first ejection: a replica that fails every request is tried once a second
UNQUEUED_RETRY_S = 0.25  # between attempts of work that takes no slot and so cannot wait in the queue

MakeSubmit = Callable[[int], Submit]  # makes the request from its number in the channel
Relay = Callable[[ResponseStream, list[Frame]], Awaitable[None]]


class RetryLimit:
    """Counts the engines that one request has lost. Pure.

    Args:
        give_up_at: end of the longest permitted wait.
    """

    def __init__(self, give_up_at: float) -> None:
        self.give_up_at = give_up_at
        self._engines_lost = 0

    def count_loss(self, error: EngineFailed, now: float, ran_s: float = 0.0) -> bool:
        """Count a loss; returns whether the client must get the error. An engine that never received the request is
        not counted; the seconds on an engine that received it, perhaps frozen, do not count as waiting."""
        if not isinstance(error, EngineUnreachable):
            self._engines_lost += 1
            self.give_up_at += ran_s
        return self._engines_lost >= MAX_LOSSES or now >= self.give_up_at


class Retries:
    """Runs the requests of one model in one router, each until it is answered.

    Args:
        queue, replicas: of the model.
        cold_start: requests the first replica from Serve while requests wait and no replica runs.
        info: the last reported limits of the engines; None: none reported yet.
        check_open: raises once the model is gone, so that no new attempt begins.
    """

    def __init__(
        self,
        queue: ModelQueue,
        replicas: ReplicaSet,
        cold_start: ColdStartTrigger,
        info: Callable[[], EngineInfo | None],
        check_open: Callable[[], None],
    ) -> None:
        self._queue, self._replicas, self._cold_start = queue, replicas, cold_start
        self._info, self._check_open = info, check_open
        self.pausing = 0  # requests between two attempts, in no queue meanwhile
        self.placed: Counter[tuple[str, str]] = Counter()  # grants, by kind of affinity key and how they were placed

    async def run_queued(
        self,
        request: Arrival,
        key: AffinityKey | None,
        make: MakeSubmit,
        relay: Relay,
        max_wait_s: float,
        trace: RequestTrace,
    ) -> None:
        """Run a request through the queue. When its replica is lost before the client has received anything, it waits
        again, at most `max_wait_s` in all. It pauses first if the lost replica stays in use (a transient failure, or
        no more replicas may be ejected).

        Raises:
            Overloaded, Unavailable: refused by the queue. EngineFailed: as `_try_replica`. NotFound: the model is gone.
        """
        losses = RetryLimit(time.monotonic() + max_wait_s)
        avoid, pause_s = None, RETRY_PAUSE_S
        while True:
            self._check_open()
            grant = await self.acquire(request, key, avoid, trace)
            try:
                lost = await self._try_replica(grant.replica_id, make, relay, losses, trace, grant)
            finally:
                grant.release()
                trace.kv_token_s += grant.kv_token_s
            if lost is None:
                return
            logger.warning("request %s waits again: %s", request.request_id, lost.message)
            trace.losses += 1
            avoid = grant.replica_id
            if self._replicas.is_usable(avoid):
                with self._count_pausing():
                    await asyncio.sleep(pause_s)
                pause_s = min(2.0 * pause_s, MAX_RETRY_PAUSE_S)

    async def run_unqueued(
        self,
        make: MakeSubmit,
        relay: Relay,
        max_wait_s: float,
        any_replica: Callable[[], Awaitable[str]],
        trace: RequestTrace,
    ) -> None:
        """Run at once on the replica `any_replica` names, after a loss on the next one. Raises as `_try_replica`."""
        losses = RetryLimit(time.monotonic() + max_wait_s)
        while await self._try_replica(await any_replica(), make, relay, losses, trace) is not None:  # noqa: ASYNC110 - a pause
            await asyncio.sleep(UNQUEUED_RETRY_S)

    async def acquire(
        self,
        request: Arrival,
        key: AffinityKey | None = None,
        avoid: str | None = None,
        trace: RequestTrace | None = None,
    ) -> RequestGrant:
        """Wait in the queue for a grant; on the replica of the affinity key, if it has free slots.

        Args:
            avoid: the replica on which the request was lost; None: it was not.

        Raises:
            Overloaded, Unavailable: refused.
        """
        trace = RequestTrace() if trace is None else trace
        aim = self._choose_target(request, key, avoid)
        affinity = None if aim is None else aim.replica_id
        budget = KvBudget(request, self._info(), trace.max_kv_tokens, trace.sequences)
        arrival = dataclasses.replace(
            request,
            affinity=affinity,
            accepted=avoid is not None,
            cost_tokens=budget.tokens,
            session=request.session if avoid is None and affinity == request.affinity else None,
        )
        with self._cold_start.count_waiting():
            decided = await self._queue.acquire(arrival)
        aimed = aim is not None and aim.replica_id == decided.replica_id
        trace.reason, trace.route = (
            (aim.reason, aim.route) if aim is not None and aimed else (TargetReason.MOST_FREE, None)
        )
        trace.waited_s = decided.waited_s
        self.placed[key.reason if key is not None else "none", trace.route or trace.reason] += 1
        return RequestGrant(self._queue, self._replicas, arrival, decided, budget)

    async def _try_replica(
        self,
        replica_id: str,
        make: MakeSubmit,
        relay: Relay,
        losses: RetryLimit,
        trace: RequestTrace,
        grant: RequestGrant | None = None,
    ) -> EngineFailed | None:
        """Submit a request and relay its frames; returns the error if the request can be retried.

        Args:
            grant: released as soon as the replica is done with the request, before a slow client has read everything.
                None: the work takes no slot.

        Raises:
            EngineFailed: the client must get the error: it has received a part, or too many engines were lost.
        """
        trace.replica_id = replica_id
        stream: ResponseStream | None = None
        handed_in, sent = time.monotonic(), self._replicas.track_result(replica_id)

        def ended() -> None:
            if grant is None:
                self._replicas.drop_gone()
            else:
                grant.release(None if stream is None else stream.usage)

        on_tokens = None if grant is None else grant.on_output
        try:
            async with self._replicas.channel(replica_id).run(make, ended, on_tokens) as stream:
                frames = await stream.next()
                sent.on_first_frame(frames[0].status)
                await relay(stream, frames)
            return None
        except ServeAppError as error:
            sent.on_error(error, connection_lost=stream is not None and stream.connection_lost)
            seen = stream is not None and stream.client_has_seen
            now = time.monotonic()
            if seen or not isinstance(error, EngineFailed) or losses.count_loss(error, now, now - handed_in):
                raise
            return error
        finally:
            sent.report()

    def _choose_target(self, arrival: Arrival, key: AffinityKey | None, avoid: str | None) -> RoutingTarget | None:
        """The replica of the open session, or that of the affinity key, or any replica but the one it was lost on."""
        given = arrival.affinity
        if given is not None and avoid is None and self._replicas.is_usable(given):
            return RoutingTarget(given, TargetReason.SESSION)
        return self._replicas.choose_target(key, arrival.slots, avoid)

    @contextlib.contextmanager
    def _count_pausing(self) -> Iterator[None]:
        self.pausing += 1
        try:
            yield
        finally:
            self.pausing -= 1
