"""How one request gets to a replica, and to another one when that is lost.

A request of the engine's batch waits in the queue for its place; work that takes no slot (tokenizing) goes to any
replica at once. What is done there is the same: hand in, wait for the first frames, relay.

Invariant: a request of which its client has seen nothing survives the loss of its replica, whenever that comes; one of
which it has seen something is not tried again.

An answer that is not streamed is collected before its client sees any of it, so until then it runs again as if new.
What the lost engine had made is discarded: it counts as the tenant's use of the queue, and not as tokens it was sent.
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
from serve_app.core.routing import Aim, Key, Why
from serve_app.errors import EngineFailed, EngineUnreachable, ServeAppError
from serve_app.router.cold_start import Doorbell
from serve_app.router.kv_budget import Budget
from serve_app.router.model_queue import ModelQueue
from serve_app.router.replicas import ReplicaSet
from serve_app.router.request_grant import RequestGrant
from serve_app.router.request_trace import RequestTrace
from serve_app.transport import EngineInfo, Frame, Stream, Submit

logger = logging.getLogger("ray.serve")

MAX_LOSSES = 3  # engines that may die under one request before it is taken for the cause
PAUSE_S = 0.05  # before a replica that failed and stays in use may get the same request again; doubles each time
LONGEST_PAUSE_S = 1.0  # as long as the first ejection: what lets no request through is looked at once a second
ASIDE_RETRY_S = 0.25  # between attempts of work that takes no slot, and so cannot wait in the queue

Make = Callable[[int], Submit]  # the request, with the number it is given
Relay = Callable[[Stream, list[Frame]], Awaitable[None]]


class Losses:
    """How often the engine of one request was lost. Pure.

    Args:
        give_up_at: when it has waited as long as anyone may.
    """

    def __init__(self, give_up_at: float) -> None:
        self.give_up_at = give_up_at
        self._died = 0

    def final(self, error: EngineFailed, now: float, ran_s: float = 0.0) -> bool:
        """Count a loss; whether it is the client's to know. An engine that never had the request says nothing of it;
        the seconds that another had it, frozen perhaps, were no waiting."""
        if not isinstance(error, EngineUnreachable):
            self._died += 1
            self.give_up_at += ran_s
        return self._died >= MAX_LOSSES or now >= self.give_up_at


class Attempts:
    """The requests of one model in one router, each until it is answered.

    Args:
        queue, replicas: of the model.
        cold_start: asks Serve for the first replica while requests wait and none runs.
        info: what the engines have told of themselves; None: nothing yet.
        check_open: raises once the model is gone, so that nothing new is begun.
    """

    def __init__(
        self,
        queue: ModelQueue,
        replicas: ReplicaSet,
        cold_start: Doorbell,
        info: Callable[[], EngineInfo | None],
        check_open: Callable[[], None],
    ) -> None:
        self._queue, self._replicas, self._cold_start = queue, replicas, cold_start
        self._info, self._check_open = info, check_open
        self.pausing = 0  # requests between two attempts, in no queue meanwhile
        self.placed: Counter[tuple[str, str]] = Counter()  # grants, by what the request's key is and how it was placed

    async def queued(
        self, asked: Arrival, key: Key | None, make: Make, relay: Relay, max_wait_s: float, trace: RequestTrace
    ) -> None:
        """Through the queue. A request that is lost before its client has seen of it waits again, no longer than
        `max_wait_s` in all. Where the lost replica stays in use, since no more may be ejected or it was an accident,
        the request pauses before.

        Raises:
            Overloaded, Unavailable: refused by the queue. EngineFailed: as `_run`. NotFound: the model is gone.
        """
        losses = Losses(time.monotonic() + max_wait_s)
        avoid, pause_s = None, PAUSE_S
        while True:
            self._check_open()
            grant = await self.acquire(asked, key, avoid, trace)
            try:
                lost = await self._run(grant.replica_id, make, relay, losses, trace, grant)
            finally:
                grant.release()
                trace.kv_token_s += grant.kv_token_s
            if lost is None:
                return
            logger.warning("request %s waits again: %s", asked.request_id, lost.message)
            trace.losses += 1
            avoid = grant.replica_id
            if self._replicas.usable(avoid):
                with self._pausing():
                    await asyncio.sleep(pause_s)
                pause_s = min(2.0 * pause_s, LONGEST_PAUSE_S)

    async def aside(
        self,
        make: Make,
        relay: Relay,
        max_wait_s: float,
        any_replica: Callable[[], Awaitable[str]],
        trace: RequestTrace,
    ) -> None:
        """On whichever replica `any_replica` names, at once; lost, on the next one. Raises as `_run`."""
        losses = Losses(time.monotonic() + max_wait_s)
        while await self._run(await any_replica(), make, relay, losses, trace) is not None:  # noqa: ASYNC110 - a pause
            await asyncio.sleep(ASIDE_RETRY_S)

    async def acquire(
        self, asked: Arrival, key: Key | None = None, avoid: str | None = None, trace: RequestTrace | None = None
    ) -> RequestGrant:
        """Wait in the queue for a place; where its key's requests run, if there is room.

        Args:
            avoid: the replica that the request was lost on; None: it was not.

        Raises:
            Overloaded, Unavailable: refused.
        """
        trace = RequestTrace() if trace is None else trace
        aim = self._aim(asked, key, avoid)
        affinity = None if aim is None else aim.replica_id
        budget = Budget(asked, self._info(), trace.most_tokens, trace.sequences)
        arrival = dataclasses.replace(
            asked,
            affinity=affinity,
            accepted=avoid is not None,
            cost_tokens=budget.tokens,
            session=asked.session if avoid is None and affinity == asked.affinity else None,
        )
        with self._cold_start.waiting():
            decided = await self._queue.acquire(arrival)
        aimed = aim is not None and aim.replica_id == decided.replica_id
        trace.why, trace.route = (aim.why, aim.route) if aim is not None and aimed else (Why.MOST_FREE, None)
        trace.waited_s = decided.waited_s
        self.placed[key.why if key is not None else "none", trace.route or trace.why] += 1
        return RequestGrant(self._queue, self._replicas, arrival, decided, budget)

    async def _run(
        self,
        replica_id: str,
        make: Make,
        relay: Relay,
        losses: Losses,
        trace: RequestTrace,
        grant: RequestGrant | None = None,
    ) -> EngineFailed | None:
        """Hand a request in and relay what comes; returns the loss if its client has seen nothing of it.

        Args:
            grant: its place, which is given back as soon as the replica is done with the request: that is before its
                slowest reader is. None: it takes no slot.

        Raises:
            EngineFailed: the client has to know: it has seen a part, or engines keep dying.
        """
        trace.replica_id = replica_id
        stream: Stream | None = None
        handed_in, sent = time.monotonic(), self._replicas.sent(replica_id)

        def ended() -> None:
            if grant is None:
                self._replicas.forget_gone()
            else:
                grant.release(None if stream is None else stream.usage)

        on_tokens = None if grant is None else grant.produced
        try:
            async with self._replicas.channel(replica_id).run(make, ended, on_tokens) as stream:
                frames = await stream.next()
                sent.began(frames[0].status)
                await relay(stream, frames)
            return None
        except ServeAppError as error:
            sent.broke(error, lost=stream is not None and stream.lost)
            seen = stream is not None and stream.seen
            now = time.monotonic()
            if seen or not isinstance(error, EngineFailed) or losses.final(error, now, now - handed_in):
                raise
            return error
        finally:
            sent.over()

    def _aim(self, arrival: Arrival, key: Key | None, avoid: str | None) -> Aim | None:
        """Where it should run: on its open session's replica, at its key's home, anywhere but where it was lost."""
        given = arrival.affinity
        if given is not None and avoid is None and self._replicas.usable(given):
            return Aim(given, Why.SESSION)
        return self._replicas.aim(key, arrival.slots, avoid)

    @contextlib.contextmanager
    def _pausing(self) -> Iterator[None]:
        self.pausing += 1
        try:
            yield
        finally:
            self.pausing -= 1
