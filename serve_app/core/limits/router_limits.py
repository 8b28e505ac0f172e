"""The limits in a router: charges requests on its credit, asks the quota actor for the others, and settles their use.

Rules
- A request whose scopes all have credit here is charged without a message. Before any other asks the actor, the router
  gives back what it has of those scopes, debts included: the actor decides by all that there is.
- At its end a request's estimate is settled by its use, or refunded. A refund goes back to the actor, which alone knows
  whether the bucket is full by now: at once if the scope is near its limit or the sum is large, else at the next
  heartbeat. A debt is paid by the credit here, or told at once.
- What was spent on credit is reported at heartbeats, in sums; so each router learns what the others have left.
- While the actor is away, requests without credit wait for it. Credit of a concurrency is not used once the actor may
  have given it to others (`is_fenced`); of a bucket it is, since the actor counts a lost router's credit as used.

Invariant: a request is pending, charged, or neither; each charge ends once, settled or refunded. A scope that is idle
is forgotten, with nothing held.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import add, sub

from serve_app.core.limits.decisions import Charged, LimitDecision, Refusal
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
    LimitState,
    ScopeAccount,
    ToldReservation,
)
from serve_app.core.limits.policy import (
    NOTHING,
    Bucket,
    Kind,
    LimitedRequest,
    LimitReason,
    Limits,
    Period,
    Scopes,
    Standing,
    ended_allowances,
    in_words,
    need_of,
)
from serve_app.core.limits.reservations import GRACE_S
from serve_app.core.limits.router_scope import RouterScope
from serve_app.core.times import LIMIT_WAIT_S

MEAN_GAIN = 0.2  # of the newest request's time in the mean
IDLE_S = 10.0  # then the credit of a scope goes back; a minute later it is forgotten
FORGET_S = 70.0  # above the time in which a bucket fills by default: its state is of use until then
MAX_REPORTS = 128  # scopes reported in one heartbeat, in turn
REFUND_SHARE = 0.0025  # of a pool, not told yet: with three routers, windows are exact to less than 1%


@dataclass(slots=True)
class _Pending:
    request: LimitedRequest
    arrived_s: float
    ticket: str = ""
    is_cancelled: bool = False
    is_repeat: bool = False  # it was handed in to an earlier session


@dataclass(slots=True)
class _Running:
    request: LimitedRequest
    began_s: float
    period: Period  # in which it was charged


class RouterLimits:
    """See the module. O(scopes of a request) per event.

    Args:
        router: its name.
        put: sends an event to the actor.
    """

    def __init__(self, router: str, put: Callable[[LimitEvent], object]) -> None:
        self._router = router
        self._put = put
        self.scopes: dict[str, RouterScope] = {}  # used last at the end
        self.pending: dict[str, _Pending] = {}
        self.running: dict[str, _Running] = {}
        self.tickets: dict[str, _Pending] = {}
        self._numbers = itertools.count()
        self._period: Period = (0, 0)  # of the allowances, by the actor's last message
        self._unasked: dict[str, _Pending] = {}  # pending ones without a ticket, in order
        self._away_since: float | None = None
        self.decided: list[LimitDecision] = []  # since the shell has taken them
        self._promised: dict[tuple[tuple[str, ...], bytes, float], tuple[LimitedRequest, float]] = {}  # with the moment

    # Requests

    def on_arrive(self, request: LimitedRequest, now: float, *, is_fenced: bool, may_ask: bool) -> LimitDecision | None:
        """Charge a request; None: it waits for the actor. Raises ValueError if one of this id is known.

        Args:
            is_fenced: credit of concurrency may be others' by now.
            may_ask: the actor is there, and takes more events.
        """
        if request.request_id in self.pending or request.request_id in self.running:
            raise ValueError(f"{request.request_id!r} is charged already")
        scopes = [self._scope(name, limits, now) for name, limits in request.scopes]
        need = request.need
        fenced = is_fenced and any(Kind.CONCURRENT in scope.capacities for scope in scopes)
        if not fenced and all(scope.has(need) for scope in scopes):
            for scope in scopes:
                for kind in scope.capacities:
                    scope.account[kind] -= need[kind]
                    if kind is not Kind.CONCURRENT:
                        scope.spent[kind] += need[kind]
            return self._begin(request, now, 0.0)
        waiting = self.pending[request.request_id] = self._unasked[request.request_id] = _Pending(request, now)
        if may_ask:
            self._ask(waiting)
        return None

    def on_cancel(self, request_id: str) -> None:
        """The client of a pending request is gone."""
        waiting = self.pending.pop(request_id, None)
        self._unasked.pop(request_id, None)
        if waiting is not None and waiting.ticket:
            waiting.is_cancelled = True
            self._put(LimitCancel(waiting.ticket))

    def on_end(self, request_id: str, tokens: int | None, cost_micro: int, now: float) -> None:
        """A charged request has ended; `tokens`: that it used, None: all of it is refunded. An unknown id changes
        nothing."""
        run = self.running.pop(request_id, None)
        if run is None:
            return
        need = run.request.need
        used = NOTHING if tokens is None else need_of(tokens, cost_micro)
        late = ended_allowances(run.period, self._period)  # what it used belongs to the day that it was charged to
        for name, limits in run.request.scopes:
            scope = self.scopes[name]  # of one that is in use nothing is forgotten
            charged = scope.charged(limits, need, used)
            scope.used_at = now
            scope.in_use -= 1
            scope.mean_s += MEAN_GAIN * (now - run.began_s - scope.mean_s)
            for kind in scope.capacities:
                if kind is Kind.CONCURRENT:
                    scope.account[kind] += 1.0
                    continue
                refund = 0.0 if kind in late else charged[kind] - used[kind]
                paid = min(scope.account[kind], max(0.0, -refund))
                scope.account[kind] -= paid
                scope.spent[kind] += paid
                scope.refund[kind] += refund + paid
            self._return_surplus(name, scope)

    def lose(self, request_id: str, now: float) -> None:
        """The actor's answer to a pending request could not be taken: unless it is decided, it is not charged."""
        if any(one.request_id == request_id for one in self.decided):
            return
        waiting = self.pending.get(request_id)
        self.on_cancel(request_id)
        self.on_end(request_id, None, 0, now)
        if waiting is not None:
            self.tickets.pop(waiting.ticket, None)
        self.decided.append(Refusal(request_id, LimitReason.RATE_LIMIT, "", 1.0))

    # The actor

    def on_action(self, action: LimitAction, now: float) -> None:
        """Take an action; decisions are added to `decided`."""
        match action:
            case LimitState(name, version, level, left, is_near, slots_kept, period):  # with each of the next two
                self._set_period(period)
                scope = self.scopes.get(name)
                if scope is not None and scope.version < version:
                    scope.version = version
                    scope.level = level
                    scope.left = left
                    scope.is_near = is_near
                    scope.slots_kept = slots_kept
                    scope.last_seen = now
                    self._return_surplus(name, scope)
            case LimitRefuse():
                self._on_refuse(action, now)
            case LimitGrant(ticket, more, slots, period):
                self._set_period(period)
                self._on_grant(ticket, more, slots, now)
            case LimitRecall(name):
                scope = self.scopes.get(name)
                if scope is None:
                    self._put(LimitReport(name, NOTHING, NOTHING, True))
                else:
                    scope.is_near = True
                    self._report(name, scope, scope.account, is_answer=True)

    def ask_pending(self, room: int) -> None:
        """Hand in so many requests that were not yet."""
        for unasked in list(itertools.islice(self._unasked.values(), max(0, room))):
            self._ask(unasked)

    def begin_incarnation(self, now: float) -> LimitAccounts:
        """Begin another session with the actor: pending requests lose their tickets."""
        self.tickets.clear()
        self._unasked = dict(self.pending)
        for waiting in self.pending.values():
            waiting.is_repeat, waiting.ticket = waiting.is_repeat or bool(waiting.ticket), ""
        accounts = tuple(
            ScopeAccount(name, scope.limits, scope.held(), scope.version, scope.level, max(0.0, now - scope.last_seen))
            for name, scope in self.scopes.items()
        )
        for scope in self.scopes.values():
            scope.spent = list(NOTHING)  # the account tells it
        reservations = tuple(
            ToldReservation(request.scopes, request.need, request.fingerprint, due - now)
            for request, due in self._promised.values()
        )
        return LimitAccounts(accounts, reservations)

    def on_heartbeat(self, now: float) -> None:
        """Report what was spent, give back what is not used, and forget scopes that are idle."""
        for key in [one for one, (_, due) in self._promised.items() if now >= due + GRACE_S]:
            del self._promised[key]
        for name, scope in list(itertools.islice(self.scopes.items(), MAX_REPORTS)):
            is_idle = not scope.in_use and now >= scope.used_at + IDLE_S
            back = scope.account if is_idle else NOTHING
            if any(scope.spent) or any(scope.refund) or any(back):
                self._report(name, scope, back)
            if is_idle and now >= scope.used_at + FORGET_S and not self._is_waited_for(name):
                del self.scopes[name]
            else:
                self.scopes[name] = self.scopes.pop(name)  # the next heartbeat begins with others

    def on_tick(self, now: float, *, is_away: bool) -> None:
        """Refuse what has waited too long for an actor that is away."""
        if not is_away:
            self._away_since = None
            return
        if self._away_since is None:
            self._away_since = now
        late = [one for one in self.pending.values() if now >= max(one.arrived_s, self._away_since) + LIMIT_WAIT_S]
        for waiting in late:
            self.on_cancel(waiting.request.request_id)
            self.decided.append(Refusal(waiting.request.request_id, LimitReason.RATE_LIMIT, "", 1.0))

    def standing(self, scopes: Scopes, now: float) -> Standing:
        """The limits a minute of these scopes, over all routers, as far as this one has heard."""
        found: dict[Kind, Bucket] = {}
        for name, _ in scopes:
            scope = self.scopes.get(name)
            for kind in (Kind.REQUESTS, Kind.TOKENS):
                if scope is None or kind not in scope.capacities or scope.left is None:
                    continue
                capacity = scope.capacities[kind]
                rate = scope.limits.rate(kind)
                left = min(capacity, scope.left[kind] + rate * (now - scope.last_seen)) - scope.spent[kind]
                bucket = Bucket(int(capacity), max(0, int(left + 1e-6)), max(0.0, capacity - left) / rate)
                if kind not in found or bucket.remaining < found[kind].remaining:
                    found[kind] = bucket
        return Standing(found.get(Kind.REQUESTS), found.get(Kind.TOKENS))

    # Inside

    def _scope(self, name: str, limits: Limits, now: float) -> RouterScope:
        scope = self.scopes.get(name)
        if scope is None:
            scope = self.scopes[name] = RouterScope(limits, limits.capacities())
        elif scope.limits is not limits and scope.limits != limits:  # its credit is of the old ones
            self._report(name, scope, scope.account)
            scope.change(limits)
        scope.used_at = now
        return scope

    def _set_period(self, period: Period) -> None:
        """Quotas begin anew with it: what was settled of the earlier ones, and not told yet, is over."""
        if period == self._period:
            return
        for kind in ended_allowances(self._period, period):
            for scope in self.scopes.values():
                scope.refund[kind] = 0.0
        self._period = period

    def _begin(self, request: LimitedRequest, now: float, waited_s: float) -> Charged:
        self.running[request.request_id] = _Running(request, now, self._period)
        for name, _ in request.scopes:
            self.scopes[name].in_use += 1
        return Charged(request.request_id, waited_s)

    def _ask(self, waiting: _Pending) -> None:
        request = waiting.request
        self._unasked.pop(request.request_id, None)
        mean_s = 0.0
        for name, _ in request.scopes:
            scope = self.scopes[name]
            mean_s = max(mean_s, scope.mean_s)
            if any(scope.account) or any(scope.spent) or any(scope.refund):
                self._report(name, scope, scope.account, is_silent=True)
        waiting.ticket = f"{self._router}:limit:{next(self._numbers)}"  # the queue's have no second colon
        self.tickets[waiting.ticket] = waiting
        is_repeat = True if waiting.is_repeat else request.is_repeat
        self._put(
            LimitRequest(
                waiting.ticket, request.scopes, request.need, request.fingerprint, request.may_wait, is_repeat, mean_s
            )
        )

    def _on_grant(self, ticket: str, more: int, slots: int, now: float) -> None:
        waiting = self.tickets.pop(ticket, None)
        if waiting is None:
            return  # of an earlier session
        request = waiting.request
        for name, limits in request.scopes:
            scope = self._scope(name, limits, now)
            for kind in scope.capacities:
                given = float(slots) if kind is Kind.CONCURRENT else more * request.need[kind]
                scope.account[kind] += given
        decision = self._begin(request, now, now - waiting.arrived_s)
        if waiting.is_cancelled:
            self.on_end(request.request_id, None, 0, now)
        else:
            del self.pending[request.request_id]
            self.decided.append(decision)

    def _on_refuse(self, refused: LimitRefuse, now: float) -> None:
        waiting = self.tickets.pop(refused.ticket, None)
        if waiting is None:
            return
        request = waiting.request
        if refused.is_reserved and refused.retry_after_s is not None:
            due = now + refused.retry_after_s
            self._promised[tuple(name for name, _ in request.scopes), request.fingerprint, due] = request, due
        if waiting.is_cancelled:
            return
        del self.pending[request.request_id]
        limits = dict(request.scopes).get(refused.scope)
        words = in_words(limits, refused.kind, refused.scope) if refused.scope else ""
        self.decided.append(Refusal(request.request_id, refused.reason, words, refused.retry_after_s))

    def _return_surplus(self, name: str, scope: RouterScope) -> None:
        """Give back what the router may not keep."""
        if scope.is_near:
            if any(scope.account) or any(scope.refund):
                self._report(name, scope, scope.account, is_silent=True)
            return
        back = max(0.0, scope.account[Kind.CONCURRENT] - scope.slots_kept)
        for kind, capacity in scope.capacities.items():
            if back or not 0.0 <= scope.refund[kind] <= REFUND_SHARE * capacity:
                slots = (back if one is Kind.CONCURRENT else 0.0 for one in Kind)
                self._report(name, scope, slots, is_silent=True)
                return

    def _report(
        self, name: str, scope: RouterScope, back: Iterable[float], *, is_answer: bool = False, is_silent: bool = False
    ) -> None:
        """Report what was spent, and give back so much of the account. `is_silent`: no state is asked for."""
        given = tuple(max(0.0, one) if kind is Kind.CONCURRENT else one for kind, one in zip(Kind, back, strict=True))
        scope.account = list(map(sub, scope.account, given))
        spent = tuple(map(sub, scope.spent, scope.refund))
        returned = tuple(map(add, given, scope.refund))
        wants_state = not (is_silent or is_answer)
        refund = tuple(scope.refund)
        self._put(LimitReport(name, spent, returned, is_answer, wants_state, refund, self._period))
        scope.spent = list(NOTHING)
        scope.refund = list(NOTHING)

    def _is_waited_for(self, name: str) -> bool:
        return any(name == one for waiting in self.pending.values() for one, _ in waiting.request.scopes)
