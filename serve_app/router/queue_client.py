"""A router's client of the queue that all routers share: `core.shared_queue.router_queue` with a clock and calls to the
quota actor.

The core decides what a router sends and what a reply means. Here the events of one turn of the event loop are sent as
one message, at most `MAX_CALLS` messages are in flight (later events join the next one), one long poll returns later
decisions of the actor, and a timer ends the longest wait. `serve_app.router.model_queue` has the models.

Invariant: every event of the core is followed by its actions, in order, and by a message if the core has one to send.
Invariant: a request is in `requests` from `ModelQueue.acquire` until it is refused, cancelled or done, and nowhere else
here.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from serve_app.core.limits import LimitDecision
from serve_app.core.memory import NodeProcesses
from serve_app.core.queue import Action, Decision, Preempt
from serve_app.core.shared_queue import BATCH, ActorReply, RouterMessage, RouterQueue, lost
from serve_app.core.times import ACTOR_RETRY_S, FENCE_S, ROUTER_HEARTBEAT_S
from serve_app.ray_adapter import AWAY
from serve_app.system import EventKind, event

logger = logging.getLogger("ray.serve")

REPORT_S = 0.1  # between reports of the tokens of running requests; a fair order needs no more
CALM_REPORT_S = 0.5  # the same while no request waits anywhere; once one waits, the next message has all token sums
REPORT_PER_REQUEST_S = 0.0005  # bounds a router to 2,000 reported requests a second, however many run
MAX_CALLS = 4  # messages in flight at once; more calls would only carry smaller messages

SendExchange = Callable[[RouterMessage], Awaitable[ActorReply]]


@dataclass(frozen=True, slots=True)
class PendingGrant:
    """A request of this process: it waits until `decision` is done and holds a grant afterwards. `on_preempt`: called
    when it is to stop while it runs. `may_leave`: it does not wait for a replica, since another model may run it.
    `check`: raises the error with which it is refused when no replica that runs could ever take it."""

    queue: object  # the `ModelQueue` that it waits in
    decision: asyncio.Future[Decision]
    on_preempt: Callable[[Preempt], None]
    may_leave: bool = False
    check: Callable[[], object] = lambda: None


class QueueClient:
    """The queues of all models, for one router replica.

    Args:
        router_id: this router's name; no other router has ever had it.
        process: this router's.
        exchange: sends a message to the quota actor and returns its reply.
        watch: the long poll for later decisions. Both raise `AWAY` while the actor is unavailable.
    """

    def __init__(
        self, router_id: str, exchange: SendExchange, watch: SendExchange, process: NodeProcesses | None = None
    ) -> None:
        self.router_id = router_id  # for the log
        self.exchange = exchange
        self._watch = watch
        self.core = RouterQueue(router_id, process=process)
        self.engines: dict[str, set[str]] = {}  # by model: those that its present queue has not dropped
        self.requests: dict[str, PendingGrant] = {}
        self.charges: dict[str, asyncio.Future[LimitDecision]] = {}  # requests that wait to be charged
        self.calls: set[asyncio.Task[bool]] = set()
        self.tasks: list[asyncio.Task[None]] = []
        self._flush_scheduled = self._stopped = False
        self._retry_at = 0.0  # no message is sent before: the actor is unavailable
        self._is_away = False  # the actor; logged once
        self._sent_at = 0.0
        self._booked = asyncio.Event()
        self.timer: asyncio.Handle | None = None
        self._timer_at = 0.0  # in the loop's time; uvloop's handles have no `when`

    @property
    def router_session(self) -> tuple[int, int]:
        """The epoch of the actor and this router's incarnation; a new one: the actor may have forgotten this router."""
        return self.core.router_session.epoch, self.core.router_session.incarnation

    async def start(self) -> None:
        """Begin to send. Runs in the caller's context, which must not be that of a request."""
        self.tasks = [
            asyncio.create_task(self._report(), name="queue-reports"),
            asyncio.create_task(self._poll(), name="queue-watch"),
        ]
        self.apply_actions([])  # the actor knows this router at once and not after its first heartbeat

    async def stop(self) -> None:
        """Stop sending, also for requests that end later; the actor reclaims all grants when it has received nothing
        for some seconds."""
        self._stopped = True
        if self.timer is not None:
            self.timer.cancel()
        tasks = [*self.tasks, *self.calls]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def apply_actions(self, actions: Iterable[Action]) -> None:
        """Deliver the decisions of an event, then schedule a message and the timer. Every event ends with this call.

        A request that was cancelled meanwhile has already cancelled its entry in the core.
        """
        for action in actions:
            request = self.requests.get(action.request_id)
            if isinstance(action, Preempt):
                if request is not None:  # in a later turn: a request granted just now then has its grant
                    asyncio.get_running_loop().call_soon(request.on_preempt, action)
            elif request is not None and not request.decision.done():
                request.decision.set_result(action)
        decided, self.core.limits.decided = self.core.limits.decided, []
        for decision in decided:
            charge = self.charges.get(decision.request_id)
            if charge is not None and not charge.done():
                charge.set_result(decision)
        try:
            if not self._flush_scheduled:
                # Not in a request's context: Ray cancels the calls of a cancelled request, and this call serves all.
                asyncio.get_running_loop().call_soon(self._flush, context=contextvars.Context())
                self._flush_scheduled = True
            self._set_timer()
        except Exception:  # the event is in the core: the next heartbeat sends it and checks the deadlines
            logger.exception(
                "Router %s could not plan a message and sends it later. Report this traceback", self.router_id
            )

    # The exchange

    def _flush(self) -> None:
        self._flush_scheduled = False
        try:
            self._send()
        except Exception:  # the next heartbeat sends it
            logger.exception(
                "Router %s could not send a message and sends it later. Report this traceback", self.router_id
            )

    def _send(self, *, heartbeat: bool = False) -> None:
        now = time.monotonic()
        while not self._stopped and now >= self._retry_at and len(self.calls) < MAX_CALLS:
            message = self.core.next_message(now, beat=heartbeat)
            if message is None:
                return
            heartbeat = False
            self._sent_at = now
            call = asyncio.create_task(self._exchange_once(self.exchange, message), name="queue-message")
            self.calls.add(call)
            call.add_done_callback(self._on_call_ended)

    def _on_call_ended(self, call: asyncio.Task[bool]) -> None:
        self.calls.discard(call)
        self.apply_actions([])  # send what waited for a free call

    async def _exchange_once(self, send: SendExchange, message: RouterMessage) -> bool:
        """Send one message and apply its reply; False: no valid reply came."""
        sent_at = time.monotonic()
        known = self.core.router_session.epoch
        try:
            async with asyncio.timeout(FENCE_S):
                reply = await send(message)
            now = time.monotonic()
            if reply.is_stale and reply.epoch == known:  # the actor has just started and knows no devices yet
                self._retry_at = now + ACTOR_RETRY_S
            before = self.core.router_session.epoch  # of several replies of a new actor the first one changes it
            actions = self.core.on_reply(reply, sent_at, now)
            is_answered = not reply.is_stale
            self._log_answer(before)
            self._log_failed_actions()
        except Exception as error:
            if not isinstance(error, AWAY):
                logger.exception(
                    "Router %s failed in its exchange with the quota actor. Report this traceback", self.router_id
                )
            elif not self.core.alone:
                if not self._is_away:
                    logger.warning(
                        "Quota actor does not answer router %s, which grants from its credit: %r",
                        *(self.router_id, error),
                        extra=event(EventKind.HEALTH, "quota_actor", router=self.router_id),
                    )
                self._is_away = True
            now = time.monotonic()
            self._retry_at = now + ACTOR_RETRY_S
            actions = self.core.on_lost(now)
            is_answered = False
        if self.core.router_session.is_booked:
            self._booked.set()
        else:
            self._booked.clear()
        self.apply_actions(actions)
        return is_answered

    async def _poll(self) -> None:
        """The long poll for later decisions; the actor answers it at the latest after its own timeout."""
        while True:
            try:
                await self._booked.wait()
                answered = await self._exchange_once(self._watch, self.core.router_session.watch_message())
            except Exception:
                answered = False
                logger.exception(
                    "Router %s failed to poll the quota actor and polls again. Report this traceback", self.router_id
                )
            if not answered:
                await asyncio.sleep(ACTOR_RETRY_S)

    async def _report(self) -> None:
        """Send a heartbeat when it is due, and sooner when reports wait for a message."""
        beat_at = time.monotonic()
        reconciled_at = 0.0
        while True:
            soonest_s = REPORT_S if self.core.router_session.state.contended else CALM_REPORT_S
            report_s = max(soonest_s, REPORT_PER_REQUEST_S * min(BATCH, len(self.core.in_flight.running)))
            wait_s = self._sent_at + report_s - time.monotonic()
            await asyncio.sleep(wait_s if wait_s > 0.0 else report_s)
            now = time.monotonic()
            try:
                if now >= reconciled_at + ROUTER_HEARTBEAT_S:
                    reconciled_at = now
                    self._reconcile(now)
                if now >= beat_at + ROUTER_HEARTBEAT_S or (self.core.has_reports and now >= self._sent_at + report_s):
                    beat_at = now
                    self._send(heartbeat=True)
            except Exception:
                logger.exception("Router %s failed to report and reports again. Report this traceback", self.router_id)

    def _reconcile(self, now: float) -> None:
        """Compare this process's requests with the core's; a request known to one side only is ended."""
        holds = {request_id: request.decision.done() for request_id, request in self.requests.items()}
        actions, ended = self.core.reconcile(holds, now)
        for request_id in ended:
            logger.error("Request %s was known to one side only and is ended. Report this message", request_id)
            request = self.requests.get(request_id)
            if request is not None and not request.decision.done():
                request.decision.set_result(lost(request_id))
        self.apply_actions(actions + self.core.on_tick(now))  # in case a timer was lost

    def _log_answer(self, before: int) -> None:
        """Log that the actor is back, and whether it is another one. `before`: the epoch then; 0: there was none."""
        epoch = self.core.router_session.epoch
        if before and epoch > before:
            restarted = event(EventKind.HEALTH, "quota_actor", router=self.router_id, epoch=epoch)
            logger.warning(
                "Quota actor was restarted with epoch %d; router %s reports to it",
                *(epoch, self.router_id),
                extra=restarted,
            )
        elif self._is_away:
            back = event(EventKind.HEALTH, "quota_actor", router=self.router_id)
            logger.info("Quota actor answers router %s again", self.router_id, extra=back)
        self._is_away = False

    def _log_failed_actions(self) -> None:
        failed, self.core.applied.failed = self.core.applied.failed, []
        for failure in failed:
            outcome = f"request {failure.request_id} is ended" if failure.request_id else "no request ends by it"
            logger.error(
                "Router %s could not apply %r, and %s. Report this traceback",
                self.router_id,
                failure.action,
                outcome,
                exc_info=failure.error,
            )

    # Time

    def _set_timer(self) -> None:
        """Set the timer no later than the end of the next wait; an early timer does no harm."""
        due = self.core.pending.next_due()
        if due is None or self._stopped:
            return
        loop = asyncio.get_running_loop()
        at = loop.time() + max(0.0, due - time.monotonic())
        if self.timer is not None:
            if self._timer_at <= at:
                return
            self.timer.cancel()
        self.timer = loop.call_at(at, self._tick, context=contextvars.Context())
        self._timer_at = at

    def _tick(self) -> None:
        self.timer = None
        self.apply_actions(self.core.on_tick(time.monotonic()))
