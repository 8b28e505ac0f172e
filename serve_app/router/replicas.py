"""The engine replicas of one model as one router sees them: which run, their channels, and which take requests.

They report their limits and their load when they are called; such a call ends within `ANSWER_TIMEOUT_S`, whatever the
replica does. `core.routing.outliers` decides which replicas have failed and get no requests, or one at a time; here it
has a clock, a timer and the probes.

Invariant: the queue always knows whether a replica takes requests: none after it has left, drains or was ejected, one
at a time on probation. A replica that has left is dropped as soon as it runs none of this router's requests.
Invariant: each request sent to a replica has exactly one result. A replica on probation has one request, its probe, and
only once it can be reached: no request waits for a replica that is gone. Of the only replica neither holds: limiting it
would gain nothing.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from serve_app.core.queue import Arrival
from serve_app.core.routing import (
    FREE_SHARE,
    AffinityKey,
    BoundedRing,
    Eject,
    FailureKind,
    OutlierAction,
    OutlierDetector,
    OutlierState,
    OutlierVerdict,
    Probe,
    RoutingTarget,
    TargetReason,
)
from serve_app.errors import EngineFailed, EngineUnreachable, OperationUnknown, ServeAppError, Unavailable
from serve_app.ray_adapter import NO_ANSWER, Handle, in_fresh_context
from serve_app.router.drain_timers import DrainTimers
from serve_app.router.model_queue import ModelQueue
from serve_app.settings import ModelSettings
from serve_app.system import EventKind, event
from serve_app.transport import Channel, EngineInfo, EngineLoad, EngineTexts, UnreadBytes
from serve_app.types import FIRST_OPERATIONS, Operation

logger = logging.getLogger("ray.serve")

ANSWER_TIMEOUT_S = 1.0  # a scrape or a listing must not hang on a replica that does not answer
# the replica may leave before or during the call
CALL_FAILURES: tuple[type[BaseException], ...] = (Unavailable, *NO_ANSWER)
CONNECTING = ""  # in place of the probe's request id


class ReplicaSet:
    """The replicas, their load, their health and their channels.

    Args:
        handle: the engine deployment.
        router_id: this router's name.
        queue: of the model; receives which replicas take requests, and an engine's start time, which tells it how long
            a request without a replica waits.
        settings: of the model; its slots are assumed of a replica until it reports its own.
        routers: how many router replicas share the engines.
        unread: counts unread bytes of all requests of this router.
        stop_drained: stops this router's requests on a replica that drains, to continue elsewhere.
    """

    def __init__(
        self,
        handle: Handle,
        router_id: str,
        queue: ModelQueue,
        settings: ModelSettings,
        routers: int,
        unread: UnreadBytes,
        stop_drained: Callable[[str], object],
    ) -> None:
        self._handle = handle
        self._router_id = router_id
        self._queue = queue
        self._unread = unread
        self.running: frozenset[str] = frozenset()  # replicas that Serve counts as running
        self.slots: dict[str, int] = {}  # of the whole replica; 0: it drains
        self.outliers = OutlierDetector()
        self.ejections = dict.fromkeys(FailureKind, 0)  # so far, by reason
        # by replica on probation: the request id of its probe, or CONNECTING; None: not sent
        self._probes: dict[str, str | None] = {}
        self._connecting: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None  # until the end of the next ejection
        self._closed = False
        self._routing = BoundedRing()
        self._drains = DrainTimers(stop_drained, self._give_up)
        self.configure(settings, routers)
        self._random = random.Random()
        self.channels: dict[str, Channel] = {}
        self._operations: dict[str, frozenset[str] | None] = {}  # that replicas have said to know, of those in `slots`
        self._next_index = 0
        self._request_numbers = itertools.count(1)  # one series for all channels: a replica may leave and return
        self._info_task: asyncio.Task[EngineInfo | None] | None = None
        self.info: EngineInfo | None = None  # the limits that an engine reported last

    def configure(self, settings: ModelSettings, routers: int) -> None:
        """Apply changed settings."""
        self._settings = settings
        self._routing.free_share = FREE_SHARE / routers

    def close(self) -> None:
        """The model is gone: judge and probe no replica any more. Requests that run go on to their ends."""
        self._closed = True
        self._set_timer()
        for task in [*self._connecting, self._info_task]:
            if task is not None:
                task.cancel()

    def set_running(self, names: frozenset[str]) -> None:
        """Replace the set of replicas that Serve counts as running."""
        gone = self.running - names
        new = names - self.running
        self.running = names  # first: a retiring channel's callbacks must find its replica gone
        for replica_id in sorted(new):
            logger.info("Replica %s of model %s started to take requests", replica_id, self._queue.model)
        for replica_id in sorted(gone):
            channel = self.channels.get(replica_id)
            left = 0 if channel is None else len(channel.requests)
            logger.info(
                "Replica %s of model %s left and still runs %d requests of this router",
                replica_id,
                self._queue.model,
                left,
            )
        for replica_id in gone:
            self._update_availability(replica_id)  # drains: requests that run there finish, or continue elsewhere
            if replica_id in self.channels:
                self.channels[replica_id].retire()
                self._drains.begin(replica_id, self._settings.drain_s)
        for replica_id in new:
            self.slots.setdefault(replica_id, self._settings.max_num_seqs)
            if replica_id in self.channels:
                self.channels[replica_id].restore()
            self._drains.end(replica_id)
            self.outliers.on_replica(replica_id, time.monotonic())
            self._update_availability(replica_id)
        for replica_id in gone:  # one that comes back has no history
            self._probes.pop(replica_id, None)
            self._perform(self.outliers.on_replica_gone(replica_id, time.monotonic()))
        for replica_id in list(self._probes):
            self._update_availability(replica_id)  # it may have become the only replica, or no longer be
        self.drop_gone()
        self._queue.check_waiting()  # the last one that knew an operation may have left

    def drop_gone(self) -> None:
        """Drop the state of replicas that have left and run none of this router's requests."""
        for replica_id in [name for name in self.slots if name not in self.running]:
            channel = self.channels.get(replica_id)
            if channel is None or not channel.requests:
                self.channels.pop(replica_id, None)
                self._drains.end(replica_id)
                del self.slots[replica_id]
                self._operations.pop(replica_id, None)
                self._routing.drop_replica(replica_id)
                self._queue.remove_replica(replica_id)

    def is_usable(self, replica_id: str) -> bool:
        """Whether a replica runs and is neither ejected nor on probation."""
        return replica_id in self.running and self.outliers.state(replica_id) is OutlierState.HEALTHY

    def is_on_probation(self, replica_id: str) -> bool:
        return replica_id in self._probes

    def replica_to_probe(self) -> str | None:
        """A replica whose probe has not been sent yet."""
        return next((name for name, probe in self._probes.items() if probe is None), None)

    def ignorant_of(self, operation: Operation | None) -> frozenset[str]:
        """The running replicas that do not know an operation, being of an earlier release. One that was never
        connected may know it: its channel sees to it.

        Raises:
            OperationUnknown: that is all of them.
        """
        if operation is None or operation in FIRST_OPERATIONS:
            return frozenset()
        channels = (channel for name, channel in self.channels.items() if name in self.running)
        found = frozenset(channel.replica_id for channel in channels if not channel.may_know(operation))
        if found and found == self.running:
            raise OperationUnknown(
                f"no replica of {self._queue.model} knows the operation {operation.value!r}: all are of an earlier "
                "release",
                retry_after_s=self._queue.expected_start_s(),
            )
        return found

    def next_replica(self, operation: Operation | None = None) -> str:
        """The next usable replica in round-robin order, or of all if none is usable, of those that know an operation.

        Raises:
            Unavailable: none runs. OperationUnknown: none knows the operation.
        """
        running = self.running - self.ignorant_of(operation)
        names = sorted(filter(self.is_usable, running)) or sorted(running)
        if not names:
            start_s = self._queue.expected_start_s()
            raise Unavailable(f"no replica of {self._queue.model} is running", retry_after_s=start_s)
        self._next_index += 1
        return names[self._next_index % len(names)]

    def choose_target(self, request: Arrival, key: AffinityKey | None, avoid: str | None) -> RoutingTarget | None:
        """The replica on which a request should run: that of its open session, one that needs a probe, that of its
        affinity key, or any but the one it was lost on. None: the queue chooses.

        Args:
            avoid: the replica on which the request was lost; None: it was not.
        """
        if request.affinity is not None and avoid is None and self.is_usable(request.affinity):
            return RoutingTarget(request.affinity, TargetReason.SESSION)
        probe = self.replica_to_probe()
        if probe is not None and probe != avoid:
            return RoutingTarget(probe, TargetReason.PROBE)
        if key is None and avoid is None:
            return None
        if avoid is not None:
            self._routing.set_open(avoid, False)
        choice = self._routing.choose(None if key is None else key.text, self._random, request.slots)
        if avoid is not None:
            self._routing.set_open(avoid, self.is_usable(avoid))
        if choice is None:
            return None
        return RoutingTarget(choice.replica_id, TargetReason.MOST_FREE if key is None else key.reason, choice.route)

    def on_granted(self, request_id: str, replica_id: str, slots: int) -> None:
        """Count a granted request that uses so many slots of a replica: as its probe, if it needs one."""
        self._routing.add_load(replica_id, slots)
        if replica_id in self._probes:
            self._probes[replica_id] = self._probes[replica_id] or request_id
            self._update_availability(replica_id)  # it takes no second request

    def on_released(self, request_id: str, replica_id: str, slots: int) -> None:
        """Release the slots of a request; after a probe without a result, the replica needs another one. Call this
        before `ModelQueue.release`, so that the queue does not grant the free slots of a replica on probation in
        between."""
        self._routing.add_load(replica_id, -slots)
        if replica_id in self._probes:
            if self._probes[replica_id] == request_id:
                self._probes[replica_id] = None
            self._update_availability(replica_id)

    def record_result(self, replica_id: str, verdict: OutlierVerdict, sent_at: float) -> None:
        """Record the result of a request that was sent to the replica at `sent_at`."""
        if self._closed:
            return
        self._perform(self.outliers.on_result(replica_id, verdict, sent_at, time.monotonic()))

    def channel(self, replica_id: str) -> Channel:
        """The channel to a replica.

        Raises:
            EngineUnreachable: the replica has left since the grant and takes no new calls.
        """
        if replica_id not in self.running:
            raise EngineUnreachable(f"engine replica {replica_id} has left")
        channel = self.channels.get(replica_id)
        if channel is None:
            channel = self.channels[replica_id] = Channel(
                self._handle,
                self._router_id,
                replica_id,
                self._request_numbers,
                lambda slots, drain_s: self._slots_changed(replica_id, slots, drain_s),
                self._unread,
                lambda: self._may_break(replica_id),
            )
        return channel

    def _give_up(self, replica_id: str) -> None:
        """A replica that drains should have ended."""
        channel = self.channels.get(replica_id)
        if channel is not None:
            channel.give_up("the replica has drained and should have ended, but stands still")

    def _may_break(self, replica_id: str) -> bool:
        """Whether to give up a silent replica: another one takes requests and gives signs of life, and no request waits
        there for a batch."""
        others = (name for name in self.running if name != replica_id and not self._has_no_sign(name))
        return self._settings.batch_policy is None and any(self.takes_requests(name)[0] for name in others)

    def _has_no_sign(self, replica_id: str) -> bool:
        channel = self.channels.get(replica_id)
        return channel is not None and channel.has_no_sign

    def refresh_info(self) -> None:
        """Fetch the limits again, since a new replica may have a new configuration; one call at a time."""
        if self._info_task is None:
            self._info_task = in_fresh_context(self.fetch_info(), f"info-{self._queue.model}")
            self._info_task.add_done_callback(lambda _: setattr(self, "_info_task", None))

    async def fetch_info(self) -> EngineInfo | None:
        """Fetch the limits; returns the last known ones, None if no engine has ever answered."""
        try:
            self.info = await self.call("info", self.next_replica())
            self._queue.replica_start.reported(self.info.start_s)
        except CALL_FAILURES as error:
            logger.warning(
                "Model %s has no engine that reports its limits; the last ones apply: %s", self._queue.model, error
            )
        return self.info

    async def fetch_load(self, replica_id: str) -> EngineLoad | None:
        """Fetch the live load of one engine; None if it does not answer in time."""
        try:
            return await self.call("load", replica_id)  # type: ignore[no-any-return]
        except CALL_FAILURES:
            return None

    async def fetch_metrics(self, replica_id: str, is_openmetrics: bool) -> EngineTexts:
        """Fetch vLLM's own metrics of one engine; none if it does not answer in time."""
        try:
            return await self.call("metrics", replica_id, is_openmetrics)  # type: ignore[no-any-return]
        except CALL_FAILURES:
            return {}

    async def call(self, method: str, replica_id: str, *arguments: Any) -> Any:
        """Call in a context of its own: a scrape's HTTP request must not decide how the reply is read."""
        asked = self._handle.call(method, *arguments, replica_id=replica_id)
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            return await in_fresh_context(asked, f"{method}-{replica_id}")

    def _slots_changed(self, replica_id: str, slots: int, drain_s: float | None) -> None:
        if replica_id not in self.slots:
            return  # a dropped replica: ignore the last messages of its channel
        self.slots[replica_id] = slots
        channel = self.channels[replica_id]
        self._queue.set_fingerprint(replica_id, channel.fingerprint)
        if self._operations.get(replica_id) != channel.operations:
            self._operations[replica_id] = channel.operations
            self._queue.check_waiting()
        if drain_s is not None:
            self._drains.begin(replica_id, drain_s)
        if replica_id in self.running:
            self._update_availability(replica_id)

    @property
    def ejected_count(self) -> int:
        """Replicas that get no requests since they have failed."""
        return self.outliers.ejected_count

    def takes_requests(self, replica_id: str) -> tuple[bool, bool]:
        """Whether a replica takes a request now, and whether it takes one at a time."""
        single = replica_id in self._probes and len(self.running) > 1
        if single:
            healthy = self._probes[replica_id] is None
        else:
            healthy = self.outliers.state(replica_id) is not OutlierState.EJECTED
        usable = healthy and replica_id in self.running and self.slots[replica_id] > 0
        return usable, usable and single

    def _update_availability(self, replica_id: str) -> None:
        """Pass on to the queue and to the replica choice whether a replica takes a request now."""
        self._routing.set_slots(replica_id, self.slots[replica_id])
        self._routing.set_open(replica_id, self.is_usable(replica_id))
        self._queue.set_replica(replica_id, *self.takes_requests(replica_id))

    def _perform(self, actions: list[OutlierAction]) -> None:
        for action in actions:
            replica_id = action.replica_id
            self._probes.pop(replica_id, None)
            match action:
                case Probe():
                    self._probes[replica_id] = CONNECTING
                    task = in_fresh_context(self._connect(replica_id), f"probe-{replica_id}")
                    self._connecting.add(task)
                    task.add_done_callback(self._connecting.discard)
                case Eject(duration_s=for_s, reason=reason):
                    self.ejections[reason] += 1
                    logger.warning(
                        "Replica %s gets no requests for %.0f s (reason: %s)",
                        *(replica_id, for_s, reason.value),
                        extra=self._event(replica_id, reason=reason.value, for_s=for_s),
                    )
                case _:
                    logger.info("Replica %s gets requests again", replica_id, extra=self._event(replica_id))
            self._update_availability(replica_id)
        if actions:
            self._set_timer()

    def _event(self, replica_id: str, **details: Any) -> dict[str, Any]:
        return event(EventKind.HEALTH, self._queue.model, replica=replica_id, router=self._router_id, **details)

    async def _connect(self, replica_id: str) -> None:
        """The probe of a replica is sent once it can be reached; one that cannot is ejected again."""
        began = time.monotonic()
        try:
            await self.channel(replica_id).reach()
        except EngineFailed:
            if self._probes.get(replica_id) == CONNECTING:
                self.record_result(replica_id, OutlierVerdict.LOST, began)
            return
        if self._probes.get(replica_id) == CONNECTING:
            self._probes[replica_id] = None
            self._update_availability(replica_id)

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due = self.outliers.next_due()
        if due is not None and not self._closed:
            self._timer = asyncio.get_running_loop().call_later(max(0.0, due - time.monotonic()), self._tick)

    def _tick(self) -> None:
        self._perform(self.outliers.on_tick(time.monotonic()))
        self._set_timer()  # the loop's clock may be early by its resolution; then nothing was due


