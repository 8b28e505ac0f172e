"""The limits at the quota actor: one count of each scope for all routers.

Rules
- While a scope has plenty left, a router gets credit with each charge, and charges the next requests without asking. A
  request that the rest cannot cover makes the scope near its limit: all routers give their credit back, and each
  request is decided here, until plenty is left again.
- What cannot be charged now is reserved: charged at once, for the moment when it will be covered. The client is told
  that moment, or its request waits for it (`may_wait`). A client that comes back is recognised by the bytes of its
  request; from its moment on it is not refused again: it waits here for what may still be missing. What is more than a
  minute away is not reserved: its client is told a minute, and waits here when it comes back.
- A reservation whose client does not come within `GRACE_S` is given up. What is given up or refunded is spare: it
  serves those who are here, in order, then whoever comes.
- Concurrency is not reserved: a slot that is free goes to the first who is here. The moment told for it is an estimate.
- A router that is gone has used its credit; its concurrency comes back.
- After a restart nothing is decided until all routers have reported what they hold and the newest state they remember.
  If one is lost, a scope that no other router remembers has only what has refilled since.

Invariant: see `core.limits.pools`; and each `LimitRequest` is answered exactly once, unless its router's session ends.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from functools import partial

from serve_app.core.limits.lending import charge, first_moment
from serve_app.core.limits.messages import (
    LimitAccounts,
    LimitAction,
    LimitCancel,
    LimitEvent,
    LimitGrant,
    LimitRecall,
    LimitRefuse,
    LimitReport,
    LimitRequest,
    ScopeAccount,
    lost,
)
from serve_app.core.limits.policy import (
    ALLOWANCES,
    NO_KINDS,
    NOTHING,
    REASONS,
    Amounts,
    Kind,
    LimitReason,
    Limits,
    Period,
    ended_allowances,
)
from serve_app.core.limits.pools import new_pools
from serve_app.core.limits.recovery import Recovery
from serve_app.core.limits.reservations import EARLY_S, RESERVED_S, Entry, LimitReservations, Run, at_once, key_of
from serve_app.core.limits.scopes import Calendar, Key, Scope, version_counter
from serve_app.core.limits.undecided import Answer, Undecided, UndecidedRequests
from serve_app.core.times import LIMIT_WAIT_S

RECALL_S = 0.25  # for routers to give credit back: many round trips; one that is frozen delays nobody longer
MAX_ENTRIES = 1000  # reservations and waiting requests of a scope
MAX_LOOKED_AT = 1000  # scopes at a time, whether they can be dropped: a few milliseconds
MAX_ALIKE = 64  # reservations for the same bytes: more are a loop that does not wait
MAX_WAIT_S = 600.0  # of a request that waits aside; OpenAI's SDK waits no longer for an answer
UNKNOWN_RETRY_S = 1.0  # told then: the store is asked again every few seconds, and what it tells is known at once

Send = Callable[[str, LimitAction], None]


class ActorLimits:
    """See the module. O(pools of a request + log n) per event, O(waiting) where something comes back.

    Args:
        epoch: of the actor.
        send: sends an action to a router.
        routers: how many routers there are.
        is_recovering: routers of an earlier actor may still report.
        asks_store: `take_unknown` is read, and answered by `on_used`.
        run: runs a decision, and its end after an error.
    """

    def __init__(
        self,
        epoch: int,
        send: Send,
        routers: Callable[[], int],
        now: float,
        *,
        is_recovering: bool = False,
        run: Run = at_once,
    ) -> None:
        self._send = send
        self._routers = routers
        self._run = run
        self.scopes: dict[str, Scope] = {}
        self.calendar = Calendar()
        self.is_recovering = is_recovering
        self.asks_store = False
        self._empty_since: float | None = now if is_recovering else None  # new scopes have what has refilled since
        self._recovery = Recovery()
        self._versions = version_counter(epoch)
        self.reservations = LimitReservations(self._on_granted, self._lose, run)
        self._undecided = UndecidedRequests()
        self._unknown: list[str] = []

    # Events

    def on_event(self, router: str, event: LimitEvent, now: float) -> None:
        if isinstance(event, LimitReport):
            event = event.in_period(self.calendar.period)
        match event:
            case LimitRequest() if self.is_recovering:
                self._undecided.add(Undecided(router, event))
            case LimitRequest():
                self._decide(router, event, now, is_last=False)
            case LimitReport() if self.is_recovering:
                self._recovery.report(router, event)
            case LimitReport(name, spent, returned, is_answer, wants_state):
                scope = self.scopes.get(name)
                if scope is not None:
                    scope.refill(now)
                    scope.report(router, spent, returned)
                    if is_answer:
                        scope.recalled.discard(router)
                    self.reservations.touched[name] = scope
                    if scope.is_near and any(one > 0.0 for one in scope.credit_of(router)):
                        self._send(router, LimitRecall(name))  # what was refunded to it since
                    elif wants_state:
                        self._tell(router, scope)
                if is_answer:
                    self._undecided.on_answer((name, router))
            case LimitCancel(ticket):
                self._on_cancel(ticket, now)
            case LimitAccounts() if self.is_recovering:
                self._recovery.add(router, event, now)
            case LimitAccounts(accounts):
                self._on_accounts(router, accounts, now)

    def after_event(self, now: float) -> None:
        """Decide what can be decided after the events of a message or a tick."""
        if self.is_recovering:
            return
        self.reservations.serve(now)
        for undecided in self._undecided.take_ready(now):
            act = partial(self._decide, undecided.router, undecided.request, now, is_last=undecided.until < math.inf)
            end = partial(self._lose, undecided.router, undecided.request.ticket)
            self._run(f"a request of router {undecided.router}", undecided.request, act, end)
        self.reservations.serve(now)

    def on_tick(self, now: float) -> None:
        """Serve reservations whose moment has come, and give up those whose clients stay away."""
        self.reservations.on_tick(now)
        self.after_event(now)

    def next_due(self) -> float | None:
        """When `on_tick` has something to do; None: nothing is due."""
        first = self._undecided.next_due()
        second = self.reservations.next_due()
        return second if first is None else first if second is None else min(first, second)

    def set_clock(self, wall_s: float, now: float) -> None:
        """Tell the time of day; allowances begin anew with the day and the month. Drops some scopes that are as new."""
        renewed = self.calendar.set_clock(wall_s, now)
        for name, scope in self.scopes.items() if renewed else ():
            for kind in renewed & scope.pools.keys():
                scope.pools[kind].renew()
                self.reservations.touched[name] = scope
        for name in list(itertools.islice(self.scopes, MAX_LOOKED_AT)):
            scope = self.scopes.pop(name)
            scope.refill(now)
            if scope.is_idle and scope.is_known:
                self.reservations.touched.pop(name, None)
            else:
                self.scopes[name] = scope  # the next look begins with others

    def end_router_session(self, router: str, now: float) -> None:
        """A router's session has ended: its waiting requests will be handed in again, and keep their places."""
        self._undecided.end_router_session(router)
        self.reservations.end_router_session(router, now)
        for scope in self.scopes.values():
            scope.recalled.discard(router)

    def remove_router(self, router: str, now: float) -> None:
        """A router is gone for good."""
        self.end_router_session(router, now)
        for name, scope in self.scopes.items():
            scope.refill(now)
            for kind, pool in scope.pools.items():
                if router in pool.credit:
                    pool.drop_router(router, returns=kind is Kind.CONCURRENT)
                    self.reservations.touched[name] = scope
        self._recovery.remove(router)

    def on_recovered(self, now: float, *, is_complete: bool) -> None:
        """All routers that live have reported. `is_complete`: none of those that the last actor knew is lost."""
        self.is_recovering = False
        self._undecided.set_all_ready()
        if is_complete:
            self._empty_since = None
        recovery, self._recovery = self._recovery, Recovery()
        for scope, unheard in recovery.scopes(self.calendar, now, self._empty_since):
            self.scopes[scope.name] = self.reservations.touched[scope.name] = scope
            self._ask_store(scope, unheard)
        for client in recovery.reservations:
            scopes = [self._scope(name, limits, now) for name, limits in client.scopes]
            entry = Entry(scopes, client.need, key_of(client.scopes, client.fingerprint), now + client.due_in_s)
            self.reservations.add(entry, now)
            self.reservations.send_away(entry)
        self.after_event(now)

    # What was used of allowances, by the store

    def take_unknown(self) -> list[str]:
        """Scopes with allowances of which nothing is known yet, since the last call."""
        found, self._unknown = self._unknown, []
        return found

    def ask_again(self) -> None:
        """Nobody asks any more for the scopes that were taken: another store is asked for all that are unknown."""
        self._unknown = [name for name, scope in self.scopes.items() if not scope.is_known]

    def on_used(self, name: str, used: Amounts, period: Period, now: float) -> None:
        """What the store has of a scope's allowances, since this day and this month began. Of an allowance that has
        begun anew since then nothing was used before: all of it is counted here."""
        scope = self.scopes.get(name)
        if scope is None or scope.is_known:
            return
        for kind in scope.unknown - ended_allowances(period, self.calendar.period):
            scope.pools[kind].put(-used[kind])
        scope.unknown = NO_KINDS
        self._undecided.on_answer((name, ""))
        self.after_event(now)

    # Inside

    def _scope(self, name: str, limits: Limits, now: float) -> Scope:
        scope = self.scopes.get(name)
        if scope is None:
            pools = new_pools(limits, now, self._empty_since)
            scope = self.scopes[name] = Scope(name, limits, pools)
            self._ask_store(scope, frozenset(pools.keys() & set(ALLOWANCES)))
            return scope
        if scope.limits is not limits and scope.limits != limits:
            self._ask_store(scope, scope.change(limits, now))
            self.reservations.touched[name] = scope
        scope.refill(now)
        return scope

    def _ask_store(self, scope: Scope, allowances: frozenset[Kind]) -> None:
        """These allowances are new here: what was used of them is unknown."""
        if self.asks_store and allowances:
            scope.unknown |= allowances
            self._unknown.append(scope.name)

    def _decide(self, router: str, request: LimitRequest, now: float, *, is_last: bool) -> None:
        """Grant, reserve or refuse a request; or wait for answers first, unless it is the last time."""
        scopes = [self._scope(name, limits, now) for name, limits in request.scopes]
        self.reservations.serve(now)  # who waits here comes before who comes now
        need = request.need
        key = key_of(request.scopes, request.fingerprint)
        answers = set[Answer]()
        for scope in scopes:
            for kind, pool in scope.pools.items():
                if need[kind] > pool.capacity:
                    self._refuse(router, request, scope, kind, None)
                    return
            if not scope.is_known:
                answers.add((scope.name, ""))
        if request.is_repeat is not False:
            if self._claim(router, request, key, scopes, now):
                return
            if self.reservations.comes_back(scopes, key, now):
                request = request._replace(may_wait=True)  # it is not refused again
        if is_last and answers:
            self._send(
                router, LimitRefuse(request.ticket, LimitReason.ALLOWANCE, ALLOWANCES[0], "", UNKNOWN_RETRY_S, False)
            )
            return
        short = [(scope, kind) for scope in scopes for kind, pool in scope.pools.items() if not pool.has(need[kind])]
        wait_s = LIMIT_WAIT_S if answers else RECALL_S
        if short and not is_last:
            for scope in {scope.name: scope for scope, _ in short}.values():
                if scope.recalled or not scope.is_near:
                    answers |= self._recall(scope, router, (kind for one, kind in short if one is scope))
        if answers and not is_last:
            self._undecided.add(Undecided(router, request, now + wait_s, answers, tuple(scopes)))
            return
        if not short:
            self._grant(router, request, scopes, now)
            return
        allowance = next(((scope, kind) for scope, kind in short if kind in ALLOWANCES), None)
        if allowance is not None:
            self._refuse(router, request, *allowance, self.calendar.reset_s(allowance[1], now))
        else:
            self._reserve(router, request, key, scopes, now)

    def _recall(self, scope: Scope, router: str, kinds: Iterable[Kind]) -> set[tuple[str, str]]:
        """Have the other routers give back their credit of a scope; returns the answers to wait for."""
        if not scope.is_near and scope.holders(kinds, router):
            scope.is_near = True
            scope.recalled = scope.holders(scope.pools, "")
            for holder in scope.recalled:
                self._send(holder, LimitRecall(scope.name))
        return {(scope.name, holder) for holder in scope.recalled}

    def _grant(self, router: str, request: LimitRequest, scopes: list[Scope], now: float) -> None:
        """Charge a request that is here now, and give the router credit where plenty is left."""
        more, slots = charge(scopes, router, request.need, max(1, self._routers()))
        self._send(router, LimitGrant(request.ticket, more, slots, self.calendar.period))
        for scope in scopes:
            self._tell(router, scope)

    def _reserve(self, router: str, request: LimitRequest, key: Key, scopes: list[Scope], now: float) -> None:
        """Reserve the first moment at which a request is covered; it waits for it here, or its client is told."""
        wait_s, last_scope, last_kind = first_moment(scopes, request.need, request.mean_s)
        is_far = wait_s > RESERVED_S and not request.may_wait
        if is_far or any(len(scope.entries) >= MAX_ENTRIES for scope in scopes):
            wait_s = min(wait_s, RESERVED_S)
            self.reservations.tell_estimate(scopes, key, now + wait_s, now)
            self._refuse(router, request, last_scope, last_kind, wait_s)
            return
        entry = Entry(scopes, request.need, key, now + wait_s)
        self.reservations.add(entry, now)
        for scope in scopes:
            scope.is_near = True  # its router, too, must give back at once what this one waits for
        if request.may_wait and wait_s <= MAX_WAIT_S:
            self.reservations.wait(entry, router, request.ticket, request.need, now)
            for scope in scopes:
                self._tell(router, scope)
            return
        self.reservations.send_away(entry)
        self._refuse(router, request, last_scope, last_kind, wait_s, is_reserved=True)

    def _claim(self, router: str, request: LimitRequest, key: Key, scopes: list[Scope], now: float) -> bool:
        """Let a client that comes back have its reservation; False: it has none."""
        alike = self.reservations.away.get(key)
        if not alike:
            return False
        entry = alike[0]
        if entry.due > now + EARLY_S:
            if request.is_repeat is None and len(alike) < MAX_ALIKE:
                return False  # it may be another client
            if not request.may_wait:
                self._refuse(router, request, scopes[0], next(iter(scopes[0].pools)), entry.due - now, is_reserved=True)
                return True
        self.reservations.wait(entry, router, request.ticket, request.need, now)
        return True

    def _on_granted(self, entry: Entry) -> None:
        """A request that waited here may run."""
        self._send(entry.router, LimitGrant(entry.ticket, 0, 0, self.calendar.period))
        for scope in entry.scopes:
            self._tell(entry.router, scope)

    def _lose(self, router: str, ticket: str) -> None:
        self._send(router, lost(ticket))

    def _on_cancel(self, ticket: str, now: float) -> None:
        """A client is gone: what its request was charged comes back. One that was answered already changes nothing: its
        router returns the charge."""
        undecided = self._undecided.take(ticket)
        entry = self.reservations.tickets.get(ticket)
        if undecided is not None:
            router = undecided.router
        elif entry is not None:
            router = entry.router
            self.reservations.cancel(entry, now)
        else:
            return
        self._send(router, LimitRefuse(ticket, LimitReason.RATE_LIMIT, Kind.REQUESTS, "", None, False))

    def _on_accounts(self, router: str, accounts: tuple[ScopeAccount, ...], now: float) -> None:
        """A router begins another session: book what it holds by its own report; the rest of what it had is used."""
        named = {one.scope: one for one in accounts}
        for name, scope in self.scopes.items():
            if name in named or any(router in pool.credit for pool in scope.pools.values()):
                scope.refill(now)
                scope.book(router, named[name].account if name in named else NOTHING)
                self.reservations.touched[name] = scope
        for reported in accounts:
            if reported.scope not in self.scopes and any(reported.account):
                scope = self._scope(reported.scope, reported.limits, now)
                for kind, pool in scope.pools.items():
                    if kind is not Kind.CONCURRENT:
                        pool.level -= reported.account[kind]
                scope.book(router, reported.account)

    def _refuse(
        self,
        router: str,
        request: LimitRequest,
        scope: Scope,
        kind: Kind,
        retry_after_s: float | None,
        *,
        is_reserved: bool = False,
    ) -> None:
        action = LimitRefuse(request.ticket, REASONS[kind], kind, scope.name, retry_after_s, is_reserved)
        self._send(router, action)
        for name, _ in request.scopes:
            self._tell(router, self.scopes[name])

    def _tell(self, router: str, scope: Scope) -> None:
        scope.version = next(self._versions)
        self._send(router, scope.state(scope.version, self._routers(), self.calendar.period))
