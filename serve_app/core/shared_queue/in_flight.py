"""A router's running requests, and the amounts that each holds of the router's accounts and of its session.

A request granted on credit has no ticket: what it held becomes credit when it ends, and its use is reported in sums. A
request granted by the actor has a ticket: what it held is returned to the actor at its end. A request that outlives the
actor, or the incarnation in which it was granted, loses its ticket; its draw on a session is then returned separately.

Invariant: the amount held of an engine, or of a session, is the sum over its requests.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from serve_app.core.queue import Arrival
from serve_app.core.shared_queue import messages
from serve_app.core.shared_queue.messages import (
    ActorAction,
    KvTokenGrant,
    KvTokenRequest,
    SessionDraw,
)
from serve_app.core.shared_queue.pending import PendingRequest
from serve_app.core.shared_queue.router_credit import CREDIT_REQUEST_PAUSE_S, RouterCredit
from serve_app.core.shared_queue.router_session import RouterSession
from serve_app.types import RequestClass


@dataclass(slots=True)
class RunningRequest:
    """A running request. `slots` and `tokens`: held of its engine; `drawn`: of its session. `ticket`: its id at the
    actor; empty: granted on credit, or the incarnation has ended."""

    model: str
    engine: str
    arrival: Arrival
    slots: int
    tokens: int
    estimated_tokens: int  # KV tokens at its start
    ticket: str
    drawn: SessionDraw | None = None
    output_tokens: int = 0  # output tokens so far
    reported_tokens: int = 0  # of these, reported in sums
    owed_tokens: int = 0  # KV tokens requested and not granted yet


class InFlight:
    """Running requests by id. O(1) per method, unless stated."""

    def __init__(self, accounts: RouterCredit, session: RouterSession) -> None:
        self._accounts, self._router_session = accounts, session
        self.running: dict[str, RunningRequest] = {}
        self.counts: Counter[str] = Counter()  # by model
        self.touched_engines: set[str] = set()  # engines whose credit has changed
        # not acknowledged yet by the actor, with their reachability since
        self.dropped_engines: dict[str, tuple[str, bool, bool] | None] = {}
        self.sessions: dict[str, messages.SessionOpened] = {}  # open sessions, by name

    def set_reachability(self, model: str, engine: str, usable: bool, single_request: bool) -> None:
        """See `RouterQueue.set_reachability`."""
        if engine in self.dropped_engines:
            self.dropped_engines[engine] = (model, usable, single_request)
        elif self._accounts.set_reachability(model, engine, usable, single_request=single_request):
            self._router_session.put(messages.EngineReachability(model, engine, usable))
            self.touched_engines.add(engine)

    def drop_engine(self, engine: str) -> None:
        """An engine is gone: forget its requests. O(requests)."""
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

    def on_action(self, action: ActorAction, now: float) -> None:
        """Apply an action of the actor on accounts, running requests or sessions."""
        match action:
            case messages.CreditChange(engine, slots, tokens) | messages.CreditGrant(engine, slots, tokens):
                account = self._accounts.by_engine.get(engine)
                if account is None:
                    return
                self._accounts.change(engine, credit=(slots, tokens))
                self.touched_engines.add(engine)
                if isinstance(action, messages.CreditGrant):
                    account.request_pending, account.request_again_at = False, now + CREDIT_REQUEST_PAUSE_S
                    account.target_slots, account.target_tokens = action.target_slots, action.target_tokens
            case messages.Reclaim(engine, request_class):
                self._reclaim(engine, request_class)
            case KvTokenGrant():
                self._on_kv_token_grant(action)
            case messages.SessionOpened(name):
                self.sessions[name] = action
            case messages.SessionEnded(name, lease) if name in self.sessions and self.sessions[name].lease == lease:
                del self.sessions[name]
            case messages.Booked(short, sessions):
                self.sessions.clear()
                self.sessions.update((one.name, one) for one in sessions)
                for pool, slots, tokens in short:
                    if pool in self._accounts.by_engine:
                        self._accounts.change(pool, credit=(-slots, -tokens))
                    else:
                        self.reduce_draws(pool, slots, tokens)

    def begin_on_credit(self, waiting: PendingRequest) -> str | None:
        """Begin a request on credit, preferably of its session's or its affinity's engine; returns the engine, or None
        if no engine has enough credit. O(sessions) for a request of a session."""
        arrival, affinity = waiting.arrival, waiting.arrival.affinity
        if arrival.session is not None:
            affinity = next((one.engine for one in self.sessions.values() if one.lease == arrival.session), affinity)
        engine = self._accounts.choose(waiting.model, arrival.slots, arrival.cost, affinity)
        if engine is not None:
            self._accounts.grant(engine, arrival.slots, arrival.cost)
            self.touched_engines.add(engine)
            self._begin(RunningRequest(waiting.model, engine, arrival, arrival.slots, arrival.cost, arrival.cost, ""))
        return engine

    def begin_granted(self, waiting: PendingRequest, engine: str) -> None:
        """Begin a request that the actor has granted; the account grows by what it holds."""
        arrival, drawn = waiting.arrival, waiting.drawn
        slots, tokens = (arrival.slots, arrival.cost) if drawn is None else drawn.remainder(arrival)
        self._accounts.change(engine, held=(slots, tokens))
        self._begin(RunningRequest(waiting.model, engine, arrival, slots, tokens, tokens, waiting.ticket, drawn))

    def end(self, request_id: str, prompt_tokens: int | None, output_tokens: int | None) -> RunningRequest | None:
        """A request has ended after so many tokens (None: not known, its estimate counts); None: it did not run."""
        run = self.running.get(request_id)
        if run is None:
            return None
        self._forget(request_id)
        if prompt_tokens is None:
            prompt_tokens = run.arrival.prompt_tokens
        if output_tokens is None:
            output_tokens = max(0, run.arrival.cost_tokens - run.arrival.prompt_tokens)
        if run.ticket:
            self._accounts.change(run.engine, held=(-run.slots, -run.tokens))
            self._router_session.end_request(messages.Done(run.ticket, prompt_tokens, output_tokens))
        else:
            if run.drawn is not None:
                self._router_session.put(messages.GiveBack(run.drawn.lease, run.drawn.slots, run.drawn.tokens))
            self._accounts.change(run.engine, held=(-run.slots, -run.tokens), credit=(run.slots, run.tokens))
            self.touched_engines.add(run.engine)
            unreported = max(0, output_tokens - run.reported_tokens)
            self._router_session.add_usage(run.model, run.arrival, 1, prompt_tokens, unreported)
            if run.owed_tokens:
                self._router_session.put(messages.CancelKvTokenRequest(request_id, run.engine))
        return run

    def progress(self, request_id: str, output_tokens: int) -> None:
        """A request has generated this many more tokens."""
        run = self.running.get(request_id)
        if run is None:
            return
        run.output_tokens += output_tokens
        if run.ticket:
            self._router_session.progress[run.ticket] += output_tokens
        else:
            run.reported_tokens += output_tokens
            self._router_session.add_usage(run.model, run.arrival, 0, 0, output_tokens)

    def grow(self, request_id: str, tokens: int) -> bool:
        """A request needs more KV tokens; False: they are requested from the actor, not granted yet."""
        run = self.running.get(request_id)
        if run is None:
            return False
        if not run.ticket and self._accounts.credit(run.engine)[1] >= tokens:
            self._accounts.grant(run.engine, 0, tokens)
            run.tokens += tokens
            self.touched_engines.add(run.engine)
            return True
        run.owed_tokens += tokens
        self._router_session.put(KvTokenRequest(request_id, run.ticket, run.engine, tokens, run.arrival.request_class))
        return False

    def _reclaim(self, engine: str, above: RequestClass) -> None:
        """Return KV tokens beyond the estimates of requests below a class; they become KV debt. O(requests)."""
        for request_id, run in self.running.items():
            more, level = run.tokens - run.estimated_tokens, run.arrival.request_class
            if run.engine == engine and level < above and more > 0:
                self._accounts.change(engine, held=(0, -more))
                run.tokens -= more
                run.owed_tokens += more
                self._router_session.put(KvTokenRequest(request_id, run.ticket, engine, more, level, reclaimed=True))

    def _on_kv_token_grant(self, grant: KvTokenGrant) -> None:
        """The actor has granted a request more KV tokens."""
        run = self.running.get(grant.request_id)
        if run is not None and run.drawn is not None and (run.drawn.lease, run.ticket) == (grant.engine, grant.ticket):
            run.drawn = run.drawn._replace(tokens=run.drawn.tokens + grant.tokens)
            run.owed_tokens -= grant.tokens
        elif run is not None and (run.engine, run.ticket) == (grant.engine, grant.ticket):
            self._accounts.change(grant.engine, held=(0, grant.tokens))
            run.tokens += grant.tokens
            run.owed_tokens -= grant.tokens
        elif not grant.ticket and grant.engine in self._accounts.by_engine:
            # with a ticket the later `Done` has returned these tokens, too
            self._accounts.change(grant.engine, credit=(0, grant.tokens))
            self.touched_engines.add(grant.engine)

    def reduce_draws(self, lease: str, slots: int, tokens: int) -> None:
        """Reduce the draws on a session by what the actor could not book: it may have ended. O(requests)."""
        for run in self.running.values():
            drawn = run.drawn
            if drawn is not None and drawn.lease == lease:
                less_slots, less_tokens = min(slots, drawn.slots), min(tokens, drawn.tokens)
                slots, tokens = slots - less_slots, tokens - less_tokens
                run.drawn = drawn._replace(slots=drawn.slots - less_slots, tokens=drawn.tokens - less_tokens)

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
        self.counts[run.model] += 1
        if self._accounts.by_engine[run.engine].single_request:
            self.set_reachability(run.model, run.engine, False, False)  # an engine for a single request has it now

    def _forget(self, request_id: str) -> None:
        model = self.running.pop(request_id).model
        self.counts[model] -= 1
        if not self.counts[model]:
            del self.counts[model]
