"""One model as a router sees it: performs what the line (`core.admission`) decides, over channels to the replicas.

Invariant: a slot granted is given back exactly once, however the request ends; a request that has produced nothing for
its client survives the loss of its replica.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import logging
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

from serve_app.budget import Budget
from serve_app.channel import Channel, Stream
from serve_app.core.admission import (
    Action,
    Admission,
    Arrival,
    ClassBound,
    Grant,
    Policy,
    TenantPolicy,
    refusal_error,
)
from serve_app.core.sessions import Session
from serve_app.desk import Desk
from serve_app.doorbell import Doorbell
from serve_app.engine.protocol import EngineInfo, EngineLoad, Frame, Submit
from serve_app.errors import EngineFailed, EngineUnreachable, NotFound, Unavailable
from serve_app.serve_adapter import CALL_ERRORS, Handle, in_fresh_context
from serve_app.session_places import Draw, SessionPlaces, ahead
from serve_app.settings import AdmissionSettings, ModelSettings
from serve_app.types import RequestClass

logger = logging.getLogger("ray.serve")

MAX_LOSSES = 3  # engines that may die under one request before it is taken for the cause
ASIDE_RETRY_S = 0.25  # between attempts of work that takes no slot, and so cannot wait in the line
ASK_TIMEOUT_S = 1.0  # a scrape or a listing must not hang on a replica that does not answer
ASK_ERRORS = (TimeoutError, Unavailable, *CALL_ERRORS)  # the replica may leave while it is asked, or before
EJECT_S = 1.0  # a replica that failed a call gets nothing new for as long as Serve takes to notice a death


@dataclass(frozen=True, slots=True)
class Granted:
    """A place on a replica, and how long it took to get (seconds)."""

    replica_id: str
    waited_s: float


class Losses:
    """How often the engine of one request was lost. Pure.

    Args:
        give_up_at: when it has waited as long as anyone may.
    """

    def __init__(self, give_up_at: float) -> None:
        self.give_up_at = give_up_at
        self._died = 0

    def final(self, error: EngineFailed, now: float) -> bool:
        """Count a loss; whether it is the client's to know. An engine that never had the request says nothing of it."""
        self._died += not isinstance(error, EngineUnreachable)
        return self._died >= MAX_LOSSES or now >= self.give_up_at


Relay = Callable[[Stream, list[Frame], Granted], Awaitable[None]]


def _policy(admission: AdmissionSettings) -> Policy:
    return Policy(
        max_queued=admission.max_queued,
        max_wait_s=admission.max_wait_s,
        no_replica_wait_s=admission.no_replica_wait_s,
        max_queued_tokens=admission.max_queued_tokens,
        classes={
            RequestClass[name.upper()]: ClassBound(bound.max_queued, bound.max_queued_tokens)
            for name, bound in admission.classes.items()
        },
        tenants={name: TenantPolicy(tenant.weight, tenant.share) for name, tenant in admission.tenants.items()},
        trickle_share=admission.trickle_share,
    )


