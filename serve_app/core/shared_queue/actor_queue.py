"""The quota actor's waiting lines: one order for each model, however many routers there are.

Rules
- While somebody waits for a model it is contended: no credit is given, every router gives back what it does not use,
  and every arrival is in this line (`core.shared_queue.granting`). It stays so for `CALM_S` after the last one was
  served, and always where some may not wait (`max_queued: 0`): one router's credit would have another refuse with idle
  slots.
- After a crash of the actor an engine is closed until every router that may hold something there has spoken. A model
  whose engines are all closed recovers: its routers grant from their credit, and who waits comes in together after
  that, the oldest first.
- While a request that runs is owed tokens no router keeps credit on its engine, either (`core.shared_queue.kv_debt`).
- All routers hear which sessions are open, in order with all else that they hear, so each knows by itself whether an id
  is one (`core.shared_queue.session_admission` opens them).
- What a router goes by is compared with its account at every beat, where no action about an engine is on its way; a
  difference, or an error in the middle of an event, ends what is known of it here: it begins anew and says all.
- A router that is gone takes its waiting requests with it; its account ends in the ledger. One that hears nothing for
  a second is granted nothing more, long before it counts as gone: places it is given meanwhile are nobody's.

Invariant: once a router has heard that a model is contended, no request of it begins that this line has not granted:
no request passes one of a higher class later than one exchange after that one came.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import replace

from serve_app.core.memory import KEEPER, Ledger, Reserved, Session, SessionAsk, Sessions, slots_of
from serve_app.core.queue import Arrival, Grant, Refuse
from serve_app.core.shared_queue.actor_credit import Accounts
from serve_app.core.shared_queue.actor_sessions import Peers
from serve_app.core.shared_queue.delivery import LANES, Exchange, Queued, Reply
from serve_app.core.shared_queue.granting import Places
from serve_app.core.shared_queue.messages import Action as Said
from serve_app.core.shared_queue.messages import (
    Amount,
    Arrive,
    Ask,
    Booked,
    Cancel,
    Closed,
    Done,
    Enough,
    Event,
    GiveBack,
    Grow,
    Held,
    Hello,
    Left,
    Look,
    Progress,
    Reach,
    Rules,
    SessionEnded,
    SessionOpened,
    Usage,
)
from serve_app.core.shared_queue.session_admission import Openings
from serve_app.types import RequestClass

CALM_S = 0.25  # a line that empties and fills again takes credit away and gives it back no oftener than that
HAND_IN_S = 0.05  # for all routers to hand in again who waits: half a dozen round trips
FIGURES_S = 0.1  # between looks at the lines for the routers' early refusals; at a line that has an arrival, at once


class Lines:
    """See the module. O(log n) per event; O(routers) when a model becomes contended or calm.

    Args:
        epoch: of the actor.
        ledger: with the engines and their slots.
        sessions: those that are open.
        engines_of: the engines of a model that run.
    """

    def __init__(self, epoch: int, ledger: Ledger, sessions: Sessions, engines_of: Callable[[str], list[str]]) -> None:
        self.peers = Peers(epoch)
        self._sessions = sessions
        self.accounts = Accounts(ledger)
        self.places = Places(ledger, sessions, self._say, self.accounts)
        self.openings = Openings(ledger, sessions, self.places, engines_of)
        self._early: dict[str, tuple[str, str, Arrival, float]] = {}  # by ticket: router, model, and since when
        self._closed: frozenset[str] = frozenset()
        self._gather_until: dict[str, float] = {}  # models that have just recovered
        self._calm_at: dict[str, float] = {}  # contended models in which nobody waits any more
        self._figures_at = -math.inf
        self._ledger = ledger
        self._notes: list[str] = []
        self._differ: set[str] = set()  # routers whose accounts are others than they go by

    # Routers

    def on_exchange(self, told: Exchange, now: float) -> Reply:
        """A router's message, which is not stale; the router owns leases in the ledger."""
        peer = self.peers.get(told.router)
        if peer is None or told.incarnation > peer.incarnation:
            with self._or_anew(now):
                self._forget([told.router], now)
            peer = self.peers.begin(told)
        with self._or_anew(now):
            self._hand_in(now)
            events = self.peers.take(peer, told)
            self._events(told.router, events, now)
            if self._differ:
                self._differ.clear()
                self._forget([told.router], now)
                self.peers.leave(told.router)
            self._after(now, {event.model for event in events if isinstance(event, Arrive)})
            booked = None
            if any(isinstance(event, Held) for event in events):
                booked = tuple(Amount(engine, *had) for engine, had in self.accounts.of(told.router))
            return self.peers.reply(peer, booked)

    def on_watch(self, told: Exchange, now: float, *, at_last: bool) -> Reply | None:
        """A router waits for news, in a message that is not stale; None: there is none yet. `at_last`: its wait is
        over."""
        peer = self.peers.get(told.router)
        if peer is None or peer.incarnation != told.incarnation:
            return self.peers.stale_reply(told)
        self.peers.take(peer, told)
        return self.peers.reply(peer) if at_last or self.peers.has_news(peer) else None

    def leave(self, routers: Sequence[str], now: float) -> None:
        """Routers are gone, and the ledger has ended their leases."""
        with self._or_anew(now):
            self._forget(routers, now)
            for router in routers:
                self.peers.leave(router)
                self.places.leave(router, now)
            self._after(now)

    def take_notes(self) -> list[str]:
        """What an operator should know of, since this was last asked."""
        notes, self._notes = self._notes, []
        return notes

    def take_opened(self) -> set[tuple[str, str]]:
        """Routers and engines between which there is an account that was nothing before, be it of a session there."""
        opened, self.accounts.opened = self.accounts.opened, set()
        return {(router, self._sessions.engine_of(pool) or pool) for router, pool in opened}

    def used(self, engine: str) -> tuple[int, int]:
        """Slots of the line's and KV tokens that requests hold, by the last word of each router. O(routers)."""
        slots, tokens = self.accounts.used(engine)
        return slots, tokens + sum(self.accounts.used(lease)[1] for lease in self._sessions.on(engine))

    # What there is

    def drop_engine(self, engine: str, now: float) -> None:
        """See `Places.drop_engine`."""
        with self._or_anew(now):
            self.places.drop_engine(engine, now)
            self._after(now)

    def sync(self, engines: Iterable[str], now: float) -> None:
        """What is free of these engines may have changed."""
        with self._or_anew(now):
            for engine in engines:
                owing = self.places.owing(engine)
                self._forget(sorted(owing), now)
                for router in owing:
                    self.peers.leave(router)  # it says all anew with its next word
                self.places.sync(engine, now)
            self._after(now)

    def open_session(self, ask: SessionAsk, now: float) -> Session | None:
        """See `Openings.ask`."""
        try:
            return self.openings.ask(ask, now)
        finally:
            self._after(now)

    def close_session(self, session_id: str, now: float) -> None:
        """Nobody wants a session, or waits for it, any more. Raises LeaseNotFound."""
        if self.openings.withdraw(session_id, now) is None:
            one = self._sessions.get(session_id)
            self._sessions.close(session_id)
            self.places.sync("" if one is None else one.engine, now)
        self._after(now)

    def session_ended(self, lease: str, engine: str, now: float) -> None:
        """The ledger has ended the lease of a session, of which nothing runs."""
        self._sessions.forget(lease)
        self.places.sync(engine, now)
        self._after(now)

    def close(self, engines: frozenset[str]) -> None:
        """It is not known what routers hold on these engines. Counts from the end of the next event: what a router says
        is booked before what it leaves is granted."""
        self._closed = engines

    def on_tick(self, now: float) -> None:
        """Time has passed."""
        with self._or_anew(now):
            self._hand_in(now)
            for router in self.peers.deaf(now):
                self._forget([router], now)
                self.peers.leave(router)  # if it lives it says all anew with its next word
            self.places.on_tick(now)
            self.openings.on_tick(now)
            self._after(now)

    def next_due(self) -> float | None:
        """The moment for the next `on_tick`; None while nothing can come due. O(models)."""
        lines = self.places.lines.values()
        dues = [due for line in lines if (due := line.admission.next_due()) is not None]
        dues += self._calm_at.values()
        dues += self._gather_until.values()
        return min(dues, default=None)

    # Inside

    @contextlib.contextmanager
    def _or_anew(self, now: float) -> Iterator[None]:
        """An error leaves nothing half-done: accounts are what the ledger has, and every router says all else anew."""
        try:
            yield
        except Exception:
            self.accounts.recount(self.peers.names())
            self.peers.leave_all()
            self._gather_until = dict.fromkeys(self.places.lines, now + HAND_IN_S)
            self.places = Places(self._ledger, self._sessions, self._say, self.accounts)
            self.places.requests.closed = self._closed
            self.openings.begin_anew(self.places)
            self._early.clear()
            self._calm_at.clear()
            self._differ.clear()
            raise

    def _compare(self, router: str, accounts: tuple[Amount, ...], heard: int) -> None:
        """Whether a router goes by what it has, on engines about which it has heard all that was said."""
        peer = self.peers.get(router)
        if peer is None or heard < peer.sending.taken:
            return  # it has heard more meanwhile
        names = ("lease", "engine", "replica_id")
        unheard = {getattr(one, name, "") for one in peer.sending.after(heard) for name in names}
        goes_by = {engine: (slots, tokens) for engine, slots, tokens in accounts}
        has = dict(self.accounts.of(router))
        for engine in (goes_by.keys() | has.keys()) - unheard:
            mine, its = has.get(engine, (0, 0)), goes_by.get(engine, (0, 0))
            if mine != its and slots_of(engine) in self._ledger and router not in self.places.owing(engine):
                self._differ.add(router)
                self._notes.append(f"router {router} goes by {its} of {engine} and has {mine}; it begins anew")

    def _events(self, router: str, events: Sequence[Event], now: float) -> None:
        for event in events:
            self._event(router, event, now)
        for event in events:  # last: credit must not take what a request of the same message needs
            if isinstance(event, Ask):
                self.places.lend(router, event.engine, event[1:], self._calm(event.engine), now)

    def _event(self, router: str, event: Event, now: float) -> None:
        places = self.places
        match event:
            case Arrive(model, arrival, waited_s):
                self._arrive(router, model, arrival, waited_s, now)
            case Done(ticket, prompt_tokens, output_tokens):
                self._early.pop(ticket, None)
                places.requests.done(ticket, prompt_tokens, output_tokens, now)
            case Cancel(ticket):
                self._early.pop(ticket, None)
                places.requests.cancel(ticket, now)
            case GiveBack(engine, slots, tokens):
                self.accounts.give_back(router, engine, slots, tokens)
                places.sync(engine, now)
            case Progress(ticket, output_tokens):
                places.requests.progress(ticket, output_tokens, now)
            case Usage():
                places.requests.used(event)
            case Held(holds, accounts, heard):
                self.accounts.told(router, holds)
                self._compare(router, accounts, heard)
            case Enough():
                places.enough(router, event, now)
            case Look(ticket):
                places.requests.look(router, ticket, now)
            case Grow():
                places.grow(router, event, now)
            case Reach(model, engine, usable):
                places.reach(router, model, engine, usable, now)
            case Left(engine):
                places.left(router, engine, now)
                self.peers.say(router, Closed(engine))
            case Rules(model, policy):
                places.rules(router, model, policy, now)
            case Hello(holds):
                self._hello(router, holds, now)

    def _arrive(self, router: str, model: str, arrival: Arrival, waited_s: float, now: float) -> None:
        if arrival.deadline is not None:
            arrival = replace(arrival, deadline=arrival.deadline + now)
        if model in self.peers.word.recovering or now < self._gather_until.get(model, now):
            self._early[arrival.request_id] = (router, model, arrival, now - waited_s)
        else:
            self.places.requests.arrive(router, model, arrival, now - waited_s, now)

    def _hand_in(self, now: float) -> None:
        """Who waited while the actor was away comes in, the oldest first."""
        for ready in [model for model, until in self._gather_until.items() if until <= now]:
            del self._gather_until[ready]
            mine = [self._early.pop(ticket) for ticket, (_, model, *_) in list(self._early.items()) if model == ready]
            for router, model, arrival, arrived_s in sorted(mine, key=lambda one: one[3]):
                self.places.requests.arrive(router, model, arrival, arrived_s, now)

    def _forget(self, routers: Sequence[str], now: float) -> None:
        for ticket in [one for one, (router, *_) in self._early.items() if router in routers]:
            del self._early[ticket]
        self.places.forget(routers, now)

    def _hello(self, router: str, holds: tuple[Amount, ...], now: float) -> None:
        """A router begins: its account is what it says, as far as that can be had."""
        said = {engine for engine, _, _ in holds}
        for engine, held in self.accounts.of(router):
            if engine not in said:
                self.accounts.give_back(router, engine, *held)
                self.places.sync(engine, now)
        short = []
        for engine, slots, tokens in holds:
            some_slots, some_tokens = self.accounts.book(router, engine, slots, tokens)
            if (some_slots, some_tokens) != (slots, tokens):
                short.append(Amount(engine, slots - some_slots, tokens - some_tokens))
            self.places.sync(engine, now)
        self.places.square(router, now)
        self.peers.say(router, Booked(tuple(short), tuple(map(_opened, self._sessions.open()))))

    def _say(self, router: str, action: Said) -> None:
        """A router is to hear this, or whoever opens sessions is."""
        if router == KEEPER:
            assert isinstance(action, Grant | Refuse)
            self.openings.decided(action)
        else:
            self.peers.say(router, action)

    def _calm(self, engine: str) -> bool:
        """Whether credit may be given on an engine, as far as it is not for its line to say."""
        word = self.peers.word
        names = {engine, self.places.model_of(engine)}
        return not names & word.contended

    def _after(self, now: float, arrived: Set[str] = frozenset()) -> None:
        """What the routers go by, after whatever has happened; `arrived`: models that were asked for."""
        recovering = self.peers.word.recovering
        if self._closed != self.places.requests.closed:
            self.places.close(self._closed, now)
        if self._closed or recovering:
            before, recovering = recovering, self.places.recovering()
            self._gather_until.update(dict.fromkeys(before - recovering, now + HAND_IN_S))
        self._settle(now)
        self.places.reclaim(now)
        lines = self.places.lines
        contended = {name for name in self.peers.word.contended if name in lines}
        for model in self.places.requests.touched | contended:
            if model in lines and lines[model].admission.contended:
                self._calm_at.pop(model, None)
                contended.add(model)
            elif model in contended and now >= self._calm_at.setdefault(model, now + CALM_S):
                contended.discard(model)
        self.places.requests.touched.clear()
        for model in self._calm_at.keys() - contended:
            del self._calm_at[model]
        self.peers.change(frozenset(contended | self.places.growth.engines), recovering)
        if now >= self._figures_at + FIGURES_S:
            self._figures_at, arrived = now, contended
        for model in arrived & contended:
            self.peers.figures(model, self._queued(model))

    def _settle(self, now: float) -> None:
        """What is to be done over, and what has become of sessions."""
        self.places.requests.once_more(now)
        self.places.requests.draw_anew(now)
        for engine in self._sessions.take_ended(self._closed):
            self.places.sync(engine, now)
        self.openings.settle(now)
        for one in self._sessions.take_news():
            news = SessionEnded(one.ask.session_id, one.lease) if one.closed else _opened(one)
            self.peers.say_all(news)

    def _queued(self, model: str) -> tuple[Queued, ...]:
        line = self.places.lines[model].admission
        claimed = dict(line.ahead(min(RequestClass)))
        return tuple(
            Queued(claimed.get(level, 0), line.full(level), line.backlog(level), line.lanes(level, LANES))
            for level in RequestClass
        )


def _opened(one: Reserved) -> SessionOpened:
    return SessionOpened(one.ask.session_id, one.lease, one.ask.model, one.engine)
