"""KV tokens of session requests in a router: those of the session, and an engine's own for what these do not cover.

All other requests get their tokens with their place in the line (`serve_app.shared_line`).

A pool is asked for when a request needs it and given back when that ends, since the next one may come through another
router. It costs such a request one round trip to the actor.

A request that runs and has outgrown its estimate comes before all who wait: the engine uses those tokens whether they
were given or not, and whoever began meanwhile would take another's blocks.

Invariant: a request holds its tokens from before the engine hears of it until after its end.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping

from serve_app.core.memory.budgets import FENCE_S, Budgets
from serve_app.core.memory.quota import RouterReply, RouterReport
from serve_app.core.memory.shares import PoolReport
from serve_app.errors import Overloaded

logger = logging.getLogger("ray.serve")

BEAT_S = 1.0  # between words when there is nothing new to say
GATHER_S = 0.002  # for the requests of a few turns of the event loop to be asked for in one word
ANSWER_S = FENCE_S  # an answer that comes late is good for what is left of that; the next word does not wait for it
SHORT_S = 0.05  # between questions for tokens that are not there: the actor holds each of them back, too
RETRY_S = 0.25  # after an error; Ray needs seconds to start the actor again

Speak = Callable[[RouterReport], Awaitable[RouterReply]]


class _Waiting:
    __slots__ = ("future", "request_id", "tokens")

    def __init__(self, request_id: str, tokens: int) -> None:
        self.request_id, self.tokens = request_id, tokens
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class Desk:
    """The budgets of one router replica, for all its models.

    Args:
        router_id: this router's name.
        speak: sends a word to the quota actor.
        away: what `speak` raises while the actor is away.
    """

    def __init__(self, router_id: str, speak: Speak, away: tuple[type[BaseException], ...]) -> None:
        self._router_id, self._speak, self._away = router_id, speak, away
        self._budgets = Budgets()
        self._on_demand: set[str] = set()  # pools of sessions; gone from here as soon as nothing is held of them
        self.opened = (0, 0)  # the actor's epoch, and the sessions it has opened, by its last word
        self._waiting: dict[str, collections.deque[_Waiting]] = {}
        self._owed: dict[str, dict[str, int]] = {}  # by pool and request: what it has outgrown its tokens by
        self._seq = 0
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._words: set[asyncio.Task[None]] = set()
        self.blocked: Mapping[str, int] = {}  # engines that wait for memory, by model
        self.waited = 0  # counters: requests that had to wait for tokens
        self.outgrown = 0  # and times that one outgrew what could be had

    async def start(self) -> None:
        """Begin to speak; in the context of whoever calls, which has to be no request's."""
        self._task = asyncio.create_task(self._run(), name="desk")

    async def stop(self) -> None:
        """Say no more; the quota actor takes the shares back when it has heard nothing for some seconds."""
        tasks = [task for task in (self._task, *self._words) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def open(self, pool: str) -> None:
        """An engine replica is there."""
        self._budgets.open(pool)
        self._waiting.setdefault(pool, collections.deque())
        self._news.set()

    def demand(self, pool: str) -> None:
        """A request of the session whose tokens these are is there."""
        if pool not in self._waiting:
            self._on_demand.add(pool)
            self.open(pool)

    def drop(self, pool: str) -> None:
        """An engine replica is gone; who waits for its tokens goes on, to find that out."""
        self._budgets.drop(pool)
        self._on_demand.discard(pool)
        self._owed.pop(pool, None)
        for one in self._waiting.pop(pool, ()):
            if not one.future.done():
                one.future.set_result(None)

    async def acquire(self, request_id: str, pool: str, tokens: int, wait_s: float) -> None:
        """Give a request its tokens, now or when they come.

        Raises:
            Overloaded: they did not come within `wait_s` seconds.
        """
        line = self._waiting.get(pool)
        if line is None:
            return  # the engine has left: the call that follows says so
        if not line and pool not in self._owed and self._budgets.hold(request_id, pool, tokens, time.monotonic()):
            return
        self.waited += pool not in self._on_demand
        one = _Waiting(request_id, tokens)
        line.append(one)
        self._news.set()
        try:
            async with asyncio.timeout(wait_s):
                await one.future
        except BaseException as error:
            if one in line:
                line.remove(one)
            self.release(request_id)  # what came in the very turn in which the caller left
            if not isinstance(error, TimeoutError):
                raise
            raise Overloaded(
                f"the request needs {tokens} tokens of KV cache, which did not come free in time",
                retry_after_s=wait_s,
                code="kv_budget",
            ) from None

    def begin(self, request_id: str, pool: str, tokens: int) -> bool:
        """Give a request tokens of a pool in which it holds none, if they are there; False: they are not."""
        if not self._waiting.get(pool) and self._budgets.hold(request_id, pool, tokens, time.monotonic()):
            return True
        self.outgrown += 1
        return False

    def grow(self, request_id: str, tokens: int, *, owe: bool = True) -> bool:
        """Give a running request more; False: there is none now, and the engine has to see how it goes on.

        Args:
            owe: it gets them as soon as there are some, before anyone who waits.
        """
        if self._budgets.grow(request_id, tokens, time.monotonic()):
            return True
        self.outgrown += 1
        pool = self._budgets.pool_of(request_id)
        if owe and pool is not None:
            owed = self._owed.setdefault(pool, {})
            owed[request_id] = owed.get(request_id, 0) + tokens
            self._news.set()
        return False

    def held(self, request_id: str) -> int:
        """KV tokens of a request."""
        return self._budgets.held(request_id)

    def release(self, request_id: str) -> int:
        """A request has ended; returns what it held. Again, or of an unknown one: nothing."""
        pool = self._budgets.pool_of(request_id)
        tokens = self._budgets.release(request_id)
        if pool is not None:
            if pool in self._owed and self._owed[pool].pop(request_id, 0) and not self._owed[pool]:
                del self._owed[pool]
            self._serve(pool)
            if self._budgets.gives_back(pool) or pool in self._on_demand:
                self._news.set()
        return tokens

    def _settled(self, pool: str) -> bool:
        """Give those who run what they are owed; whether that was all of it."""
        owed = self._owed.get(pool, {})
        for request_id, tokens in list(owed.items()):
            if not self._budgets.grow(request_id, tokens, time.monotonic()):
                return False
            del owed[request_id]
        self._owed.pop(pool, None)
        return True

    def _serve(self, pool: str) -> None:
        if not self._settled(pool):
            return
        line = self._waiting.get(pool)
        while line:
            one = line[0]
            if not one.future.done():
                if not self._budgets.hold(one.request_id, pool, one.tokens, time.monotonic()):
                    return
                one.future.set_result(None)
            line.popleft()

    def _word(self) -> RouterReport:
        self._seq += 1
        return RouterReport(self._router_id, self._budgets.epoch, self._seq, tuple(map(self._pool, self._waiting)))

    def _pool(self, pool: str) -> PoolReport:
        """What is held and what waits."""
        wanted = sum(one.tokens for one in self._waiting[pool]) + sum(self._owed.get(pool, {}).values())
        return self._budgets.report(pool, wanted)

    async def _run(self) -> None:
        while True:
            self._news.clear()
            word = asyncio.create_task(self._say(), name="desk-word")
            self._words.add(word)
            word.add_done_callback(self._words.discard)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(BEAT_S):
                    await self._news.wait()
            await asyncio.sleep(GATHER_S)

    async def _say(self) -> None:
        """One word and its answer; what is still wanted then is asked for again at once."""
        sent_at = time.monotonic()
        word = self._word()
        try:
            async with asyncio.timeout(ANSWER_S):
                reply = await self._speak(word)
        except (TimeoutError, *self._away) as error:
            logger.warning("the quota actor does not answer: %s", error)
            await self._again(word, RETRY_S)
            return
        await self._heard(word, reply, sent_at)

    async def _again(self, word: RouterReport, after_s: float) -> None:
        """Speak again soon, unless a later word is on its way: one chain of words, however many requests wait."""
        await asyncio.sleep(after_s)
        if word.seq == self._seq:
            self._news.set()

    async def _heard(self, word: RouterReport, reply: RouterReply, sent_at: float) -> None:
        known = self._budgets.epoch
        if not self._budgets.on_epoch(reply.epoch):
            return
        if reply.stale:
            # the epoch we know, and stale all the same: it has just come up and knows no devices yet
            await self._again(word, RETRY_S if reply.epoch == known else 0.0)
            return
        self.blocked = dict(reply.blocked)
        self._budgets.on_targets(reply.targets, reply.epoch, sent_at)
        self.opened = max(self.opened, (reply.epoch, reply.opened))
        self._forget_idle(word, reply)
        before = self._in_line()
        for pool in list(self._waiting):
            self._serve(pool)
        if any(self._budgets.gives_back(pool) for pool in self._waiting):
            self._news.set()
        elif self._in_line():
            await self._again(word, SHORT_S if self._in_line() == before else 0.0)

    def _forget_idle(self, word: RouterReport, reply: RouterReply) -> None:
        """Be done with sessions of which nothing is held here, once the actor has heard so under its last target."""
        newer = {target.pool for target in reply.targets}
        for pool in word.pools:
            name = pool.pool
            if name not in self._on_demand or pool.limit or pool.want or name in newer:
                continue
            if not self._waiting[name] and not self._budgets.limit(name):
                self.drop(name)

    def _in_line(self) -> int:
        return sum(map(len, self._waiting.values())) + sum(map(len, self._owed.values()))
