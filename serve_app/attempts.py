"""How one request gets to a replica, and to another one when that is lost.

Three ways lead there: through the line; in an open session beside it; and aside, for work that takes no slot. They
differ in the place that they get and in what a loss means. What is done in a place is the same: hand in, wait for the
first frames, relay.

Invariant: a request of which its client has seen nothing survives the loss of its replica, whenever that comes; one of
which it has seen something is not tried again. What a place holds is given back once, however the request ends.

An answer that is not streamed is collected before its client sees any of it, so until then it runs again as if new.
What the lost engine had made is discarded: it counts as the tenant's use of the line, and not as tokens it was sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from serve_app.aim import Aim, Key, Why
from serve_app.budget import Budget
from serve_app.channel import Stream
from serve_app.core.admission import Arrival
from serve_app.core.memory.sessions import Session
from serve_app.desk import Desk
from serve_app.engine.protocol import EngineInfo, Frame, Submit, Usage
from serve_app.errors import EngineFailed, EngineUnreachable, Overloaded, ServeAppError
from serve_app.local_line import Decider
from serve_app.replica_set import ReplicaSet
from serve_app.session_places import Draw, SessionPlaces, ahead
from serve_app.trail import Trail
from serve_app.waiters import Granted

logger = logging.getLogger("ray.serve")

MAX_LOSSES = 3  # engines that may die under one request before it is taken for the cause
PAUSE_S = 0.05  # before a replica that failed and stays in use may get the same request again; doubles each time
LONGEST_PAUSE_S = 1.0  # as long as the first ejection: what lets no request through is looked at once a second
ASIDE_RETRY_S = 0.25  # between attempts of work that takes no slot, and so cannot wait in the line

Make = Callable[[int], Submit]  # the request, with the number it is given
Relay = Callable[[Stream, list[Frame], Granted], Awaitable[None]]
OnTokens = Callable[[int], None]


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


@dataclass(frozen=True, slots=True)
class Place:
    """Where a request runs, who is told of the tokens it produces, and what gives the place back, with what it has used
    if that is known (again: nothing)."""

    granted: Granted
    give_back: Callable[[Usage | None], None]
    on_tokens: OnTokens | None = None


class Attempts:
    """The ways of one model's requests in one router.

    Args:
        replicas: of the model.
        slot: holds a slot of the line for a block; raises as `serve_app.waiters.Waiters.granted`.
        give_back: ends what a request of this id holds, slot and tokens, with the tokens it made and those of its
            prompt (None: not counted); again changes nothing.
        info: what the engines have told of themselves; None: nothing yet.
        line: that of the model; running requests tell it of what they produce and need.
        desk: where requests of sessions get their KV tokens; None: they need none.
    """

    def __init__(
        self,
        replicas: ReplicaSet,
        slot: Callable[[Arrival], AbstractAsyncContextManager[Granted]],
        give_back: Callable[[str, int | None, int | None], None],
        info: Callable[[], EngineInfo | None],
        line: Decider,
        desk: Desk | None,
    ) -> None:
        self._replicas = replicas
        self._slot = slot
        self._give_back = give_back
        self._info = info
        self._line = line
        self._desk = desk
        self._sessions = SessionPlaces()
        self.pausing = 0  # requests between two attempts, in no line meanwhile
        self.placed: Counter[tuple[str, str]] = Counter()  # grants, by what the request's key is and how it was placed

    @property
    def in_sessions(self) -> int:
        """Requests that run beside the line."""
        return self._sessions.taken

    async def in_line(
        self,
        arrival: Arrival,
        key: Key | None,
        make: Make,
        relay: Relay,
        max_wait_s: float,
        check_open: Callable[[], None],
        trail: Trail,
    ) -> None:
        """Through the line; lost before its client has seen of it, it waits again, no longer than `max_wait_s` in all.

        Where the lost replica stays in use, since no more may be out or it was an accident, it pauses before.

        Raises as `slot` and `check_open`, and `EngineFailed` if the replica fails under `relay` or engines keep dying.
        """
        losses = Losses(time.monotonic() + max_wait_s)

        def give_back(used: Usage | None = None) -> None:
            read, made = (None, trail.output_tokens) if used is None else (used.prompt_tokens, used.completion_tokens)
            trail.release(time.monotonic())
            self._give_back(arrival.request_id, made, read)

        def lost(error: EngineFailed, ran_s: float) -> bool:
            if losses.final(error, time.monotonic(), ran_s):
                return False
            trail.lost(time.monotonic())
            logger.warning("request %s waits again: %s", arrival.request_id, error.message)
            return True

        asked, avoid, pause_s = arrival, None, PAUSE_S
        while True:
            check_open()
            aim = self._aim(asked, key, avoid)
            affinity = None if aim is None else aim.replica_id
            budget = Budget(asked, self._info(), trail.most_tokens, trail.sequences)
            arrival = dataclasses.replace(
                asked, affinity=affinity, accepted=avoid is not None, cost_tokens=budget.tokens
            )
            async with self._slot(arrival) as granted:
                try:
                    granted = self._placed(granted, key, aim)
                    trail.hold(budget, time.monotonic())
                    on_tokens = functools.partial(self._made, arrival.request_id, budget)
                    if await self._attempt(Place(granted, give_back, on_tokens), make, relay, lost, trail):
                        return
                finally:
                    give_back()  # before the slot's own end, which does not know what was made
            avoid = granted.replica_id
            if self._replicas.usable(avoid):
                with self._pausing():
                    await asyncio.sleep(pause_s)
                pause_s = min(2.0 * pause_s, LONGEST_PAUSE_S)

    async def in_session(self, arrival: Arrival, make: Make, relay: Relay, session: Session, trail: Trail) -> bool:
        """On its session's replica, beside the line; False: it has to go the way of all others, since the replica is
        gone or was lost unseen, the session's place is taken, or it needs more tokens than are free."""
        session_id, request_id = session.session_id, arrival.request_id
        if (trail.sequences or arrival.slots) > 1 or not self._replicas.usable(session.pool):
            return False
        if not self._sessions.enter(session_id, request_id):
            return False
        draw = None if self._desk is None else Draw(self._desk, request_id, session)

        def give_back(used: Usage | None = None) -> None:
            trail.release(time.monotonic())
            self._leave_session(session_id, request_id, draw)

        def lost(error: EngineFailed, ran_s: float) -> bool:
            trail.lost(time.monotonic())
            trail.beside = False
            logger.warning("request %s leaves session %s: %s", request_id, session_id, error.message)
            return True

        trail.beside = True
        began, on_tokens = time.monotonic(), None
        try:
            if draw is not None:
                budget = Budget(arrival, self._info(), trail.most_tokens, trail.sequences)
                try:
                    await draw.take(budget.tokens)
                except Overloaded:
                    return False
                trail.hold(budget, time.monotonic())
                on_tokens = functools.partial(budget.produced, draw)
            place = Place(Granted(session.pool, time.monotonic() - began, Why.SESSION), give_back, on_tokens)
            return await self._attempt(place, lambda number: ahead(make(number)), relay, lost, trail)
        finally:
            give_back()

    async def aside(
        self, make: Make, relay: Relay, max_wait_s: float, any_replica: Callable[[], Awaitable[str]], trail: Trail
    ) -> None:
        """On whichever replica `any_replica` names, at once; lost, on the next one. Raises as `in_line`."""
        losses = Losses(time.monotonic() + max_wait_s)

        def lost(error: EngineFailed, ran_s: float) -> bool:
            return not losses.final(error, time.monotonic(), ran_s)

        while True:
            place = Place(Granted(await any_replica(), 0.0), lambda used: self._replicas.forget_gone())
            if await self._attempt(place, make, relay, lost, trail):
                return
            await asyncio.sleep(ASIDE_RETRY_S)

    async def _attempt(
        self, place: Place, make: Make, relay: Relay, lost: Callable[[EngineFailed, float], bool], trail: Trail
    ) -> bool:
        """Hand a request in and relay what comes; False: it was lost before its client has seen anything of it.

        Args:
            lost: told of such a loss and of the seconds that it was handed in; whether the request may be tried again.
                If not, the client has to know.

        Raises:
            EngineFailed: the client has to know.
        """
        replica_id = trail.replica_id = place.granted.replica_id
        trail.route = place.granted.route
        stream: Stream | None = None
        handed_in, sent = time.monotonic(), self._replicas.sent(replica_id)

        def ended() -> None:
            place.give_back(None if stream is None else stream.usage)

        try:
            async with self._replicas.channel(replica_id).run(make, ended, place.on_tokens) as stream:
                frames = await stream.next()
                sent.began(frames[0].status)
                await relay(stream, frames, place.granted)
            return True
        except ServeAppError as error:
            sent.broke(error, lost=stream is not None and stream.lost)
            seen = stream is not None and stream.seen
            if seen or not isinstance(error, EngineFailed) or not lost(error, time.monotonic() - handed_in):
                raise
            return False
        finally:
            sent.over()

    def _aim(self, arrival: Arrival, key: Key | None, avoid: str | None) -> Aim | None:
        """Where it should run: on its open session's replica, at its key's home, anywhere but where it was lost."""
        given = arrival.affinity
        if given is not None and avoid is None and self._replicas.usable(given):
            return Aim(given, Why.SESSION)
        return self._replicas.aim(key, arrival.slots, avoid)

    def _placed(self, granted: Granted, key: Key | None, aim: Aim | None) -> Granted:
        """The place, with the reason for it."""
        if aim is not None and aim.replica_id == granted.replica_id:
            granted = dataclasses.replace(granted, why=aim.why, route=aim.route)
        self.placed[key.why if key is not None else "none", granted.route or granted.why] += 1
        return granted

    @contextlib.contextmanager
    def _pausing(self) -> Iterator[None]:
        self.pausing += 1
        try:
            yield
        finally:
            self.pausing -= 1

    def _made(self, request_id: str, budget: Budget, tokens: int) -> None:
        """The engine has made so many tokens more for a request that came through the line."""
        budget.produced(self._line, tokens)
        self._line.progress(request_id, tokens)

    def _leave_session(self, session_id: str, request_id: str, draw: Draw | None) -> None:
        """Give place and tokens back; again changes nothing."""
        self._sessions.leave(session_id, request_id)
        if draw is not None:
            draw.release()
        self._replicas.forget_gone()
