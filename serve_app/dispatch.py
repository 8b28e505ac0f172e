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
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from serve_app.channel import Channel, Stream
from serve_app.core.admission import Action, Admission, Arrival, Grant, Policy, refusal_error
from serve_app.engine.protocol import EngineInfo, EngineLoad, Frame, Submit
from serve_app.errors import EngineFailed, EngineUnreachable, Unavailable
from serve_app.serve_adapter import CALL_ERRORS, EngineHandle, in_fresh_context
from serve_app.settings import AdmissionSettings, ModelSettings

logger = logging.getLogger("ray.serve")

MAX_LOSSES = 3  # engines that may die under one request before it is taken for the cause
ASIDE_RETRY_S = 0.25  # between attempts of work that takes no slot, and so cannot wait in the line
ASK_TIMEOUT_S = 1.0  # a scrape or a listing must not hang on a replica that does not answer
ASK_ERRORS = (TimeoutError, EngineFailed, *CALL_ERRORS)  # the replica may leave while it is asked
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
        self._give_up_at = give_up_at
        self._died = 0

    def final(self, error: EngineFailed, now: float) -> bool:
        """Count a loss; whether it is the client's to know. An engine that never had the request says nothing of it."""
        self._died += not isinstance(error, EngineUnreachable)
        return self._died >= MAX_LOSSES or now >= self._give_up_at


Relay = Callable[[Stream, list[Frame], Granted], Awaitable[None]]


class ModelLine:
    """The line, the replicas and the channels of one model, for one router replica.

    Args:
        model: the model's settings.
        handle: its engine deployment.
        admission: bounds of the line.
        router_id: this router's name.
        routers: how many router replicas share the engines until the engines say so themselves.
    """

    def __init__(
        self,
        model: ModelSettings,
        handle: EngineHandle,
        admission: AdmissionSettings,
        router_id: str,
        routers: int,
    ) -> None:
        self.model = model
        self.line = Admission(
            Policy(
                max_queued=admission.max_queued,
                max_wait_s=admission.max_wait_s,
                no_replica_wait_s=admission.no_replica_wait_s,
            )
        )
        self._handle = handle
        self._router_id = router_id
        self._max_wait_s = admission.max_wait_s
        self._initial_slots = max(1, model.max_num_seqs // routers)
        self._running: frozenset[str] = frozenset()  # what Serve counts as running
        self._slots: dict[str, int] = {}
        self._ejected: dict[str, asyncio.TimerHandle] = {}
        self._channels: dict[str, Channel] = {}
        self._waiters: dict[str, asyncio.Future[Granted]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._turn = 0
        self._numbers = itertools.count(1)  # of the requests handed in; one series, for a replica may leave and return
        self._info: EngineInfo | None = None
        self._asking: asyncio.Task[EngineInfo | None] | None = None

    async def start(self) -> None:
        """Follow the replica set; returns once the first one is known."""
        await self._handle.watch(self._replicas_changed)

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

    async def serve(self, arrival: Arrival, make: Callable[[int], Submit], relay: Relay) -> None:
        """Wait, hand in, and give the stream with its first frames to `relay`.

        A replica lost before its first frame costs the client nothing: the request waits again, as long as anyone may
        wait. Raises as `slot`, and `EngineFailed` when the replica fails under `relay` or engines keep dying.
        """
        give_back = functools.partial(self._give_back, arrival.request_id)
        losses = Losses(time.monotonic() + self._max_wait_s)
        while True:
            async with self.slot(arrival) as granted:
                relayed = False
                try:
                    async with self._channel(granted.replica_id).run(make, give_back) as stream:
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

    async def serve_aside(self, make: Callable[[int], Submit], relay: Relay) -> None:
        """The same for work that takes no slot (tokenizing): any running replica, at once."""
        losses = Losses(time.monotonic() + self._max_wait_s)
        while True:
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
        self._perform(self.line.on_done(request_id, time.monotonic()))
        self._forget_gone()

    def _any_replica(self) -> str:
        names = sorted(self._running - self._ejected.keys()) or sorted(self._running)
        if not names:
            raise Unavailable(f"no replica of {self.model.name} is running")
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
        if self._info is None and self._running:
            try:
                async with asyncio.timeout(ASK_TIMEOUT_S):
                    self._info = await self._ask("info", self._any_replica())
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
        """Tell the waiting requests what was decided, and be back when the next decision falls due."""
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

    def _tick(self) -> None:
        self._timer = None
        self._perform(self.line.on_tick(time.monotonic()))

    def _replicas_changed(self, names: frozenset[str]) -> None:
        now = time.monotonic()
        actions: list[Action] = []
        gone, new = self._running - names, names - self._running
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
        if names and self._info is None and self._asking is None:
            self._asking = in_fresh_context(self.info(), f"info-{self.model.name}")
            self._asking.add_done_callback(lambda _: setattr(self, "_asking", None))

    def _forget_gone(self) -> None:
        """Drop what is known of replicas that have left and on which nothing of ours runs any more."""
        for replica_id in [name for name in self._slots if name not in self._running]:
            channel = self._channels.get(replica_id)
            if channel is None or not channel.busy:
                self._channels.pop(replica_id, None)
                del self._slots[replica_id]
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