@dataclass(slots=True)
class ResultReporter:
    """Reports the one result of a request that was sent to a replica.

    A probe reports at its first frame, to end the probation soon; any other request at its end, since an engine that
    breaks every answer in the middle has failed, too. Until the result is known, the end counts as the client's.
    """

    replicas: ReplicaSet
    replica_id: str
    sent_at: float
    verdict: OutlierVerdict = OutlierVerdict.CLIENT
    is_reported: bool = False

    def on_first_frame(self, status: int) -> None:
        """The first frame has arrived, with this HTTP status."""
        if status < 400:  # else it is the request's: an engine that answers lives
            self.verdict = OutlierVerdict.OK
        if self.replicas.is_on_probation(self.replica_id):
            self.report()

    def on_error(self, error: ServeAppError, *, connection_lost: bool = False) -> None:
        """The request failed; `connection_lost`: its connection to the replica broke."""
        if isinstance(error, OperationUnknown):
            return  # it lives, and answers what it knows
        if connection_lost or isinstance(error, EngineUnreachable):
            self.verdict = OutlierVerdict.LOST
        elif isinstance(error, EngineFailed) and error.code == EngineFailed.code:  # other codes name the client's fault
            self.verdict = OutlierVerdict.FAILED

    def report(self) -> None:
        """Report the result. Idempotent."""
        if not self.is_reported:
            self.is_reported = True
            self.replicas.record_result(self.replica_id, self.verdict, self.sent_at)
