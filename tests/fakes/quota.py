"""The quota actor without Ray: its real core, the shell's rules for answers, and a network that can be made bad.

Words travel pickled. What a message meets on its way is `Network`'s; what the actor does is `FakeQuota`'s: it can die,
come up again from what it has stored, and stand still. `Caller` is a router's end of the line without engines.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

from serve_app.core import quota
from serve_app.core.memory import CheckpointKey, Device, EngineReport, Rank
from serve_app.core.queue.admission import Arrival, Grant, QueuePolicy
from serve_app.core.quota import Quota
from serve_app.core.shared_queue import ActorReply, RouterMessage, router_queue
from serve_app.core.times import WATCH_S
from serve_app.errors import ServeAppError
from serve_app.router import QueueClient, queue_client
from serve_app.router.model_queue import ModelQueue
from serve_app.types import RequestClass
from tests.fakes.bad_network import Away, Network
from tests.fakes.until import SOON_S, until
from tests.fakes.virtual_time import TURN_S, virtual_runner

TICK_S = 0.05
TOKENS = 100_000
DEVICES = 64  # of one engine each: those that were removed keep theirs until a scenario ends
MODEL = "sim"
ENGINE = "r1"

# Production's silences are seconds long. Their order is kept: nobody goes by what may be another's by now.
WAITS = {
    (quota, "OWNER_TTL_S"): 1.5,
    (router_queue, "FENCE_S"): 1.2,
    (queue_client, "FENCE_S"): 1.2,
    (queue_client, "ROUTER_HEARTBEAT_S"): 0.3,
    (queue_client, "ACTOR_RETRY_S"): 0.05,
}


class FakeQuota:
    """The actor.

    Args:
        engines: slots by name; they report as long as they are listed.
    """

    def __init__(self, engines: dict[str, int] | None = None) -> None:
        self.slots = {ENGINE: 2} if engines is None else engines
        self._models: dict[str, str] = {}
        self.fingerprints: dict[str, str | None] = {}  # of the engines that have told one
        self.network = Network()
        self.calls = {"exchange": 0, "watch": 0}
        self.cut: set[str] = set()  # routers whose messages do not arrive, nor fail: they hang
        self.given_up: set[str] = set()  # routers of which an earlier question is here, and is answered before the next
        self._stored: dict[CheckpointKey, object] = {}
        self._holds: dict[str, EngineReport] = {}
        self._news: dict[str, asyncio.Event] = {}
        self._moves = asyncio.Event()  # unset while it stands still
        self._moves.set()
        self._due: asyncio.TimerHandle | None = None
        self._epoch = 0
        self.up = False
        self.start()
        self._ticks = asyncio.create_task(self._tick_on())

    async def close(self) -> None:
        self._ticks.cancel()
        await asyncio.wait({self._ticks})
        self.die()

    # Life and death

    def start(self) -> None:
        """Come up, from what was stored."""
        self._epoch += 1
        self.core = Quota(self._epoch, dict(self._stored), time.monotonic())
        self.up = True
        self.core.on_devices([Device("n", number, 1000, 0) for number in range(DEVICES)], time.monotonic())
        for _ in range(2):
            self._engines_speak()
        self._moved()

    def die(self) -> None:
        """Open calls fail, and so do all others until `start`."""
        self.up = False
        if self._due is not None:
            self._due.cancel()
        for news in self._news.values():
            news.set()
        self._news.clear()

    @contextlib.contextmanager
    def standing_still(self) -> Iterator[None]:
        """It answers nothing for the block, and everything after it."""
        self._moves.clear()
        try:
            yield
        finally:
            self._moves.set()

    # What routers call

    async def exchange(self, message: RouterMessage) -> ActorReply:
        self.calls["exchange"] += 1
        return await self._called(message, self._exchange)

    async def watch(self, message: RouterMessage) -> ActorReply:
        self.calls["watch"] += 1
        return await self._called(message, self._watch)

    async def _called(self, message: RouterMessage, method: Callable[[RouterMessage], Any]) -> ActorReply:
        epoch = self._epoch
        message = pickle.loads(pickle.dumps(message))
        if message.router in self.cut:
            await asyncio.Event().wait()
        await self.network.carry()
        for _ in range(1 + self.network.twice()):
            await self._moves.wait()
            self._check(epoch)
            reply = await method(message)
            self._check(epoch)
        await self.network.carry()
        return pickle.loads(pickle.dumps(reply))  # type: ignore[no-any-return]

    def _check(self, epoch: int) -> None:
        if not self.up or epoch != self._epoch:
            raise Away("the actor has died")

    async def _exchange(self, message: RouterMessage) -> ActorReply:
        try:
            return self._instead(message, self.core.on_exchange(message, time.monotonic()))
        finally:
            self._moved()

    async def _watch(self, message: RouterMessage) -> ActorReply:
        """As `GpuMemoryQuota.watch`."""
        news = self._news.setdefault(message.router, asyncio.Event())
        news.clear()
        reply = self.core.on_watch(message, time.monotonic(), timed_out=False)
        if reply is not None:
            return self._instead(message, reply)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WATCH_S):
                await news.wait()
        await self._moves.wait()
        message = message._replace(resend=False)
        reply = self.core.on_watch(
            message, time.monotonic(), timed_out=True
        ) or self.core.queue.router_sessions.stale_reply(message)
        return self._instead(message, reply)

    def _instead(self, message: RouterMessage, reply: ActorReply) -> ActorReply:
        """The answer, or the one that is left when a question that its router has given up took the first news."""
        router = message.router
        if router not in self.given_up or not reply.actions:
            return reply
        self.given_up.discard(router)
        again = message._replace(resend=False, events=())
        return self.core.on_watch(again, time.monotonic(), timed_out=True) or reply

    # Inside

    def _engines_speak(self) -> None:
        for name, slots in self.slots.items():
            first = EngineReport(name, self._models.get(name, MODEL), (Rank("n"),), 1000, 1000, slots=slots)
            first = replace(first, fingerprint=self.fingerprints.get(name))
            reported = self._holds.setdefault(name, first)
            reply = self.core.on_engine(reported, time.monotonic())
            if reply.holds:
                self._holds[name] = replace(reported, holds=reply.holds, kv_tokens=TOKENS, kv_bytes=1000)

    def engine_comes(self, name: str, slots: int, model: str, fingerprint: str | None) -> None:
        """An engine starts, and gets its memory."""
        self.slots[name] = slots
        self._models[name] = model
        self.fingerprints[name] = fingerprint
        for _ in range(2):
            self._engines_speak()
        self._moved()

    def engine_ends(self, name: str) -> None:
        """An engine leaves; its routers have yet to notice."""
        del self.slots[name]
        self.core.on_engine(replace(self._holds.pop(name), gone=True), time.monotonic())
        self._moved()

    def _moved(self) -> None:
        """What follows every event of the core."""
        changes = self.core.changes()
        self.core.checkpoint.stored(changes)
        for key, (keep, value) in changes.items():
            if keep:
                self._stored[key] = value
            else:
                self._stored.pop(key, None)
        for router in self.core.queue.router_sessions.take_woken():
            if router in self._news:
                self._news[router].set()
        if self._due is not None:
            self._due.cancel()
        due = self.core.queue.next_due()
        self._due = None
        if due is not None:
            delay_s = max(0.0, due - time.monotonic())
            self._due = asyncio.get_running_loop().call_later(delay_s, self._queues_due)

    def _queues_due(self) -> None:
        if self.up and self._moves.is_set():
            self.core.queue.on_tick(time.monotonic())
            self._moved()

    async def _tick_on(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)  # until the fake is closed
            await self._moves.wait()
            if self.up:
                self._engines_speak()
                self.core.on_tick(time.monotonic())
                self._moved()

    # What the tests look at

    def held(self, router: str, engine: str = ENGINE) -> tuple[int, int]:
        """Slots and tokens of a router's account."""
        return self.core.queue.accounts.account(router, engine)

    def free(self, engine: str = ENGINE) -> tuple[int, int]:
        """Slots and tokens of an engine that nobody has."""
        return self.core.queue.accounts.free(engine)

    @property
    def requests(self) -> dict[str, Any]:
        """What it knows of routers' requests, waiting or granted, by ticket."""
        return self.core.queue.requests.by_ticket

    @property
    def limits(self) -> Any:
        """What decides on limits of keys and tenants."""
        return self.core.queue.limits

    def whole(self, engine: str = ENGINE) -> tuple[int, int]:
        """Slots and tokens of an engine."""
        pool = self.core.ledger.pool(engine)
        assert pool is not None
        return pool.slots, pool.space.limit