class ModelLine:
    """The line, the replicas and the channels of one model, for one router replica.

    Args:
        model: the model's settings.
        handle: its engine deployment.
        admission: bounds of the line.
        router_id: this router's name.
        routers: how many router replicas share the engines until the engines say so themselves.
        desk: where requests get their KV budgets; None: they need none (no quota actor, in tests of the line alone).
    """

    def __init__(
        self,
        model: ModelSettings,
        handle: Handle,
        admission: AdmissionSettings,
        router_id: str,
        routers: int,
        desk: Desk | None = None,
    ) -> None:
        self.model = model
        self._desk = desk
        self.line = Admission(_policy(admission))
        self._handle = handle
        self._router_id = router_id
        self._max_wait_s = admission.max_wait_s
        self._initial_slots = max(1, model.max_num_seqs // routers)
        self._no_replica_wait_s = admission.no_replica_wait_s
        self._max_aside = admission.max_queued
        self._bell = Doorbell(model.name, handle.ring)
        self._start_s: float | None = None  # what the last start took that was looked at
        self._empty: asyncio.Event | None = None  # set once the last request of a line that closes has ended
        self._serving = 0
        self._running: frozenset[str] = frozenset()  # what Serve counts as running
        self._slots: dict[str, int] = {}
        self._ejected: dict[str, asyncio.TimerHandle] = {}
        self._channels: dict[str, Channel] = {}
        self._waiters: dict[str, asyncio.Future[Granted]] = {}
        self._places = SessionPlaces()
        self._timer: asyncio.TimerHandle | None = None
        self._turn = 0
        self._numbers = itertools.count(1)  # of the requests handed in; one series, for a replica may leave and return
        self._info: EngineInfo | None = None
        self._asking: asyncio.Task[EngineInfo | None] | None = None

    async def start(self) -> None:
        """Follow the replica set; returns once the first one is known."""
        await self._handle.watch(self._replicas_changed)

    def configure(self, model: ModelSettings, admission: AdmissionSettings, routers: int) -> None:
        """Take over changed settings. They hold for who waits, too; a smaller line refuses nobody who is in it."""
        self.model = model
        self._max_wait_s, self._no_replica_wait_s = admission.max_wait_s, admission.no_replica_wait_s
        self._max_aside = admission.max_queued
        self._initial_slots = max(1, model.max_num_seqs // routers)
        self._perform(self.line.on_policy(_policy(admission), time.monotonic()))

    async def close(self) -> None:
        """The model is gone: tell everybody who waits, let finish what runs, then let go of the engines."""
        self._empty = asyncio.Event()
        for request_id, waiter in list(self._waiters.items()):
            if not waiter.done():
                waiter.set_exception(self._gone())
                self._perform(self.line.on_cancel(request_id, time.monotonic()))
        await self._bell.close()
        if self._serving:
            await self._empty.wait()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        await self._handle.close()

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        """A request from its arrival to its end, whatever it does in between."""
        self._check_open()
        self._serving += 1
        try:
            yield
        finally:
            self._serving -= 1
            if self._empty is not None and not self._serving:
                self._empty.set()

    def _gone(self) -> NotFound:
        return NotFound(
            f"the model {self.model.name!r} was taken out of service", param="model", code="model_not_found"
        )

    def _check_open(self) -> None:
        """Raises NotFound once the model is gone: nothing new is begun, and what lost its replica has no other."""
        if self._empty is not None:
            raise self._gone()

    @property
    def waiting(self) -> int:
        """Requests that wait, in the line or for any replica at all."""
        return self.line.waiting + self._bell.aside

    @property
    def granted(self) -> int:
        """Requests on replicas, those of sessions included."""
        return self.line.granted + self._places.taken

    @property
    def blocked(self) -> int:
        """Replicas of the model that wait for memory."""
        return 0 if self._desk is None else self._desk.blocked.get(self.model.name, 0)

    @property
    def ready(self) -> bool:
        """Whether a replica runs."""
        return bool(self._running)

    @property
    def replicas(self) -> frozenset[str]:
        return self._running

    @property
    def largest(self) -> int:
        """The slots of the replica that has most of them for this router."""
        return max((self._slots[name] for name in self._running), default=self._initial_slots)

    @property
    def max_model_len(self) -> int | None:
        """The longest prompt and answer together, in tokens; None while no engine has told."""
        return self._info.max_model_len if self._info is not None else self.model.max_model_len

    @contextlib.asynccontextmanager
    async def slot(self, arrival: Arrival) -> AsyncIterator[Granted]:
        """Wait in the line; the slot is held for the block.

        Raises:
            Overloaded, Unavailable: refused, with the reason and Retry-After.
        """
        actions = self.line.on_arrive(arrival, time.monotonic())
        granted = self._immediate(arrival.request_id, actions)
        if granted is None:
            granted = await self._wait(arrival, actions)
        else:
            self._perform(actions)
        try:
            yield granted
        finally:
            self._give_back(arrival.request_id)

    async def serve(
        self, arrival: Arrival, make: Callable[[int], Submit], relay: Relay, session: Session | None = None
    ) -> None:
        """Wait, hand in, and give the stream with its first frames to `relay`; in an open session without the wait.

        A replica lost before its first frame costs the client nothing: the request waits again, as long as anyone may
        wait. Raises as `slot`, and `EngineFailed` when the replica fails under `relay` or engines keep dying.
        """
        with self._counted():
            if session is None or not await self._serve_in_session(arrival, make, relay, session):
                await self._serve(arrival, make, relay)

    async def _serve_in_session(
        self, arrival: Arrival, make: Callable[[int], Submit], relay: Relay, session: Session
    ) -> bool:
        """Run a request on its session's replica, beside the line; False: it has to go the way of all others, since the
        replica is gone or was lost before its first frame, or the session's place is taken."""
        usable = session.pool in self._running and session.pool not in self._ejected
        if not usable or arrival.slots > 1 or not self._places.enter(session.session_id, arrival.request_id):
            return False
        began, relayed = time.monotonic(), False
        draw = None if self._desk is None else Draw(self._desk, arrival.request_id, session)
        give_back = functools.partial(self._leave_session, session.session_id, arrival.request_id, draw)
        try:
            on_tokens = None
            if draw is not None:
                budget = Budget(arrival, self._info)
                await draw.take(budget.tokens, self._max_wait_s)
                on_tokens = functools.partial(budget.produced, draw)
            channel = self._channel(session.pool)
            async with channel.run(lambda number: ahead(make(number)), give_back, on_tokens) as stream:
                waited_s = time.monotonic() - began
                frames = await stream.next()
                relayed = True
                await relay(stream, frames, Granted(session.pool, waited_s))
            return True
        except EngineFailed as error:
            if relayed:
                raise
            self._eject(session.pool)
            logger.warning("request %s leaves session %s: %s", arrival.request_id, session.session_id, error.message)
            return False
        finally:
            give_back()

    def _leave_session(self, session_id: str, request_id: str, draw: Draw | None) -> None:
        """Give place and tokens back; again changes nothing."""
        self._places.leave(session_id, request_id)
        if draw is not None:
            draw.release()
        self._forget_gone()

    async def _serve(self, arrival: Arrival, make: Callable[[int], Submit], relay: Relay) -> None:
        give_back = functools.partial(self._give_back, arrival.request_id)
        losses = Losses(time.monotonic() + self._max_wait_s)
        while True:
            self._check_open()
            async with self.slot(arrival) as granted:
                relayed = False
                try:
                    budget = await self._budget(arrival, granted.replica_id, losses)
                    async with self._channel(granted.replica_id).run(make, give_back, budget) as stream:
                        frames = await stream.next()
                        relayed = True
                        await relay(stream, frames, granted)
                    return
                except EngineFailed as error:
                    if relayed or losses.final(error, time.monotonic()):
                        raise
                    self._eject(granted.replica_id)
                    arrival = dataclasses.replace(arrival, accepted=True)
                    logger.warning("request %s waits again: %s", arrival.request_id, error.message)

    async def _budget(self, arrival: Arrival, replica_id: str, losses: Losses) -> Callable[[int], None] | None:
        """Wait for the request's KV tokens on the replica; returns who is to be told of the tokens it produces.

        Raises:
            Overloaded: they do not come in time.
        """
        if self._desk is None:
            return None
        budget = Budget(arrival, self._info)
        wait_s = max(0.0, losses.give_up_at - time.monotonic())
        await self._desk.acquire(arrival.request_id, replica_id, budget.tokens, wait_s)
        return functools.partial(budget.produced, self._desk)

    async def serve_aside(self, make: Callable[[int], Submit], relay: Relay) -> None:
        """The same for work that takes no slot (tokenizing): any running replica, at once; without one, the next."""
        with self._counted():
            await self._serve_aside(make, relay)

    async def _serve_aside(self, make: Callable[[int], Submit], relay: Relay) -> None:
        losses = Losses(time.monotonic() + self._max_wait_s)
        while True:
            await self._bell.hold(self._no_replica_wait_s, self._max_aside)
            self._check_open()
            replica_id, relayed = self._any_replica(), False
            try:
                async with self._channel(replica_id).run(make, self._forget_gone) as stream:
                    frames = await stream.next()
                    relayed = True
                    await relay(stream, frames, Granted(replica_id, 0.0))
                return
            except EngineFailed as error:
                if relayed or losses.final(error, time.monotonic()):
                    raise
                self._eject(replica_id)
            await asyncio.sleep(ASIDE_RETRY_S)

    def _give_back(self, request_id: str) -> None:
        """End a grant; the first call for it counts. A replica is done with a request before its slowest reader is."""
        if self._desk is not None:
            self._desk.release(request_id)
        self._perform(self.line.on_done(request_id, time.monotonic()))
        self._forget_gone()

    def _any_replica(self) -> str:
        names = sorted(self._running - self._ejected.keys()) or sorted(self._running)
        if not names:
            start_s = self.line.expected_start_s(time.monotonic())
            raise Unavailable(f"no replica of {self.model.name} is running", retry_after_s=start_s)
        self._turn += 1
        return names[self._turn % len(names)]

    async def _wait(self, arrival: Arrival, actions: list[Action]) -> Granted:
        """Wait for the grant of a request that did not get one at once."""
        future = self._waiters[arrival.request_id] = asyncio.get_running_loop().create_future()
        self._perform(actions)
        try:
            return await future
        except asyncio.CancelledError:
            # The client went away; a grant that came in the same turn is given back by the same call.
            self._perform(self.line.on_cancel(arrival.request_id, time.monotonic()))
            raise
        finally:
            self._waiters.pop(arrival.request_id, None)

    def preferred(self, session_id: str | None) -> str | None:
        """The replica a session's requests should go to, for its cached prefix: the same while the set of replicas is
        (rendezvous hashing)."""
        if session_id is None or not self._running:
            return None
        return max(self._running, key=lambda name: zlib.crc32(f"{session_id}\0{name}".encode()))

    async def info(self) -> EngineInfo | None:
        """What the model's engines can do; None while none has been asked with success."""
        return await self._ask_info() if self._info is None and self._running else self._info

    async def _ask_info(self) -> EngineInfo | None:
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S):
                self._info = await self._ask("info", self._any_replica())
            self.line.on_start_told(self._info.start_s)
        except ASK_ERRORS as error:
            logger.warning("%s: no engine tells its limits: %s", self.model.name, error)
        return self._info

    async def _ask(self, method: str, replica_id: str) -> Any:
        """In a context of its own: a scrape's HTTP request must not decide how the reply is read."""
        return await in_fresh_context(self._handle.call(method, replica_id=replica_id), f"{method}-{replica_id}")

    async def load(self, replica_id: str) -> EngineLoad | None:
        """Live figures of one engine; None when it does not answer in time."""
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S):
                return await self._ask("load", replica_id)  # type: ignore[no-any-return]
        except ASK_ERRORS:
            return None

    @staticmethod
    def _immediate(request_id: str, actions: list[Action]) -> Granted | None:
        for action in actions:
            if isinstance(action, Grant) and action.request_id == request_id:
                return Granted(action.replica_id, action.waited_s)
        return None

    def _perform(self, actions: list[Action]) -> None:
        """Tell the waiting requests what was decided, and be back when the next decision falls due.

        Every event of the line ends here, so that what depends on its state follows it.
        """
        for action in actions:
            waiter = self._waiters.get(action.request_id)
            if waiter is None or waiter.done():
                continue
            if isinstance(action, Grant):
                waiter.set_result(Granted(action.replica_id, action.waited_s))
            else:
                waiter.set_exception(refusal_error(action))
        self._schedule()

    def _schedule(self) -> None:
        due = self.line.next_due()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if due is not None:
            delay_s = max(0.0, due - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._tick)
        from_zero = not self.model.replicas.min_replicas
        self._bell.update(from_zero=from_zero, running=bool(self._running), in_line=self.line.waiting)

    def _tick(self) -> None:
        self._timer = None
        self._perform(self.line.on_tick(time.monotonic()))

    def _replicas_changed(self, names: frozenset[str]) -> None:
        now = time.monotonic()
        actions: list[Action] = []
        gone, new = self._running - names, names - self._running
        if self._desk is not None:
            for replica_id in new:
                self._desk.open(replica_id)
        self._running = names  # first: what a channel tells while it retires must find its replica gone
        for replica_id in gone:
            actions += self.line.on_replica(replica_id, 0, now)  # drains: what runs there finishes
            if replica_id in self._channels:
                self._channels[replica_id].retire()
        for replica_id in new:
            self._slots.setdefault(replica_id, self._initial_slots)
            if replica_id in self._channels:
                self._channels[replica_id].restore()
            if replica_id not in self._ejected:
                actions += self.line.on_replica(replica_id, self._slots[replica_id], now)
        self._perform(actions)
        self._forget_gone()
        self._look_at_start()
        if new and self._asking is None:  # a new replica may be of a new configuration
            self._asking = in_fresh_context(self._ask_info(), f"info-{self.model.name}")
            self._asking.add_done_callback(lambda _: setattr(self, "_asking", None))

    def _look_at_start(self) -> None:
        """Tell the operator, once a start, when requests are refused sooner than a replica can come."""
        start_s = self.line.start_s
        if start_s is None or start_s == self._start_s:
            return
        self._start_s = start_s
        held_s = min(self._no_replica_wait_s, self._max_wait_s)
        if start_s > held_s:
            logger.warning(
                "%s: a replica came %.0f s after the first request for one; requests are refused after %.0f s. Set "
                "admission.no_replica_wait_s and max_wait_s above the first figure, or min_replicas to 1",
                self.model.name,
                start_s,
                held_s,
            )

    def _forget_gone(self) -> None:
        """Drop what is known of replicas that have left and on which nothing of ours runs any more."""
        for replica_id in [name for name in self._slots if name not in self._running]:
            channel = self._channels.get(replica_id)
            if channel is None or not channel.busy:
                self._channels.pop(replica_id, None)
                del self._slots[replica_id]
                if self._desk is not None:
                    self._desk.drop(replica_id)
                self._perform(self.line.on_replica_gone(replica_id, time.monotonic()))

    def _eject(self, replica_id: str) -> None:
        """Grant nothing on a replica that just failed a call, until Serve has had time to notice its death."""
        if replica_id in self._ejected or replica_id not in self._running:
            return
        self._perform(self.line.on_replica(replica_id, 0, time.monotonic()))
        self._ejected[replica_id] = asyncio.get_running_loop().call_later(EJECT_S, self._readmit, replica_id)

    def _readmit(self, replica_id: str) -> None:
        del self._ejected[replica_id]
        if replica_id in self._running:
            self._perform(self.line.on_replica(replica_id, self._slots[replica_id], time.monotonic()))

    def _channel(self, replica_id: str) -> Channel:
        """The channel to a replica. EngineFailed: it has left since it was granted, and takes no new calls."""
        if replica_id not in self._running:
            raise EngineUnreachable(f"engine replica {replica_id} has left")
        channel = self._channels.get(replica_id)
        if channel is None:
            channel = Channel(
                self._handle,
                self._router_id,
                replica_id,
                self._numbers,
                lambda slots: self._share_changed(replica_id, slots),
            )
            self._channels[replica_id] = channel
        return channel

    def _share_changed(self, replica_id: str, slots: int | None) -> None:
        """Without a channel nobody tells our share, so no more than the cautious first guess is granted."""
        if replica_id not in self._slots:
            return  # forgotten: what its channel still has to say is of no interest
        slots = self._slots[replica_id] = self._initial_slots if slots is None else slots
        if replica_id in self._running and replica_id not in self._ejected:
            self._perform(self.line.on_replica(replica_id, slots, time.monotonic()))
