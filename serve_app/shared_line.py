"""A router's end of the one line that all routers share: `core.exchange.remote` with a clock and the way to the actor.

What routers say and hear is the core's business. Here a turn of the event loop's events go out as one message, few
messages are on their way at once (what comes up meanwhile rides on the next one), one standing question hears what is
decided later, and whoever waits has a timer for the end of that.

Invariant: every event of the core is followed by its actions, in order, and by a message if it has left one to send.
Invariant: whatever fails, a request that does not live in this process any more holds nothing after two beats.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from serve_app.core.admission import Action, Arrival, Policy, QueueStatus
from serve_app.core.exchange.protocol import BATCH, LINE, Exchange, Reply
from serve_app.core.exchange.remote import RemoteLine
from serve_app.core.memory.budgets import FENCE_S
from serve_app.core.waiting.events import Grant, Reason, Refuse, ReplicaUse
from serve_app.core.waiting.startup import StartUp
from serve_app.local_line import Perform
from serve_app.types import RequestClass

logger = logging.getLogger("ray.serve")

BEAT_S = 1.0  # between words when there is nothing to say
REPORT_S = 0.1  # what running requests have produced is told so often: fair order needs no more
REPORT_EACH_S = 0.0005  # and no more than 2,000 words of it a second come from one router, however many run
CALLS = 4  # messages on their way at once; more would only make smaller ones
ANSWER_S = FENCE_S  # an answer that comes later is good for nothing
RETRY_S = 0.25  # after an error; Ray needs seconds to start the actor again

Speak = Callable[[Exchange], Awaitable[Reply]]
Alive = Callable[[], Mapping[str, bool]]


class SharedLine:
    """The lines of all models, for one router replica.

    Args:
        router_id: this router's name; no other has had it.
        speak: sends a message to the quota actor.
        watch: asks it to be told when there is news.
        away: what these raise while the actor is away.
    """

    def __init__(self, router_id: str, speak: Speak, watch: Speak, away: tuple[type[BaseException], ...]) -> None:
        self._speak, self._watch, self._away = speak, watch, away
        self._remote = RemoteLine(router_id + LINE)
        self._ends: dict[str, ModelEnd] = {}
        self._asked: dict[str, ModelEnd] = {}  # by request that waits
        self._calls: set[asyncio.Task[None]] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self._flushing = self._stopped = False
        self._quiet_until = 0.0  # nothing is said before: there is nobody to hear it
        self._said_at = 0.0
        self._booked = asyncio.Event()
        self._timer: asyncio.Handle | None = None
        self._timer_at = 0.0  # in the loop's time; uvloop has handles that do not know it
        self._looked_at = 0.0  # when who lives here was last compared with who is known
        self._living: dict[ModelEnd, Alive] = {}

    async def start(self) -> None:
        """Begin to speak; in the context of whoever calls, which has to be no request's."""
        self._tasks = [
            asyncio.create_task(self._report(), name="line-reports"),
            asyncio.create_task(self._hear(), name="line-watch"),
        ]

    async def stop(self) -> None:
        """Say no more, whatever ends from now on; the actor takes everything back when it has heard nothing for some
        seconds."""
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        tasks = [*self._tasks, *self._calls]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def of(self, model: str, policy: Policy, perform: Perform, alive: Alive, lost: Callable[[str], None]) -> ModelEnd:
        """The line of one model. Another one of the same name takes its place; what the first has granted goes on.

        Args:
            alive: this router's requests of the model, waiting and running, and whether each holds a place.
            lost: told of a request that waits for a decision which does not come any more.
        """
        end = self._ends[model] = ModelEnd(self, self._remote, model, policy, perform, lost)
        self._living[end] = alive
        return end

    @property
    def alone(self) -> bool:
        """Whether this router decides by itself at the moment, from its credit."""
        return self._remote.alone

    @property
    def granted(self) -> tuple[int, int]:
        """Requests that this router has granted from its credit, and that the shared line has. Counters."""
        return self._remote.granted_here, self._remote.granted_there

    # For the ends

    def present(self, end: ModelEnd) -> bool:
        """Whether it is the line of its model now."""
        return self._ends.get(end.model) is end

    def forget(self, end: ModelEnd) -> None:
        """Its model is gone, and nothing runs there any more. Serve may yet have to take its engines away, and nobody
        will tell: they are let go of here, save those that the next line of this name has."""
        self._living.pop(end, None)
        present = self._ends.get(end.model, end)
        if present is end and self._ends.pop(end.model, None) is not None:
            self._remote.retire(end.model)  # first: other routers' use of the engines waits for no word of this one
        for engine in end.known if present is end else end.known - present.known:
            self._remote.drop(engine)
        self.after([])

    def expect(self, request_id: str, end: ModelEnd) -> None:
        """Whose request it is that was asked for."""
        self._asked[request_id] = end

    def expect_no_more(self, request_id: str) -> None:
        """It is of no use any more."""
        self._asked.pop(request_id, None)

    def after(self, actions: Iterable[Action], end: ModelEnd | None = None) -> None:
        """What every event ends with: what is decided is carried out, said, and waited for.

        Args:
            end: whose event it was; it follows its line even where nothing was decided.
        """
        decided: dict[ModelEnd, list[Action]] = {} if end is None else {end: []}
        for action in actions:
            asked = self._asked.pop(action.request_id, None)
            if asked is not None:
                decided.setdefault(asked, []).append(action)
        for one, its in decided.items():
            try:
                one.perform(its)
            except Exception:  # one model's; the others' requests, and the exchange, must not suffer by it
                logger.exception("the line of model %s goes on after an error", one.model)
        try:
            if not self._flushing:
                # not in the context of a request: Ray cancels what a cancelled one has called, and this is everybody's
                asyncio.get_running_loop().call_soon(self._flush, context=contextvars.Context())
                self._flushing = True
            self._wait()
        except Exception:  # the event has happened all the same; the next beat says it, and looks at who is late
            logger.exception("the line goes on after an error")

    # The exchange

    def _flush(self) -> None:
        self._flushing = False
        try:
            self._send()
        except Exception:  # the next beat says it
            logger.exception("the line goes on after an error")

    def _send(self, *, beat: bool = False) -> None:
        now = time.monotonic()
        while not self._stopped and now >= self._quiet_until and len(self._calls) < CALLS:
            told = self._remote.next_exchange(now, beat=beat)
            if told is None:
                return
            beat, self._said_at = False, now
            call = asyncio.create_task(self._say(told), name="line-message")
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)

    async def _say(self, told: Exchange) -> None:
        try:
            await self._ask(self._speak, told)
        finally:
            asyncio.get_running_loop().call_soon(self._flush)  # what there was no call left for

    async def _ask(self, how: Speak, told: Exchange) -> bool:
        """One question and its answer; False: there was none that counts."""
        sent_at, known = time.monotonic(), self._remote.epoch
        try:
            async with asyncio.timeout(ANSWER_S):
                reply = await how(told)
            now = time.monotonic()
            if reply.stale and reply.epoch == known:  # it has just come up and knows no devices yet
                self._quiet_until = now + RETRY_S
            self._heard(self._remote.on_reply(reply, sent_at, now))
            return not reply.stale
        except Exception as error:
            if not isinstance(error, (TimeoutError, *self._away)):
                logger.exception("the line goes on after an error in the exchange with the quota actor")
            elif not self.alone:
                logger.warning("the quota actor does not answer, and this router goes by its credit: %r", error)
            now = time.monotonic()
            self._quiet_until = now + RETRY_S
            self._heard(self._remote.on_lost(now))
            return False

    def _heard(self, actions: list[Action]) -> None:
        if self._remote.booked:
            self._booked.set()
        else:
            self._booked.clear()
        self.after(actions)

    async def _hear(self) -> None:
        """The standing question; it has an answer at the latest when the actor's own patience is over."""
        while True:
            try:
                await self._booked.wait()
                heard = await self._ask(self._watch, self._remote.watch())
            except Exception:
                heard = False
                logger.exception("the line goes on listening after an error")
            if not heard:
                await asyncio.sleep(RETRY_S)

    async def _report(self) -> None:
        """A beat when it is time, and sooner where sums have waited for a message that would have taken them."""
        beat_at = time.monotonic()
        while True:
            report_s = max(REPORT_S, REPORT_EACH_S * min(BATCH, self._remote.running))
            wait_s = self._said_at + report_s - time.monotonic()
            await asyncio.sleep(wait_s if wait_s > 0.0 else report_s)
            now = time.monotonic()
            try:
                if now >= self._looked_at + BEAT_S:
                    self._looked_at = now
                    self._look(now)
                if now >= beat_at + BEAT_S or (self._remote.has_sums and now >= self._said_at + report_s):
                    beat_at = now
                    self._send(beat=True)
            except Exception:
                logger.exception("the line goes on reporting after an error")

    def _look(self, now: float) -> None:
        """Who lives in this process, and who is known to the line: a request of one side alone is ended."""
        alive = {request_id: holds for living in self._living.values() for request_id, holds in living().items()}
        actions, lost, wrong = self._remote.reconcile(alive, now)
        for request_id in lost:
            logger.error("request %s was known on one side only, and is ended", request_id)
            self._asked.pop(request_id, None)
            for end in self._living:
                end.lost(request_id)
        if wrong:
            logger.error("what requests hold was counted anew on engines %s", ", ".join(wrong))
        self.after(actions + self._remote.on_tick(now))  # where a timer was lost

    # Time

    def _wait(self) -> None:
        """Have a timer no later than the next wait ends; an early one does no harm."""
        due = self._remote.next_due()
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
        self.after(self._remote.on_tick(time.monotonic()))