class Caller:
    """A router without engines: asks for places, holds them, and notes in what order it got them."""

    def __init__(self, actor: FakeQuota, name: str, order: list[str] | None = None, **bounds: Any) -> None:
        self.name = name
        self.shared = QueueClient(name, actor.exchange, actor.watch)
        self.core = self.shared.core
        self.order = [] if order is None else order
        self.policy = QueuePolicy(**{"max_queued": 1000, "max_wait_s": 60.0, "min_share": 0.0} | bounds)
        self.end = self.join()

    def join(self, model: str = MODEL) -> ModelQueue:
        """Serve a model."""
        self.end = ModelQueue(self.shared, model, self.policy)
        return self.end

    async def start(self, *engines: str) -> Caller:
        await self.shared.start()
        for engine in engines or (ENGINE,):
            self.end.set_replica(engine, True)
        self.end.open()
        return self

    async def granted(self, name: str, level: RequestClass = RequestClass.NORMAL, **more: Any) -> Grant:
        given = {"tenant": "t", "cost_tokens": 10, "prompt_tokens": 5} | more
        place = await self.end.acquire(Arrival(name, level, **given))
        self.order.append(name)
        return place

    def asking(self, name: str, level: RequestClass = RequestClass.NORMAL, **more: Any) -> asyncio.Task[Grant]:
        return asyncio.create_task(self.granted(name, level, **more), name=name)

    def done(self, name: str, output_tokens: int | None = 5) -> None:
        self.end.release(name, output_tokens)

    async def run(self, name: str, level: RequestClass = RequestClass.NORMAL, for_s: float = 0.0, **more: Any) -> None:
        """A request from its arrival to its end."""
        try:
            await self.granted(name, level, **more)
            await asyncio.sleep(for_s)  # the request runs
        finally:
            self.done(name)

    def credit(self, engine: str = ENGINE) -> tuple[int, int]:
        """Slots and tokens that it could grant by itself."""
        return self.core.accounts.credit(engine)

    def used(self, engine: str = ENGINE) -> tuple[int, int]:
        """Slots and tokens that its requests hold."""
        _, slots, tokens = self.core.in_flight.held(engine)
        return slots, tokens

    @property
    def runs(self) -> list[Any]:
        """Its requests on engines."""
        return list(self.core.in_flight.running.values())

    @property
    def is_alone(self) -> bool:
        """Whether no actor knows it."""
        return self.core.alone

    @property
    def unheard(self) -> int:
        """Things kept for requests that have not ended."""
        line = self.core
        pending = line.pending
        kept = (
            self.shared.requests,
            pending.by_request_id,
            pending.tickets,
            pending.queues,
        )
        return sum(map(len, kept)) + len(line.in_flight.running) + len(line.in_flight.by_engine)

    async def hold_all(self, slots: int) -> list[str]:
        """Take every slot of the engine; the names of what holds them."""
        names = [f"holder {number}" for number in range(slots)]
        for name in names:
            await asyncio.wait_for(self.granted(name), SOON_S)
        await until(lambda: not self.core.router_session.state.contended, SOON_S, "the line is calm")
        self.order.clear()
        return names


