"""The requests of a router that run, what they hold, and how the actor learns of them.

Rules
- A running request has a ticket. One granted on credit is announced to the actor (`Began`) with the next message that
  goes anyway. One that outlives the incarnation gets another ticket, and is announced again.
- The end of a request says what it returns (`Done`), so both ends agree on the accounts, whatever the actor knows of
  it: what the actor has granted, and the place of a session. What began on credit stays credit, if the router may have
  credit there. So it is with what has outlived an incarnation.
- One on credit that ends before it was announced is not told at all: its use is reported in sums.

Invariant: what this router holds of an engine, or of a session, is nowhere but in its requests: whoever asks is told
the sum over them.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, replace

from serve_app.core.memory import SessionEntry
from serve_app.core.queue import Action, Arrival, BegunRun, Grant, Preempt
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
from serve_app.core.shared_queue.router_pending import PendingRequest
from serve_app.types import RequestClass


@dataclass(slots=True)
class RunningRequest:
    """A running request. `slots` and `tokens`: held of its engine; `place`: of its session. `ticket`: its id at the
    actor, which `is_known` there or still to be announced."""

    model: str
    engine: str
    arrival: Arrival
    ticket: str
    begun_s: float
    slots: int
    tokens: int
    place: Amount | None = None
    is_known: bool = False
    on_credit: bool = True
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
        used = (self.prompt_tokens, self.output_tokens)
        lease = "" if self.place is None else self.place.engine
        run = BegunRun(arrival, self.engine, now - self.begun_s, *used, self.is_paid, lease, self.was_due)
        return Began(self.model, run)


class InFlight:
    """Running requests by id. O(1) per method, unless stated."""

    def __init__(self, accounts: RouterCredit, router_session: RouterSession) -> None:
        self._accounts = accounts
        self._router_session = router_session
        self.running: dict[str, RunningRequest] = {}
        self.by_ticket: dict[str, RunningRequest] = {}
        self.by_engine: dict[str, dict[str, RunningRequest]] = {}  # by id, of engines with any
        self.unannounced: OrderedDict[str, RunningRequest] = OrderedDict()  # by ticket, the first to begin first
        # not acknowledged yet by the actor, with their reachability since
        self.dropped_engines: dict[str, tuple[str, bool, bool] | None] = {}
        self.sessions: dict[str, SessionEntry] = {}  # open sessions, by name

    def set_reachability(self, model: str, engine: str, usable: bool, single_request: bool) -> None:
        """See `RouterQueue.set_reachability`."""
        if engine in self.dropped_engines:
            self.dropped_engines[engine] = (model, usable, single_request)
        elif self._accounts.set_reachability(model, engine, usable, single_request=single_request):
            self._router_session.put(messages.EngineReachability(model, engine, usable))

    def drop_engine(self, engine: str) -> None:
        """An engine is gone: forget its requests; one may arrive again under the same id. O(requests there)."""
        if engine in self.dropped_engines:
            self.dropped_engines[engine] = None
        if engine not in self._accounts.by_engine:
            return
        for request_id in list(self.by_engine.get(engine, ())):
            self._forget(request_id)
        self._accounts.drop_engine(engine)
        self.dropped_engines[engine] = None
        self._router_session.put(messages.EngineDropped(engine))

    def count(self, model: str) -> int:
        """How many requests of a model run. O(engines)."""
        engines = self._accounts.by_engine
        return sum(len(runs) for engine, runs in self.by_engine.items() if engines[engine].model == model)

    def count_by_class(self, model: str) -> Counter[RequestClass]:
        """The same, by requested class. O(requests of the model that run)."""
        engines = self._accounts.by_engine
        runs = (runs.values() for engine, runs in self.by_engine.items() if engines[engine].model == model)
        return Counter(run.arrival.request_class for of_engine in runs for run in of_engine)

    def held(self, engine: str) -> Amount:
        """What requests hold of an engine. O(requests there)."""
        runs = self.by_engine.get(engine, {}).values()
        return Amount(engine, sum(run.slots for run in runs), sum(run.tokens for run in runs))

    def places(self) -> tuple[Amount, ...]:
        """What requests hold of the places of sessions, by lease. O(requests)."""
        return tuple(run.place for run in self.running.values() if run.place is not None)

    def account(self, engine: str) -> Amount:
        """What this router may use of an engine: its credit, and what requests hold. O(requests there)."""
        _, slots, tokens = self.held(engine)
        credit_slots, credit_tokens = self._accounts.credit(engine)
        return Amount(engine, slots + credit_slots, tokens + credit_tokens)

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
                self._accounts.add(engine, slots, tokens)
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
                        self._accounts.add(pool, -slots, -tokens)
                    else:
                        self._reduce_place(Amount(pool, slots, tokens))
        return []

    def begin_on_credit(self, waiting: PendingRequest, now: float) -> str | None:
        """Begin a request on credit, preferably of its session's or its affinity's engine; returns the engine, or None
        if no engine has enough credit. O(sessions) for a request of a session."""
        arrival = waiting.arrival
        affinity = arrival.affinity
        if arrival.session is not None:
            affinity = next((one.engine for one in self.sessions.values() if one.lease == arrival.session), affinity)
        engine = self._accounts.choose(
            *(waiting.model, arrival.slots, arrival.cost, affinity), arrival.fingerprint, arrival.avoid_replicas
        )
        if engine is not None:
            self._accounts.grant(engine, arrival.slots, arrival.cost)
            ticket = self._router_session.new_ticket()
            run = RunningRequest(waiting.model, engine, arrival, ticket, now, arrival.slots, arrival.cost)
            self.unannounced[ticket] = run
            self._begin(run)
        return engine

    def begin_granted(self, waiting: PendingRequest, granted: Grant, now: float) -> None:
        """Begin a request that the actor has granted."""
        arrival = waiting.arrival
        slots, tokens = (0, 0) if granted.lease else (arrival.slots, arrival.cost)
        run = RunningRequest(waiting.model, granted.replica_id, arrival, waiting.ticket, now, slots, tokens)
        run.place = Amount(granted.lease, 1, arrival.cost) if granted.lease else None
        run.is_known = True
        run.on_credit = False
        run.was_due = granted.was_due
        self._begin(run)

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
        router_session = self._router_session
        if not run.is_known:
            self._accounts.add(run.engine, run.slots, run.tokens)
            if run.is_paid:
                prompt_tokens = 0
                output_tokens = max(0, output_tokens - run.paid_tokens)
            router_session.add_usage(run.model, run.arrival, prompt_tokens, output_tokens)
            return run
        returned = run.place or Amount(run.engine, 0, 0)
        stays = run.on_credit and (is_alone or self._accounts.keeps(run.engine, router_session.state))
        if run.place is not None or stays or (router_session.takes_begun and self._accounts.lacks(run.engine)):
            self._accounts.add(run.engine, run.slots, run.tokens)
        else:
            returned = Amount(run.engine, run.slots, run.tokens)
        router_session.end_request(messages.Done(run.ticket, prompt_tokens, output_tokens, *returned))
        return run

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
            return True
        self._request_kv_tokens(run, tokens, now)
        return False

    def _reclaim(self, engine: str, above: RequestClass, now: float) -> None:
        """Return KV tokens beyond the estimates of requests below a class; they become KV debt. O(requests there)."""
        booked = self.account(engine).tokens
        for run in self.by_engine.get(engine, {}).values():
            estimated = run.arrival.cost if run.slots else 0  # in the place of a session it has only what it grew by
            more = min(run.tokens - estimated, booked)
            if run.arrival.request_class < above and more > 0:
                booked -= more
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
            run.tokens += grant.tokens
            run.owed_tokens -= grant.tokens
        elif grant.engine in self._accounts.by_engine:
            self._accounts.add(grant.engine, 0, grant.tokens)
        else:
            self._router_session.put(messages.GiveBack(grant.engine, 0, grant.tokens))

    def _reduce_place(self, short: Amount) -> None:
        """Reduce the place of a session by what the actor could not book: the session may have ended. O(requests)."""
        for run in self.running.values():
            if run.place is not None and run.place.engine == short.engine:
                left = Amount(short.engine, run.place.slots - short.slots, run.place.tokens - short.tokens)
                run.place = left if left.slots > 0 or left.tokens > 0 else None

    def _begin(self, run: RunningRequest) -> None:
        self.running[run.arrival.request_id] = run
        self.by_ticket[run.ticket] = run
        self.by_engine.setdefault(run.engine, {})[run.arrival.request_id] = run
        if self._accounts.by_engine[run.engine].single_request:
            self.set_reachability(run.model, run.engine, False, False)  # an engine for a single request has it now

    def _forget(self, request_id: str) -> None:
        run = self.running.pop(request_id)
        del self.by_ticket[run.ticket]
        self.unannounced.pop(run.ticket, None)
        del self.by_engine[run.engine][request_id]
        if not self.by_engine[run.engine]:
            del self.by_engine[run.engine]
