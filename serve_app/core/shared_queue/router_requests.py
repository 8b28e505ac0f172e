"""A router's requests: those that wait, submitted to the quota actor or not yet, and those that run.

Rules
- Order while the actor is away: higher classes first, then by original arrival time. A request that was in the actor's
  queue is marked accepted: it keeps its age in another queue, or in the next actor's.
- A running request has a ticket. One granted on credit is announced to the actor (`Began`) with the next message that
  goes anyway. One that outlives the incarnation gets another ticket, and is announced again.
- The end of a request says what it returns (`Done`), so both ends agree on the accounts, whatever the actor knows of
  it: what the actor has granted, and the place of a session. What began on credit stays credit, if the router may have
  credit there. So it is with what has outlived an incarnation.
- One on credit that ends before it was announced is not told at all: its use is reported in sums.

Invariant: a waiting request is in every index or in none.
Invariant: the amount held of an engine, or of a session, is the sum over its requests.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from serve_app.core.keyed_heap import KeyedHeap
from serve_app.core.memory import SessionEntry
from serve_app.core.queue import Action, Arrival, BegunRun, ClassBound, Grant, Preempt, QueuePolicy, QueueStatus
from serve_app.core.shared_queue import messages
from serve_app.core.shared_queue.delivery import RouterSession
from serve_app.core.shared_queue.messages import (
    ActorAction,
    Amount,
    Began,
    KvTokenGrant,
    KvTokenRequest,
    RouterEvent,
)
from serve_app.core.shared_queue.router_credit import CREDIT_REQUEST_PAUSE_S, RouterCredit
from serve_app.types import RequestClass

REFUSAL_GRACE_S = 0.5  # after the end of a wait: the actor's own refusal arrives before that


@dataclass(slots=True)
class PendingRequest:
    """A waiting request. `ticket`: its id at the actor; empty: not submitted. `submitted_in`: the number of the event
    that submitted it. `status`: its queue position in the actor's last answer; None: no answer. `status_requested`: a
    request for it is open."""

    model: str
    arrival: Arrival
    arrived_s: float
    ticket: str = ""
    submitted_in: int = 0
    status: QueueStatus | None = None
    status_requested: bool = False

    @property
    def request_id(self) -> str:
        return self.arrival.request_id

    @property
    def first_arrived_s(self) -> float:
        """When it first arrived: the order among the requests of a class."""
        return self.arrived_s - self.arrival.age_s


class PendingRequests:
    """Waiting requests by id, model, ticket and end of their wait. O(log n) per method, unless stated."""

    def __init__(self) -> None:
        self.by_request_id: dict[str, PendingRequest] = {}
        self.queues: dict[str, dict[RequestClass, KeyedHeap]] = {}  # ids by arrival, of models with waiting requests
        self.counts: Counter[str] = Counter()  # by model, of these
        self._tokens: Counter[tuple[str, RequestClass]] = Counter()  # estimated
        self.unsent: dict[str, PendingRequest] = {}  # in order of arrival
        self.tickets: dict[str, PendingRequest] = {}
        self._deadlines = KeyedHeap()
        self._numbers = itertools.count()

    def count_by_class(self, model: str) -> dict[RequestClass, int]:
        """The number of waiting requests of a model, by requested class."""
        queues = self.queues.get(model, {})
        return {level: len(queues.get(level, ())) for level in RequestClass}

    def add(self, waiting: PendingRequest, longest_wait_s: float) -> None:
        """Add a request that may wait so long."""
        request_id = waiting.request_id
        model = waiting.model
        level = waiting.arrival.request_class
        self.by_request_id[request_id] = self.unsent[request_id] = waiting
        self.counts[model] += 1
        self._tokens[model, level] += waiting.arrival.cost
        queues = self.queues.setdefault(model, {})
        queues.setdefault(level, KeyedHeap()).set(request_id, (waiting.first_arrived_s, next(self._numbers)))
        self.set_wait_end(waiting, waiting.arrived_s + longest_wait_s)

    def set_wait_end(self, waiting: PendingRequest, ends_s: float) -> None:
        """The longest wait of a request ends at this moment, or at its deadline."""
        deadline = waiting.arrival.deadline
        due = ends_s if deadline is None else min(ends_s, deadline)
        self._deadlines.set(waiting.request_id, (due + REFUSAL_GRACE_S, next(self._numbers)))

    def remove(self, request_id: str) -> PendingRequest | None:
        """Remove and return a waiting request; None: unknown id."""
        waiting = self.by_request_id.pop(request_id, None)
        if waiting is None:
            return None
        model = waiting.model
        level = waiting.arrival.request_class
        self.unsent.pop(request_id, None)
        self.tickets.pop(waiting.ticket, None)
        self.queues[model][level].discard(request_id)
        self._deadlines.discard(request_id)
        self.counts[model] -= 1
        self._tokens[model, level] -= waiting.arrival.cost
        if not self.counts[model]:
            del self.counts[model], self.queues[model]
            for level in RequestClass:
                self._tokens.pop((model, level), None)
        return waiting

    def first(self, model: str, may_run: Callable[..., bool] = lambda *_: True) -> PendingRequest | None:
        """The next request to grant of those that may run, None: none. O(n log n) if the very next one may not."""
        tops = (heap.peek() for _, heap in sorted(self.queues.get(model, {}).items(), reverse=True))
        first = next((self.by_request_id[top[1]] for top in tops if top is not None), None)
        if first is None or may_run(model, first.arrival.fingerprint):
            return first
        waiting = [one for one in self.by_request_id.values() if one.model == model]
        waiting.sort(key=lambda one: (-one.arrival.request_class, one.first_arrived_s))
        return next((one for one in waiting if may_run(model, one.arrival.fingerprint)), None)

    def hand_in(self, waiting: PendingRequest, ticket: str, submitted_in: int) -> None:
        """A request was submitted to the actor's queue under this ticket, with the event of this number."""
        waiting.ticket = ticket
        waiting.submitted_in = submitted_in
        self.tickets[ticket] = waiting
        self.unsent.pop(waiting.request_id, None)

    def not_handed_in(self, limit: int, is_excluded: Callable[[str], bool]) -> list[PendingRequest]:
        """At most `limit` requests not yet submitted, without excluded models: higher classes first, then the oldest.
        O(n)."""
        if not limit or not self.unsent:
            return []
        found = (one for one in self.unsent.values() if not is_excluded(one.model))
        return heapq.nsmallest(limit, found, lambda one: (-one.arrival.request_class, one.first_arrived_s))

    def is_full(self, model: str, policy: QueuePolicy, level: RequestClass) -> bool:
        """Whether a class, or all classes together, have reached the bounds of the policy."""
        counts = self.count_by_class(model)
        tokens = {one: self._tokens[model, one] for one in RequestClass}
        bound = policy.classes.get(level, ClassBound())
        limits = (
            (counts[level], bound.max_queued),
            (tokens[level], bound.max_queued_tokens),
            (self.counts[model], policy.max_queued),
            (sum(tokens.values()), policy.max_queued_tokens),
        )
        return any(most is not None and waiting >= most for waiting, most in limits)

    def take_ticket(self, ticket: str) -> PendingRequest | None:
        """The actor has decided on a ticket: remove and return its request; None: unknown ticket."""
        return self.remove(self.tickets[ticket].request_id) if ticket in self.tickets else None

    def forget_tickets(self) -> None:
        """The actor's queue is lost or a new one: no request counts as submitted."""
        self.tickets.clear()
        for request_id, waiting in self.by_request_id.items():
            if waiting.ticket:
                waiting.arrival = replace(waiting.arrival, accepted=True)
            waiting.ticket = ""
            waiting.status = None
            waiting.status_requested = False
            self.unsent[request_id] = waiting

    def first_overdue(self, now: float) -> PendingRequest | None:
        """A request whose wait is over; None: there is none."""
        return None if (top := self._deadlines.peek()) is None or now < top[0][0] else self.by_request_id[top[1]]

    def next_due(self) -> float | None:
        """The time at which the next wait is over; None: none waits."""
        return None if (top := self._deadlines.peek()) is None else top[0][0]


