"""A router's client of the queue that all routers share: `core.shared_queue.router_queue` with a clock and the way to
the actor.

The core decides what routers send and what an answer means. Here the events of one turn of the event loop leave as one
message, at most `CALLS` messages are on their way (later events ride on the next one), one long poll returns what the
actor decides later, and a timer ends the longest wait. `serve_app.router.model_queue` has the models.

Invariant: every event of the core is followed by its actions, in order, and by a message if it has left one to send.
Invariant: a request is in `_requests` from `acquire` until it is refused, cancelled or done, and nowhere else here.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from serve_app.core.memory import FENCE_S
from serve_app.core.queue import Action, Grant
from serve_app.core.shared_queue import BATCH, Exchange, RemoteLine, Reply, SessionOpened
from serve_app.errors import Unavailable

logger = logging.getLogger("ray.serve")

BEAT_S = 1.0  # between messages when there is nothing to say
REPORT_S = 0.1  # what running requests have produced is reported so often: fair order needs no more
CALM_REPORT_S = 0.5  # while no request waits anywhere no order is made; when one does, the next message has all sums
REPORT_EACH_S = 0.0005  # and no more than 2,000 reports a second come from one router, however many requests run
CALLS = 4  # messages on their way at once; more would only make smaller ones
ANSWER_S = FENCE_S  # an answer that comes later is good for nothing
RETRY_S = 0.25  # after an error; Ray needs seconds to start the actor again

Ask = Callable[[Exchange], Awaitable[Reply]]


class Queue(Protocol):
    """The queue of one model, as `serve_app.router.model_queue` has it: its name, and the engines that it has not
    dropped."""

    model: str
    known: set[str]

    def decide(self, action: Action, decided: asyncio.Future[Grant]) -> None:
        """Deliver a decision."""
        ...


@dataclass(frozen=True, slots=True)
class _Request:
    """A request of this process: it waits until `decided` is done, and holds a grant after that."""

    queue: Queue
    decided: asyncio.Future[Grant]


class QueueClient:
    """The queues of all models, for one router replica.

    Args:
        router_id: this router's name; no other has had it.
        exchange: sends a message to the quota actor.
        watch: the long poll for news.
        away: what these raise while the actor is away.
    """

    def __init__(self, router_id: str, exchange: Ask, watch: Ask, away: tuple[type[BaseException], ...]) -> None:
        self._exchange, self._watch, self._away = exchange, watch, away
        self.core = RemoteLine(router_id)
        self._queues: dict[str, Queue] = {}
        self._requests: dict[str, _Request] = {}
        self._calls: set[asyncio.Task[None]] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self._flushing = self._stopped = False
        self._quiet_until = 0.0  # nothing is sent before: there is nobody to receive it
        self._sent_at = 0.0
        self._booked = asyncio.Event()
        self._timer: asyncio.Handle | None = None
        self._timer_at = 0.0  # in the loop's time; uvloop has handles that do not know it
        self._compared_at = 0.0  # when this process's requests were last compared with the core's

    async def start(self) -> None:
        """Begin to send; in the context of the caller, which must not be a request's."""
        self._tasks = [
            asyncio.create_task(self._report(), name="queue-reports"),
            asyncio.create_task(self._poll(), name="queue-watch"),
        ]

    async def stop(self) -> None:
        """Send no more, whatever ends from now on; the actor takes everything back when it has received nothing for
        some seconds."""
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        tasks = [*self._tasks, *self._calls]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def alone(self) -> bool:
        """Whether this router decides by itself at the moment, from its credit."""
        return self.core.alone

    @property
    def granted(self) -> tuple[int, int]:
        """Requests that this router has granted from its credit, and that the shared line has. Counters."""
        return self.core.granted_here, self.core.granted_there

    @property
    def sessions(self) -> Mapping[str, SessionOpened]:
        """The open sessions by name, as the actor has told them; always the present ones."""
        return self.core.sessions

    @property
    def blocked(self) -> Mapping[str, int]:
        """Engines that wait for memory, by model."""
        return self.core.blocked

    # For the queues

    def add(self, queue: Queue) -> None:
        """This is the queue of its model from now on; what an earlier one of that name has granted goes on."""
        self._queues[queue.model] = queue

    def present(self, queue: Queue) -> bool:
        """Whether it is the queue of its model now."""
        return self._queues.get(queue.model) is queue

    def forget(self, queue: Queue) -> None:
        """Its model is gone, and nothing runs there any more. Serve may stop its engines later and tells no router
        then, so they are dropped here, except those that the next queue of this name uses."""
        present = self._queues.get(queue.model, queue)
        if present is queue and self._queues.pop(queue.model, None) is not None:
            self.core.retire(queue.model)  # first: other routers' use of the engines waits for no message of this
        for engine in queue.known if present is queue else queue.known - present.known:
            self.core.drop(engine)
        self.after([])

    def begin(self, request_id: str, queue: Queue) -> asyncio.Future[Grant]:
        """A request asks for a place; its decision. ValueError: one of this id is here already."""
        if request_id in self._requests:
            raise ValueError(f"{request_id!r} waits or runs already")
        decided: asyncio.Future[Grant] = asyncio.get_running_loop().create_future()
        self._requests[request_id] = _Request(queue, decided)
        return decided

    def end(self, request_id: str) -> None:
        """The request waits and runs no more; again changes nothing."""
        self._requests.pop(request_id, None)

    def requests(self, queue: Queue) -> dict[str, asyncio.Future[Grant]]:
        """The decisions of a queue's requests, by id."""
        return {name: request.decided for name, request in self._requests.items() if request.queue is queue}

    def after(self, actions: Iterable[Action]) -> None:
        """What every event ends with: decisions are delivered, a message and a timer are due.

        A request that has left meanwhile has told the core so itself.
        """
        for action in actions:
            request = self._requests.get(action.request_id)
            if request is None or request.decided.done():
                continue
            try:
                request.queue.decide(action, request.decided)
            except Exception as error:  # of one request; the others' decisions, and the exchange, must go on
                logger.exception("the queue of model %s goes on after an error", request.queue.model)
                request.decided.set_exception(error)
        try:
            if not self._flushing:
                # not in the context of a request: Ray cancels what a cancelled one has called, and this is everybody's
                asyncio.get_running_loop().call_soon(self._flush, context=contextvars.Context())
                self._flushing = True
            self._wait()
        except Exception:  # the event has happened all the same; the next beat sends it, and looks at who is late
            logger.exception("the queue goes on after an error")

    # The exchange

    def _flush(self) -> None:
        self._flushing = False
        try:
            self._send()
        except Exception:  # the next beat says it
            logger.exception("the queue goes on after an error")

    def _send(self, *, beat: bool = False) -> None:
        now = time.monotonic()
        while not self._stopped and now >= self._quiet_until and len(self._calls) < CALLS:
            message = self.core.next_exchange(now, beat=beat)
            if message is None:
                return
            beat, self._sent_at = False, now
            call = asyncio.create_task(self._call(message), name="queue-message")
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)

    async def _call(self, message: Exchange) -> None:
        try:
            await self._ask(self._exchange, message)
        finally:
            asyncio.get_running_loop().call_soon(self._flush)  # what there was no call left for

    async def _ask(self, how: Ask, message: Exchange) -> bool:
        """One question and its answer; False: there was none that counts."""
        sent_at, known = time.monotonic(), self.core.epoch
        try:
            async with asyncio.timeout(ANSWER_S):
                reply = await how(message)
            now = time.monotonic()
            if reply.stale and reply.epoch == known:  # it has just come up and knows no devices yet
                self._quiet_until = now + RETRY_S
            self._received(self.core.on_reply(reply, sent_at, now))
            return not reply.stale
        except Exception as error:
            if not isinstance(error, (TimeoutError, *self._away)):
                logger.exception("the queue goes on after an error in the exchange with the quota actor")
            elif not self.alone:
                logger.warning("the quota actor does not answer, and this router goes by its credit: %r", error)
            now = time.monotonic()
            self._quiet_until = now + RETRY_S
            self._received(self.core.on_lost(now))
            return False

    def _received(self, actions: list[Action]) -> None:
        if self.core.booked:
            self._booked.set()
        else:
            self._booked.clear()
        self.after(actions)

    async def _poll(self) -> None:
        """The standing question; it has an answer at the latest when the actor's own patience is over."""
        while True:
            try:
                await self._booked.wait()
                answered = await self._ask(self._watch, self.core.watch())
            except Exception:
                answered = False
                logger.exception("the queue goes on listening after an error")
            if not answered:
                await asyncio.sleep(RETRY_S)

    async def _report(self) -> None:
        """A beat when it is time, and sooner where sums have waited for a message that would have taken them."""
        beat_at = time.monotonic()
        while True:
            soonest_s = REPORT_S if self.core.contended else CALM_REPORT_S
            report_s = max(soonest_s, REPORT_EACH_S * min(BATCH, self.core.running))
            wait_s = self._sent_at + report_s - time.monotonic()
            await asyncio.sleep(wait_s if wait_s > 0.0 else report_s)
            now = time.monotonic()
            try:
                if now >= self._compared_at + BEAT_S:
                    self._compared_at = now
                    self._compare(now)
                if now >= beat_at + BEAT_S or (self.core.has_sums and now >= self._sent_at + report_s):
                    beat_at = now
                    self._send(beat=True)
            except Exception:
                logger.exception("the queue goes on reporting after an error")

    def _compare(self, now: float) -> None:
        """Compare this process's requests with the core's: a request of one side alone is ended."""
        holds = {request_id: request.decided.done() for request_id, request in self._requests.items()}
        actions, lost, wrong = self.core.reconcile(holds, now)
        for request_id in lost:
            logger.error("request %s was known on one side only, and is ended", request_id)
            request = self._requests.get(request_id)
            if request is not None and not request.decided.done():
                error = Unavailable("the request was lost; try again", code="request_lost", retry_after_s=1.0)
                request.decided.set_exception(error)
        if wrong:
            logger.error("what requests hold was counted anew on engines %s", ", ".join(wrong))
        self.after(actions + self.core.on_tick(now))  # where a timer was lost

    # Time

    def _wait(self) -> None:
        """Have a timer no later than the next wait ends; an early one does no harm."""
        due = self.core.next_due()
        if due is None or self._stopped:
            return
        loop = asyncio.get_running_loop()
        at = loop.time() + max(0.0, due - time.monotonic())
        if self._timer is not None:
            if self._timer_at <= at:
                return
            self._timer.cancel()
            self._timer = None
        self._timer = loop.call_at(at, self._tick, context=contextvars.Context())
        self._timer_at = at

    def _tick(self) -> None:
        self._timer = None
        self.after(self.core.on_tick(time.monotonic()))