@dataclass(frozen=True, slots=True)
class EndView:
    """What of a model's line is this router's, in figures; classes by label, reasons by value. `replicas`: what the
    quota actor has booked for this router, credit included, and what of it requests hold by the line's own count."""

    waiting: Mapping[str, int]
    refused: Mapping[str, int]
    replicas: Mapping[str, ReplicaUse]


class ModelEnd:
    """A `Decider`: one model's part of the shared line."""

    def __init__(
        self,
        line: SharedLine,
        remote: RemoteLine,
        model: str,
        policy: Policy,
        perform: Perform,
        lost: Callable[[str], None],
    ) -> None:
        self.model, self.lost = model, lost
        self._line, self._remote, self._policy, self._perform = line, remote, policy, perform
        self._start = StartUp()
        self._usable: set[str] = set()
        self.known: set[str] = set()  # engines that have not been forgotten
        self._opened = self._closed = False
        self._refused: Counter[Reason] = Counter()

    def open(self) -> None:
        if not self._opened:
            self._opened = True
            self._remote.serve(self.model, self._policy)
            self._line.after([], self)

    def arrive(self, arrival: Arrival) -> None:
        self.open()
        now = time.monotonic()
        actions = self._remote.on_arrive(self.model, arrival, now)
        self._line.expect(arrival.request_id, self)
        if not actions and not self._usable:
            self._start.needed(now)
        self._line.after(actions, self)

    def cancel(self, request_id: str) -> None:
        self._line.expect_no_more(request_id)
        self._line.after(self._remote.on_cancel(request_id, time.monotonic()), self)

    def done(self, request_id: str, output_tokens: int | None = None, prompt_tokens: int | None = None) -> None:
        self._line.after(self._remote.on_done(request_id, time.monotonic(), prompt_tokens, output_tokens), self)

    def progress(self, request_id: str, output_tokens: int) -> None:
        self._remote.on_progress(request_id, output_tokens)

    def grow(self, request_id: str, tokens: int) -> bool:
        had = self._remote.grow(request_id, tokens)
        self._line.after([])
        return had

    def replica(self, replica_id: str, slots: int, usable: bool, once: bool = False) -> None:
        if self._closed:
            return  # an ejection that was over, of an engine that has been let go of
        now = time.monotonic()
        if usable and not self._usable:
            self._start.came(now, new=replica_id not in self.known)
        self.known.add(replica_id)
        (self._usable.add if usable else self._usable.discard)(replica_id)
        if not self._usable and self.waiting:
            self._start.needed(now)
        self._line.after(self._remote.reach(self.model, replica_id, usable, now, once=once), self)

    def replica_gone(self, replica_id: str) -> None:
        self._usable.discard(replica_id)
        self.known.discard(replica_id)
        self._remote.drop(replica_id)
        self._line.after([], self)

    def start_told(self, start_s: float) -> None:
        self._start.told(start_s)

    def configure(self, policy: Policy) -> None:
        self._policy = policy
        if self._opened and self._line.present(self):
            self._remote.serve(self.model, policy)
            self._line.after([], self)

    def close(self) -> None:
        self._closed = True
        self._line.forget(self)

    def perform(self, actions: list[Action]) -> None:
        """Carry out what was decided."""
        self._perform([self._told(action) for action in actions])

    @property
    def waiting(self) -> int:
        return self._remote.waiting(self.model)

    def ahead(self, request_class: RequestClass) -> tuple[tuple[RequestClass, int], ...]:
        return self._remote.ahead(self.model, request_class)

    def status(self, request_id: str) -> QueueStatus | None:
        status = self._remote.status(request_id)
        self._line.after([])  # it asks again
        if status is not None and not self._usable:
            return replace(status, expected_start_s=self.expected_start_s())
        return status

    @property
    def granted(self) -> int:
        return self._remote.running_of(self.model)

    @property
    def start_s(self) -> float | None:
        return self._start.measured_s

    def expected_start_s(self) -> float:
        return self._start.remaining_s(time.monotonic())

    def snapshot(self) -> EndView:
        waiting = self._remote.waiting_by_class(self.model)
        return EndView(
            waiting={level.label: count for level, count in waiting.items()},
            refused={reason.value: self._refused[reason] for reason in Reason},
            replicas={name: self._use(name) for name in sorted(self.known)},
        )

    def _use(self, replica_id: str) -> ReplicaUse:
        used, booked = self._remote.account(replica_id)
        return ReplicaUse(booked.slots, used)

    def _told(self, action: Action) -> Action:
        """A refusal with the time that this router knows a start to take, which the line of all cannot know."""
        if isinstance(action, Grant):
            return action
        self._refused[action.reason] += 1
        if action.reason is Reason.NO_REPLICA:
            return Refuse(action.request_id, action.reason, self.expected_start_s())
        return action