@dataclass(slots=True)
class RunningRequest:
    """A running request. `slots` and `tokens`: held of its engine; `place`: of its session. `ticket`: its id at the
    actor, which `is_known` there or still to be announced."""

    model: str
    engine: str
    arrival: Arrival
    slots: int
    tokens: int
    estimated_tokens: int  # KV tokens at its start
    ticket: str
    begun_s: float
    is_known: bool
    on_credit: bool
    place: Amount | None = None
    output_tokens: int = 0  # output tokens so far
    prompt_tokens: int = 0  # as its engine has counted them; 0: not yet
    owed_tokens: int = 0  # KV tokens requested and not granted yet
    known_in: int = 0  # the number of the event that has made it known; 0: the actor has granted it
    is_paid: bool = False  # an incarnation before has known it
    paid_tokens: int = 0  # output tokens that it had then
    was_due: bool = False

    def announcement(self, now: float) -> Began:
        """The event that tells the actor of it."""
        arrival = replace(self.arrival, request_id=self.ticket, deadline=None)
        running_s = now - self.begun_s
        lease = "" if self.place is None else self.place.engine
        return Began(
            self.model,
            BegunRun(
                arrival,
                self.engine,
                running_s,
                self.prompt_tokens,
                self.output_tokens,
                self.is_paid,
                lease,
                self.was_due,
            ),
        )