async def spoken(*callers: Caller) -> None:
    """Until all routers are known to the actor and have heard so."""
    await until(lambda: not any(one.is_alone for one in callers), SOON_S, "all routers are booked")


async def waits(caller: Caller, actor: FakeQuota, *names: str) -> None:
    """Until requests that were asked for wait in the actor's line."""

    def arrive() -> bool:
        line = {one.arrival.request_id for one in actor.requests.values() if not one.engine}
        handed_in = [caller.core.pending.by_request_id.get(name) for name in names]
        return all(one is not None and one.ticket in line for one in handed_in)

    await until(arrive, SOON_S, f"{names} wait in the line")


async def at_rest(actor: FakeQuota, *callers: Caller) -> None:
    """Until nothing runs or waits, both ends count the same, and the ledger holds the routers' credit and no more."""

    def rest() -> bool:
        if not actor.up or actor.core.recovering or actor.requests:
            return False
        if any(one.runs or one.end.waiting for one in callers):
            return False
        for engine in actor.slots:
            credit = [one.credit(engine) for one in callers]
            if credit != [actor.held(one.name, engine) for one in callers]:
                return False
            free = actor.free(engine)
            whole = actor.whole(engine)
            if tuple(free[index] + sum(one[index] for one in credit) for index in range(2)) != whole:
                return False
        return True

    await until(rest, SOON_S, "nothing is held but credit")
    assert not any(one.unheard for one in callers)


@contextlib.asynccontextmanager
async def fleet(
    actor: FakeQuota, count: int, order: list[str] | None = None, **bounds: Any
) -> AsyncIterator[list[Caller]]:
    """Routers that are booked; they say no more after the block, and leave nothing behind."""
    callers = [await Caller(actor, f"c{number}", order, **bounds).start() for number in range(count)]
    try:
        await spoken(*callers)
        yield callers
    finally:
        for caller in callers:
            await caller.shared.stop()
        await actor.close()


def run(scenario: Callable[[], Any], waits: dict[Any, float] | None = None) -> None:
    """Run a scenario with short silences; it leaves no task, and no timer of a router, behind."""

    async def checked() -> None:
        unhandled: list[dict[str, Any]] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: unhandled.append(context))
        async with asyncio.timeout(60.0):  # against hanging
            await scenario()
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        left = [timer for timer in loop._scheduled if not timer.cancelled()]  # type: ignore[attr-defined]
        assert not left, left
        assert not unhandled, unhandled

    with contextlib.ExitStack() as patches:
        for (module, name), seconds in (WAITS | (waits or {})).items():
            patches.enter_context(mock.patch.object(module, name, seconds))
        patches.enter_context(virtual_runner(TURN_S)).run(checked())


async def refused(asked: asyncio.Task[Grant]) -> ServeAppError:
    """The error of a request that is refused."""
    done, _ = await asyncio.wait({asked}, timeout=SOON_S)
    assert done, "neither granted nor refused"
    error = asked.exception()
    assert isinstance(error, ServeAppError), error
    return error
