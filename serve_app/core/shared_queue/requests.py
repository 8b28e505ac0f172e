"""The requests of all queues, by ticket: each waits in its model's queue or runs in its router's account.

Rules
- A grant is charged to its router's account before the router hears of it, and comes back when the request ends.
- A request avoids the engines that its own router does not reach; it comes in again, as old as it is, when that has
  changed: at once where there are more, else when it would be granted one of those.
- A request of a session draws on that when it comes: its tokens, and its one slot where these and what is free are
  enough. Then it begins, and its use is charged to its tenant like any other's. Else it waits in the queue for the
  rest, on the session's engine alone, or until the session's slot has come back and its tokens are enough. If the
  session goes with its engine, it is a request like any other.

Invariant: a ticket is known from its arrival to its end, and nothing of it after that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from serve_app.core.memory import KEEPER, Sessions
from serve_app.core.queue import Action, Admission, Arrival, Grant, Refuse
from serve_app.core.shared_queue.actor_credit import Accounts
from serve_app.core.shared_queue.kv_debt import Growth
from serve_app.core.shared_queue.messages import UNTOLD, Drawn, Stands, Usage
from serve_app.core.shared_queue.messages import Action as Said
from serve_app.core.shared_queue.model_state import Line, Request
from serve_app.errors import InsufficientMemory, LeaseConflict, LeaseNotFound


class Requests:
    """Requests that wait or run. O(log n) per event, save where it is said.

    Args:
        accounts: what routers have of the ledger.
        growth: what running requests are owed.
        say: tells a router something.
        sync: what is free of an engine may have changed.
    """

    def __init__(
        self,
        accounts: Accounts,
        sessions: Sessions,
        growth: Growth,
        say: Callable[[str, Said], None],
        sync: Callable[[str, float], None],
    ) -> None:
        self.accounts, self._sessions, self._growth, self._say, self._sync = accounts, sessions, growth, say, sync
        self.lines: dict[str, Line] = {}
        self.closed: frozenset[str] = frozenset()  # engines where it is not known what routers hold
        self.touched: set[str] = set()  # models in which something was decided
        self._requests: dict[str, Request] = {}
        self._tickets: dict[str, dict[str, None]] = {}  # by router, in the order they came
        self._again: list[str] = []  # tickets whose grant found nothing
        self._short: dict[str, dict[str, None]] = {}  # tickets that wait and are short of a session's slot, by session

    def arrive(self, router: str, model: str, arrival: Arrival, arrived_s: float, now: float) -> None:
        """A request asks for a place; its deadline is of this clock."""
        line = self.line(model)
        request = self._requests[arrival.request_id] = Request(router, model, arrival, arrived_s)
        self._tickets.setdefault(router, {})[arrival.request_id] = None
        request.arrival = replace(arrival, avoid=self._avoid(request))
        if arrival.session is not None:
            self._draw(request, now)
        if not request.beside:
            self.act(model, line.admission.on_arrive(request.arrival, now, now - arrived_s))

    def done(self, ticket: str, prompt_tokens: int, output_tokens: int, now: float) -> None:
        """A request has ended; what it held is its engine's again. An unknown ticket changes nothing."""
        request = self._end(ticket, now)
        if request is not None:
            self._charge_use(request, max(0, output_tokens - request.produced))
            admission = self.lines[request.model].admission
            self.act(request.model, admission.on_done(ticket, now, prompt_tokens, output_tokens))

    def take_over(self, ticket: str) -> None:
        """What a granted request holds goes to whoever has called, before the line hears of its end."""
        request = self._requests[ticket]
        self.accounts.give_back(request.router, request.engine, request.slots, request.tokens)
        request.slots = request.tokens = 0

    def cancel(self, ticket: str, now: float) -> None:
        """A request is of no use any more, waiting or running. An unknown ticket changes nothing."""
        request = self._end(ticket, now)
        if request is not None:
            self.act(request.model, self.lines[request.model].admission.on_cancel(ticket, now), ended=ticket)

    def progress(self, ticket: str, output_tokens: int, now: float) -> None:
        """A request has put out so many tokens more."""
        request = self._requests.get(ticket)
        if request is not None:
            self._charge_use(request, output_tokens)
            self.act(request.model, self.lines[request.model].admission.on_progress(ticket, output_tokens, now))

    def look(self, router: str, ticket: str, now: float) -> None:
        """Where does a ticket stand? Of one that does not wait nothing is said."""
        request = self._requests.get(ticket)
        status = None if request is None else self.lines[request.model].admission.status(ticket, now)
        if status is not None:
            self._say(router, Stands(status))

    def used(self, usage: Usage) -> None:
        """A router has served somebody by itself."""
        admission = self.line(usage.model).admission
        admission.on_usage(usage.request_class, usage.tenant, usage.prompt_tokens, usage.output_tokens)

    def once_more(self, now: float) -> None:
        """What was granted where there was nothing any more, or where its router cannot go, waits again, as old as it
        is."""
        again, self._again = self._again, []
        while again:
            for ticket in again:
                request = self._requests.get(ticket)
                if request is None or request.engine:  # it has come in again meanwhile, and was granted
                    continue
                if not self._astray(ticket):
                    for engine in list(self.lines[request.model].engines):
                        self._sync(engine, now)
                self._come_in_again(ticket, now)
            before, self._again = self._again, []
            again = [one for one in before if self._astray(one)]  # each of them once
            self._again = [one for one in before if not self._astray(one)]

    def waiting(self, model: str) -> bool:
        """Whether somebody waits for a model."""
        return model in self.lines and self.lines[model].admission.waiting > 0

    def line(self, model: str) -> Line:
        """The line of a model; a new one if there is none."""
        line = self.lines.get(model)
        if line is None:
            line = self.lines[model] = Line(Admission(UNTOLD))
        return line

    def draw_anew(self, now: float) -> None:
        """A session's slot that has come back is that of the first who waits and whom its tokens are enough for."""
        freed, self.accounts.freed = self.accounts.freed, set()
        for lease in sorted(freed & self._short.keys()):
            one, (slots, tokens) = self._sessions.of(lease), self.accounts.free(lease)
            if one is None or not slots or one.engine in self.closed:
                continue
            for ticket in self._short.get(lease, ()):
                request = self._requests[ticket]
                drawn = request.drawn
                whole = replace(request.whole or request.arrival, avoid=request.arrival.avoid)
                enough = tokens + (0 if drawn is None else drawn.tokens) >= whole.cost
                if enough and one.engine not in whole.avoid:
                    self._out_of_line(ticket, now)
                    if drawn is not None:
                        self.accounts.give_back(request.router, lease, 0, drawn.tokens)
                    request.arrival, request.whole, request.drawn = whole, None, None
                    self._draw(request, now)
                    self._has_place(request)
                    break  # a session has one slot

    def get(self, ticket: str) -> Request | None:
        """The request of a ticket."""
        return self._requests.get(ticket)

    def serves(self, model: str) -> bool:
        """Whether somebody waits for a model or runs there. O(requests)."""
        return any(request.model == model for request in self._requests.values())

    def forget(self, routers: Sequence[str], now: float) -> None:
        """Incarnations are over: who waits for them is gone, and what runs is in their accounts alone."""
        tickets = [ticket for router in routers for ticket in self._tickets.pop(router, ()) if ticket in self._requests]
        for ticket in [one for one in tickets if not self._requests[one].engine]:
            tickets.remove(ticket)  # of all of them first: none is granted what another one's end frees
            self.cancel(ticket, now)  # one may have been granted all the same, by the end of the one before
        for ticket in tickets:
            request = self._requests.pop(ticket, None)
            if request is None:  # refused by what came due meanwhile
                continue
            self._release(request, now)
            self.act(request.model, self.lines[request.model].admission.on_cancel(ticket, now), ended=ticket)

    def come_in_again(self, router: str, model: str, now: float) -> None:
        """A router reaches other engines of a model: who waits for it comes in again, the oldest first."""
        tickets = [one for one in self._tickets.get(router, ()) if self._astray(one, model)]
        for ticket in sorted(tickets, key=lambda one: self._requests[one].arrived_s):
            if ticket in self._requests and not self._requests[ticket].engine:
                self._come_in_again(ticket, now)

    def left(self, router: str, engine: str, now: float) -> None:
        """A router is done with an engine: what it ran there has ended. O(requests of the router)."""
        for ticket in [one for one in self._tickets.get(router, ()) if self._requests[one].engine == engine]:
            self.cancel(ticket, now)

    def drop_engine(self, engine: str, routers: Iterable[str]) -> None:
        """An engine is gone: what these routers ran there is forgotten."""
        for router in routers:
            tickets = self._tickets.get(router, {})
            for ticket in [one for one in tickets if self._requests[one].engine == engine]:
                tickets.pop(ticket, None)
                del self._requests[ticket]

    def _astray(self, ticket: str, model: str = "") -> bool:
        """Whether a ticket waits, for this model, and avoids other engines than its router does not reach."""
        request = self._requests.get(ticket)
        if request is None or request.engine or model not in ("", request.model):
            return False
        return request.arrival.avoid != self._avoid(request)

    def _avoid(self, request: Request) -> frozenset[str]:
        """Engines that a request may not have; who opens sessions has said that himself."""
        if request.router == KEEPER:
            return request.arrival.avoid
        return self.lines[request.model].avoid(request.router)

    def _come_in_again(self, ticket: str, now: float) -> None:
        """Who has waited already is put in the line anew, as old as it is."""
        request = self._out_of_line(ticket, now)
        request.arrival = replace(request.arrival, accepted=True, avoid=self._avoid(request))
        admission = self.lines[request.model].admission
        self.act(request.model, admission.on_arrive(request.arrival, now, now - request.arrived_s))

    def _out_of_line(self, ticket: str, now: float) -> Request:
        """Take a request out of its model's queue, without an end."""
        request = self._requests.pop(ticket)  # while it leaves, nothing is decided for it
        self.act(request.model, self.lines[request.model].admission.on_cancel(ticket, now), ended=ticket)
        self._requests[ticket] = request
        return request

    def _draw(self, request: Request, now: float) -> None:
        """A request of a session has come: it begins in that, or is to wait in the line for what is missing."""
        arrival, router = request.arrival, request.router
        one = self._sessions.of(arrival.session or "")
        if one is None or one.ask.model != request.model or one.engine in arrival.avoid | self.closed:
            return
        self._sessions.touch(one.lease, now)
        slots, tokens = self.accounts.free(one.lease)
        if not slots:
            request.short_of = one.lease
            self._short.setdefault(one.lease, {})[arrival.request_id] = None
        if not tokens:
            return
        drawn = Drawn(arrival.request_id, one.lease, min(1, slots), min(tokens, arrival.cost))
        missing = arrival.cost - drawn.tokens
        if missing and (self.waiting(request.model) or self.accounts.free(one.engine)[1] < missing):
            drawn = drawn._replace(slots=0)  # who waits for such tokens comes first
        self.accounts.charge(router, one.lease, drawn.slots, drawn.tokens)
        request.drawn = drawn
        self._say(router, drawn)
        if not drawn.slots:
            request.whole = arrival
            request.arrival = replace(arrival, cost_tokens=drawn.rest(arrival)[1], only=one.engine)
            return
        request.engine, (request.slots, request.tokens) = one.engine, drawn.rest(arrival)
        self.accounts.charge(router, one.engine, request.slots, request.tokens)
        self._sync(one.engine, now)
        self.used(Usage(request.model, arrival.request_class, arrival.tenant, 1, arrival.prompt_tokens, 0))
        self._say(router, Grant(arrival.request_id, one.engine, now - request.arrived_s))

    def _has_place(self, request: Request) -> None:
        """A request runs, or has ended: it is short of nothing."""
        if request.short_of:
            waiting = self._short[request.short_of]
            del waiting[request.arrival.request_id]
            if not waiting:
                del self._short[request.short_of]
            request.short_of = ""

    def undraw(self, routers: Iterable[str], leases: Sequence[str], now: float) -> None:
        """Requests that wait for these sessions' engine wait for any from now on."""
        tickets = [ticket for router in routers for ticket in self._tickets.get(router, ())]
        for ticket in tickets:
            request = self._requests.get(ticket)
            if request is None or (drawn := request.drawn) is None or drawn.lease not in leases:
                continue
            if request.engine or request.whole is None:
                continue
            self.accounts.give_back(request.router, drawn.lease, drawn.slots, drawn.tokens)
            request.arrival, request.drawn = replace(request.whole, session=None), None
            self._say(request.router, drawn._replace(tokens=0))
            self._come_in_again(ticket, now)

    def _charge_use(self, request: Request, output_tokens: int) -> None:
        """What a request has put out beside the line is charged to its tenant all the same."""
        request.produced += output_tokens
        if request.beside and output_tokens:
            arrival = request.arrival
            self.used(Usage(request.model, arrival.request_class, arrival.tenant, 0, 0, output_tokens))

    def _end(self, ticket: str, now: float) -> Request | None:
        request = self._requests.pop(ticket, None)
        if request is None:
            return None
        self._tickets.get(request.router, {}).pop(ticket, None)
        self._growth.ended(ticket)
        self._has_place(request)
        if request.drawn is not None:
            self.accounts.give_back(request.router, request.drawn.lease, request.drawn.slots, request.drawn.tokens)
            self._sessions.touch(request.drawn.lease, now)
        if request.engine:
            self.accounts.give_back(request.router, request.engine, request.slots, request.tokens)
            self._release(request, now)
        return request

    def act(self, model: str, actions: Iterable[Action], ended: str = "") -> None:
        """Do what a line has decided; of `ended`, which is of no use any more, what came due in the same moment is
        nobody's business."""
        self.touched.add(model)
        for action in actions:
            if action.request_id == ended:
                continue
            request = self._requests[action.request_id]
            if isinstance(action, Refuse):
                if request.drawn is not None:
                    self._say(request.router, request.drawn._replace(slots=0, tokens=0))
                self._end(action.request_id, -math.inf)
            else:
                reached = self.lines[model].engines[action.replica_id].reached
                if request.router != KEEPER and not reached.get(request.router):
                    self._again.append(action.request_id)
                    continue
                try:
                    self._charge(request, action.replica_id)
                except (InsufficientMemory, LeaseNotFound, LeaseConflict):
                    self._again.append(action.request_id)  # in the middle of several ends at once
                    continue
            self._say(request.router, action)

    def _charge(self, request: Request, engine: str) -> None:
        arrival = request.arrival
        self.accounts.charge(request.router, engine, arrival.slots, arrival.cost)
        request.engine, request.slots, request.tokens = engine, arrival.slots, arrival.cost
        self._has_place(request)
        one = self.lines[request.model].engines[engine]
        one.slots += arrival.slots
        one.tokens += arrival.cost

    def _release(self, request: Request, now: float) -> None:
        """A request is none of the line's any more; `Admission` is told next."""
        one = self.lines[request.model].engines.get(request.engine)
        if one is not None:
            if not request.beside:
                one.slots = max(0, one.slots - request.arrival.slots)
                one.tokens = max(0, one.tokens - request.arrival.cost)
            self._sync(request.engine, now)