class InFlight:
    """Running requests by id. O(1) per method, unless stated."""

    def __init__(self, accounts: RouterCredit, session: RouterSession) -> None:
        self._accounts = accounts
        self._router_session = session
        self.running: dict[str, RunningRequest] = {}
        self.by_ticket: dict[str, RunningRequest] = {}
        self.unannounced: OrderedDict[str, RunningRequest] = OrderedDict()  # by ticket, the first to begin first
        self.counts: Counter[str] = Counter()  # by model
        self.touched_engines: set[str] = set()  # engines whose credit has changed
        # not acknowledged yet by the actor, with their reachability since
        self.dropped_engines: dict[str, tuple[str, bool, bool] | None] = {}
        self.sessions: dict[str, SessionEntry] = {}  # open sessions, by name

    def set_reachability(self, model: str, engine: str, usable: bool, single_request: bool) -> None:
        """See `RouterQueue.set_reachability`."""
        if engine in self.dropped_engines:
            self.dropped_engines[engine] = (model, usable, single_request)
        elif self._accounts.set_reachability(model, engine, usable, single_request=single_request):
            self._router_session.put(messages.EngineReachability(model, engine, usable))
            self.touched_engines.add(engine)

    def drop_engine(self, engine: str) -> None:
        """An engine is gone: forget its requests; one may arrive again under the same id. O(requests)."""
        if engine in self.dropped_engines:
            self.dropped_engines[engine] = None
        if engine not in self._accounts.by_engine:
            return
        for request_id in [one for one, run in self.running.items() if run.engine == engine]:
            self._forget(request_id)
        self.touched_engines.discard(engine)
        self._accounts.drop_engine(engine)
        self.dropped_engines[engine] = None
        self._router_session.put(messages.EngineDropped(engine))

    def places(self) -> tuple[Amount, ...]:
        """What requests hold of the places of sessions, by lease. O(requests)."""
        return tuple(run.place for run in self.running.values() if run.place is not None)

    def on_action(self, action: ActorAction, now: float) -> list[Action]:
        """Apply an action of the actor on accounts, running requests or sessions."""
        match action:
            case Preempt(ticket):
                run = self.by_ticket.get(ticket)
                return [] if run is None else [replace(action, request_id=run.arrival.request_id)]
            case messages.CreditChange(engine, slots, tokens) | messages.CreditGrant(engine, slots, tokens):
                account = self._accounts.by_engine.get(engine)
                if account is None:
                    return []
                self._accounts.change(engine, credit=(slots, tokens))
                self.touched_engines.add(engine)
                if isinstance(action, messages.CreditGrant):
                    account.request_pending = False
                    account.request_again_at = now + CREDIT_REQUEST_PAUSE_S
                    self._accounts.set_target(engine, action.target_slots, action.target_tokens)
            case messages.Reclaim(engine, request_class):
                self._reclaim(engine, request_class, now)
            case KvTokenGrant():
                self._on_kv_token_grant(action)
            case SessionEntry():
                self.sessions[action.request.session_id] = action
            case messages.SessionEnded(name, lease) if name in self.sessions and self.sessions[name].lease == lease:
                del self.sessions[name]
            case messages.Booked(short, sessions):
                self.sessions.clear()
                self.sessions.update((one.request.session_id, one) for one in sessions)
                for pool, slots, tokens in short:
                    if pool in self._accounts.by_engine:
                        self._accounts.change(pool, credit=(-slots, -tokens))
                    else:
                        self._reduce_place(Amount(pool, slots, tokens))
        return []

    def begin_on_credit(self, waiting: PendingRequest, now: float) -> str | None:
        """Begin a request on credit, preferably of its session's or its affinity's engine; returns the engine, or None
        if no engine has enough credit. O(sessions) for a request of a session."""
        arrival = waiting.arrival
        affinity = waiting.arrival.affinity
        if arrival.session is not None:
            affinity = next((one.engine for one in self.sessions.values() if one.lease == arrival.session), affinity)
        engine = self._accounts.choose(waiting.model, arrival.slots, arrival.cost, affinity, arrival.fingerprint)
        if engine is not None:
            self._accounts.grant(engine, arrival.slots, arrival.cost)
            self.touched_engines.add(engine)
            slots = arrival.slots
            tokens = arrival.cost
            ticket = self._router_session.new_ticket()
            run = RunningRequest(
                waiting.model, engine, arrival, slots, tokens, tokens, ticket, now, is_known=False, on_credit=True
            )
            self.unannounced[ticket] = run
            self._begin(run)
        return engine

    def begin_granted(self, waiting: PendingRequest, granted: Grant, now: float) -> None:
        """Begin a request that the actor has granted; the account grows by what it holds."""
        engine = granted.replica_id
        lease = granted.lease
        arrival = waiting.arrival
        ticket = waiting.ticket
        slots, tokens = (0, 0) if lease else (arrival.slots, arrival.cost)
        place = Amount(lease, 1, arrival.cost) if lease else None
        self._accounts.change(engine, held=(slots, tokens))
        self._begin(
            RunningRequest(
                waiting.model,
                engine,
                arrival,
                slots,
                tokens,
                tokens,
                ticket,
                now,
                is_known=True,
                on_credit=False,
                place=place,
                was_due=granted.was_due,
            )
        )

    def announcements(self, now: float) -> Iterator[Began]:
        """What is to be announced: each counts as announced once it is taken."""
        while self._router_session.takes_begun and self.unannounced:
            yield self._announce(next(iter(self.unannounced.values())), now)

    def begin_incarnation(self, now: float) -> list[RouterEvent]:
        """The actor knows none of the requests any more: they get other tickets. Returns the events of those that have
        the place of a session or lack KV tokens: these must be known at once. O(requests)."""
        self.by_ticket.clear()
        self.unannounced.clear()
        events: list[RouterEvent] = []
        acked = self._router_session.sending.last_acked
        for run in self.running.values():
            if run.is_known and run.known_in <= acked:
                run.is_paid = True
                run.paid_tokens = run.output_tokens
            run.is_known = False
            run.on_credit = True
            run.ticket = self._router_session.new_ticket()
            self.by_ticket[run.ticket] = run
            if run.slots or run.place is not None:  # else its session has ended, and it holds nothing
                self.unannounced[run.ticket] = run
            if run.ticket not in self.unannounced or not self._router_session.takes_begun:
                continue
            if run.owed_tokens:
                events += [self._announce(run, now), self._kv_token_request(run, run.owed_tokens)]
            elif run.place is not None:
                events.append(self._announce(run, now))
            run.known_in = 1  # in the first message, or one soon after
        return events

    def end(
        self, request_id: str, prompt_tokens: int | None, output_tokens: int | None, *, is_alone: bool = False
    ) -> RunningRequest | None:
        """A request has ended after so many tokens (None: not known, its estimate counts); None: it did not run.
        `is_alone`: the actor is away, so what was credit stays here."""
        run = self.running.get(request_id)
        if run is None:
            return None
        self._forget(request_id)
        if prompt_tokens is None:
            prompt_tokens = run.prompt_tokens or run.arrival.prompt_tokens
        if output_tokens is None:
            earlier = run.arrival.prompt_tokens + run.arrival.produced_tokens
            output_tokens = max(0, run.arrival.cost_tokens - earlier)
        session = self._router_session
        if not run.is_known:
            self._keep(run)
            if run.is_paid:
                prompt_tokens = 0
                output_tokens = max(0, output_tokens - run.paid_tokens)
            session.add_usage(run.model, run.arrival, prompt_tokens, output_tokens)
            return run
        returned = run.place or Amount(run.engine, 0, 0)
        stays = run.on_credit and (is_alone or self._accounts.keeps(run.engine, session.state))
        if run.place is not None or stays or (session.takes_begun and self._accounts.lacks(run.engine)):
            self._keep(run)
        else:
            returned = Amount(run.engine, run.slots, run.tokens)
            self._accounts.change(run.engine, held=(-run.slots, -run.tokens))
        session.end_request(messages.Done(run.ticket, prompt_tokens, output_tokens, *returned))
        return run

    def _keep(self, run: RunningRequest) -> None:
        """What a request has held of its engine becomes credit."""
        self._accounts.change(run.engine, held=(-run.slots, -run.tokens), credit=(run.slots, run.tokens))
        self.touched_engines.add(run.engine)

    def progress(self, request_id: str, output_tokens: int, prompt_tokens: int = 0) -> None:
        """A request has generated this many more tokens. `prompt_tokens`: as its engine has counted them; told once."""
        run = self.running.get(request_id)
        if run is None:
            return
        run.output_tokens += output_tokens
        run.prompt_tokens += prompt_tokens
        if run.is_known:
            self._router_session.add_progress(run.ticket, output_tokens, prompt_tokens)

    def grow(self, request_id: str, tokens: int, now: float) -> bool:
        """A request needs more KV tokens; False: they are requested from the actor, not granted yet."""
        run = self.running.get(request_id)
        if run is None:
            return False
        may_grow = run.place is None and (self._router_session.takes_begun or not run.is_known)
        if may_grow and self._accounts.credit(run.engine)[1] >= tokens:
            self._accounts.grant(run.engine, 0, tokens)
            run.tokens += tokens
            self.touched_engines.add(run.engine)
            return True
        self._request_kv_tokens(run, tokens, now)
        return False

    def _reclaim(self, engine: str, above: RequestClass, now: float) -> None:
        """Return KV tokens beyond the estimates of requests below a class; they become KV debt. O(requests)."""
        for run in self.running.values():
            more = min(run.tokens - run.estimated_tokens, self._accounts.tokens(engine))  # no more than is booked
            if run.engine == engine and run.arrival.request_class < above and more > 0:
                self._accounts.change(engine, held=(0, -more))
                run.tokens -= more
                self._request_kv_tokens(run, more, now, reclaimed=True)

    def _request_kv_tokens(self, run: RunningRequest, tokens: int, now: float, *, reclaimed: bool = False) -> None:
        run.owed_tokens += tokens
        if run.ticket in self.unannounced and self._router_session.takes_begun:
            self._router_session.put(self._announce(run, now))
        self._router_session.put(self._kv_token_request(run, tokens, reclaimed=reclaimed))

    def _kv_token_request(self, run: RunningRequest, tokens: int, *, reclaimed: bool = False) -> KvTokenRequest:
        level = run.arrival.request_class
        return KvTokenRequest(run.arrival.request_id, run.ticket, run.engine, tokens, level, reclaimed)

    def _announce(self, run: RunningRequest, now: float) -> Began:
        del self.unannounced[run.ticket]
        run.is_known = True
        run.known_in = self._router_session.sending.last + 1  # it is put at once
        return run.announcement(now)

    def _on_kv_token_grant(self, grant: KvTokenGrant) -> None:
        """The actor has granted a request more KV tokens."""
        run = self.by_ticket.get(grant.ticket)
        place = None if run is None else run.place
        if run is not None and place is not None and place.engine == grant.engine:
            run.place = place._replace(tokens=place.tokens + grant.tokens)
            run.owed_tokens -= grant.tokens
        elif run is not None and run.engine == grant.engine:
            self._accounts.change(grant.engine, held=(0, grant.tokens))
            run.tokens += grant.tokens
            run.owed_tokens -= grant.tokens
        elif grant.engine in self._accounts.by_engine:
            self._accounts.change(grant.engine, credit=(0, grant.tokens))
            self.touched_engines.add(grant.engine)
        else:
            self._router_session.put(messages.GiveBack(grant.engine, 0, grant.tokens))

    def _reduce_place(self, short: Amount) -> None:
        """Reduce the place of a session by what the actor could not book: the session may have ended. O(requests)."""
        for run in self.running.values():
            if run.place is not None and run.place.engine == short.engine:
                left = Amount(short.engine, run.place.slots - short.slots, run.place.tokens - short.tokens)
                run.place = left if left.slots > 0 or left.tokens > 0 else None

    def recount(self) -> list[str]:
        """Set each engine's held amount to the sum of its requests; returns engines where it differed.
        O(requests + engines)."""
        held = {engine: [0, 0] for engine in self._accounts.by_engine}
        for run in self.running.values():
            held[run.engine][0] += run.slots
            held[run.engine][1] += run.tokens
        wrong = [engine for engine, sums in held.items() if tuple(sums) != self._accounts.held(engine)]
        for engine in wrong:
            slots, tokens = self._accounts.held(engine)
            self._accounts.change(engine, held=(held[engine][0] - slots, held[engine][1] - tokens))
        return wrong

    def _begin(self, run: RunningRequest) -> None:
        self.running[run.arrival.request_id] = run
        self.by_ticket[run.ticket] = run
        self.counts[run.model] += 1
        if self._accounts.by_engine[run.engine].single_request:
            self.set_reachability(run.model, run.engine, False, False)  # an engine for a single request has it now

    def _forget(self, request_id: str) -> None:
        run = self.running.pop(request_id)
        del self.by_ticket[run.ticket]
        self.unannounced.pop(run.ticket, None)
        self.counts[run.model] -= 1
        if not self.counts[run.model]:
            del self.counts[run.model]
