"""What the lines of all models may grant, and to whom: `Admission` bound to what the ledger has free.

Rules
- What nobody has of an engine is the line's: its free slots and KV tokens in the ledger. A grant is charged to its
  router's account before the router hears of it, and comes back when the request ends.
- An engine is in a line while some router of the model says that it can reach it. A request avoids those that its own
  router does not reach; it comes in again, as old as it is, when that has changed: at once where there are more, else
  when it would be granted one of those.
- While nobody waits, half of an engine is divided among the routers as credit; the rest is for who asks.
- An engine that was taken for gone and is there is used again once whoever had something there has said what; so is one
  that is closed, where that is not known since the actor's own death.
- A request of a session draws on that when it comes: its tokens, and its one slot where these and what is free are
  enough. Then it begins, and its use is charged to its tenant like any other's. Else it waits in the line for the rest,
  on the session's engine alone, or until the session's slot has come back and its tokens are enough. If the session
  goes with its engine, it is a request like any other.

Invariant: what a line may grant on an engine is free there in the ledger.
Invariant: a ticket is known from its arrival to its end, and nothing of it after that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from serve_app.core.admission import Admission, Policy
from serve_app.core.exchange.accounts import Accounts
from serve_app.core.exchange.entries import Engine, Line, Request
from serve_app.core.exchange.growth import Grower, Growth
from serve_app.core.exchange.words import UNTOLD, Credit, Drawn, Enough, Grow, Grown, Lent, Reclaim, Stands, Usage
from serve_app.core.exchange.words import Action as Said
from serve_app.core.memory.leases import slots_of
from serve_app.core.memory.ledger import Ledger
from serve_app.core.memory.sessions import KEEPER, Sessions
from serve_app.core.waiting.events import Action, Arrival, Grant, Refuse
from serve_app.errors import InsufficientMemory, LeaseConflict, LeaseNotFound
from serve_app.types import RequestClass


class Places:
    """The lines, by model, and their requests, by ticket. O(log n) per event, save where it is said.

    Args:
        ledger: with the engines and their slots.
        sessions: those that are open.
        say: tells a router something.
        accounts: what routers have of it.
    """

    def __init__(
        self, ledger: Ledger, sessions: Sessions, say: Callable[[str, Said], None], accounts: Accounts
    ) -> None:
        self._ledger, self._sessions, self._say = ledger, sessions, say
        self.accounts = accounts
        self.growth = Growth()
        self.lines: dict[str, Line] = {}
        self.closed: frozenset[str] = frozenset()  # engines where it is not known what routers hold
        self.touched: set[str] = set()  # models in which something was decided
        self._model_of: dict[str, str] = {}  # engines, by their routers' word
        self._requests: dict[str, Request] = {}
        self._tickets: dict[str, dict[str, None]] = {}  # by router, in the order they came
        self._again: list[str] = []  # tickets whose grant found nothing
        self._short: dict[str, dict[str, None]] = {}  # tickets that wait and are short of a session's slot, by session

    # Requests

    def arrive(self, router: str, model: str, arrival: Arrival, arrived_s: float, now: float) -> None:
        """A request asks for a place; its deadline is of this clock."""
        line = self.line(model)
        request = self._requests[arrival.request_id] = Request(router, model, arrival, arrived_s)
        self._tickets.setdefault(router, {})[arrival.request_id] = None
        request.arrival = replace(arrival, avoid=self._avoid(request))
        if arrival.session is not None:
            self._draw(request, now)
        if not request.beside:
            self._act(model, line.admission.on_arrive(request.arrival, now, now - arrived_s))

    def done(self, ticket: str, prompt_tokens: int, output_tokens: int, now: float) -> None:
        """A request has ended; what it held is its engine's again. An unknown ticket changes nothing."""
        request = self._end(ticket, now)
        if request is not None:
            self._charge_use(request, max(0, output_tokens - request.produced))
            admission = self.lines[request.model].admission
            self._act(request.model, admission.on_done(ticket, now, prompt_tokens, output_tokens))

    def take_over(self, ticket: str) -> None:
        """What a granted request holds goes to whoever has called, before the line hears of its end."""
        request = self._requests[ticket]
        self.accounts.give_back(request.router, request.engine, request.slots, request.tokens)
        request.slots = request.tokens = 0

    def cancel(self, ticket: str, now: float) -> None:
        """A request is of no use any more, waiting or running. An unknown ticket changes nothing."""
        request = self._end(ticket, now)
        if request is not None:
            self._act(request.model, self.lines[request.model].admission.on_cancel(ticket, now), ended=ticket)

    def progress(self, ticket: str, output_tokens: int, now: float) -> None:
        """A request has put out so many tokens more."""
        request = self._requests.get(ticket)
        if request is not None:
            self._charge_use(request, output_tokens)
            self._act(request.model, self.lines[request.model].admission.on_progress(ticket, output_tokens, now))

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

    def lend(self, router: str, engine: str, had: tuple[int, int], calm: bool, now: float) -> None:
        """A router has this credit on an engine and asks for more; `calm`: nobody waits for the engine or its model."""
        model = self._model_of.get(engine)
        if (
            model is None
            or slots_of(engine) not in self._ledger
            or router not in self.lines[model].engines[engine].reached
        ):
            self._say(router, Lent(engine, 0, 0, 0, 0))
            return
        line = self.lines[model]
        spare, more = self.accounts.spare(engine, len(line.routers)), (0, 0)
        calm = calm and engine not in self.closed and not self.growth.owes(engine) and not line.admission.contended
        if calm and line.open(engine):
            more = self.accounts.lend(router, engine, spare, had)
            self.sync(engine, now)
        self._say(router, Lent(engine, *more, *spare))

    def grow(self, router: str, event: Grow, now: float) -> None:
        """A running request outgrows its estimate: it is given what its session has, and what is kept for that, or owed
        it."""
        request, tokens = self._requests.get(event.ticket), event.tokens
        if event.ticket and (request is None or request.engine != event.engine):
            return
        if event.back:
            self.accounts.give_back(router, event.engine, 0, event.tokens)
            if request is not None:
                request.tokens = max(0, request.tokens - event.tokens)
        if request is not None and (drawn := request.drawn) is not None:
            more = min(tokens, self.accounts.free(drawn.lease)[1])
            if more:
                self.accounts.charge(router, drawn.lease, 0, more)
                request.drawn = drawn._replace(tokens=drawn.tokens + more)
                self._say(router, Grown(event.request_id, event.ticket, drawn.lease, more))
                tokens -= more
        if tokens:
            who = Grower(router, event.request_id, event.ticket, event.request_class)
            self.growth.owe(event.engine, who, tokens)
        self.sync(event.engine, now)

    def enough(self, router: str, event: Enough, now: float) -> None:
        """A request without a ticket has ended."""
        self.growth.ended_elsewhere(event.engine, router, event.request_id)
        self.sync(event.engine, now)

    def _give(self, engine: str, who: Grower, tokens: int) -> bool:
        try:
            self.accounts.charge(who.router, engine, 0, tokens, growth=True)
        except (InsufficientMemory, LeaseNotFound, LeaseConflict):
            return False
        request = self._requests.get(who.ticket)
        if request is not None:
            request.tokens += tokens
        self._say(who.router, Grown(who.request_id, who.ticket, engine, tokens))
        return True

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
                        self.sync(engine, now)
                self._come_in_again(ticket, now)
            before, self._again = self._again, []
            again = [one for one in before if self._astray(one)]  # each of them once
            self._again = [one for one in before if not self._astray(one)]

    def requests(self) -> dict[str, tuple[Arrival, str]]:
        """Every ticket with its arrival and its engine, none while it waits. O(n)."""
        return {ticket: (request.arrival, request.engine) for ticket, request in self._requests.items()}

    # Routers

    def forget(self, routers: Sequence[str], now: float) -> None:
        """Incarnations are over: who waits for them is gone, and what runs is in their accounts alone."""
        for engine in self.growth.forget(routers):
            self.sync(engine, now)
        tickets = [ticket for router in routers for ticket in self._tickets.pop(router, ()) if ticket in self._requests]
        for ticket in [one for one in tickets if not self._requests[one].engine]:
            tickets.remove(ticket)  # of all of them first: none is granted what another one's end frees
            self.cancel(ticket, now)  # one may have been granted all the same, by the end of the one before
        for ticket in tickets:
            request = self._requests.pop(ticket, None)
            if request is None:  # refused by what came due meanwhile
                continue
            self._release(request, now)
            self._act(request.model, self.lines[request.model].admission.on_cancel(ticket, now), ended=ticket)

    def leave(self, router: str, now: float) -> None:
        """A router that was forgotten is gone with its account. O(engines)."""
        for engine in self.accounts.leave(router):
            self.sync(engine, now)
        for model in list(self.lines):
            line = self.lines[model]
            line.routers.discard(router)
            for engine in list(line.engines):
                self._unreach(router, line.engines[engine])
                self.sync(engine, now)
            line.avoids.clear()
            self.tidy(model)

    def rules(self, router: str, model: str, policy: Policy | None, now: float) -> None:
        """A router serves a model with these bounds; None: not any more."""
        if policy is None:
            if model in self.lines:
                self.lines[model].routers.discard(router)
                self.lines[model].avoids.clear()
                for engine in list(self.lines[model].engines):
                    self.sync(engine, now)  # it may have been the only one that reaches it
                self.tidy(model)
            return
        line = self.lines.get(model)
        if line is None:
            line = self.lines[model] = Line(Admission(policy))
        line.routers.add(router)
        self._act(model, line.admission.on_policy(policy, now))
        line.avoids.clear()
        for engine in list(line.engines):
            self.sync(engine, now)

    def reach(self, router: str, model: str, engine: str, usable: bool, now: float) -> None:
        """Whether a router can hand requests to an engine. O(requests of the router) where it can again."""
        line = self.line(model)
        self._model_of[engine] = model
        line.engines.setdefault(engine, Engine()).reached[router] = usable
        line.avoids.clear()
        self.sync(engine, now)
        tickets = [one for one in self._tickets.get(router, ()) if usable and self._astray(one, model)]
        for ticket in sorted(tickets, key=lambda one: self._requests[one].arrived_s):
            if ticket in self._requests and not self._requests[ticket].engine:
                self._come_in_again(ticket, now)

    def left(self, router: str, engine: str, now: float) -> None:
        """A router is done with an engine, and with all that it had there. O(requests of the router)."""
        for ticket in [one for one in self._tickets.get(router, ()) if self._requests[one].engine == engine]:
            self.cancel(ticket, now)
        self.growth.left(engine, router)
        self._undraw([router], self._sessions.on(engine), now)
        for pool in (engine, *self._sessions.on(engine)):
            self.accounts.give_back(router, pool, *self.accounts.held(router, pool))
        model = self._model_of.get(engine)
        if model is not None:
            self._unreach(router, self.lines[model].engines[engine])
            self.lines[model].avoids.clear()
            self.sync(engine, now)
            self.tidy(model)

    def square(self, router: str, now: float) -> None:
        """A router has said what runs there, on all engines of which that was wanted and that are there. O(engines)."""
        for line in self.lines.values():
            for engine, one in list(line.engines.items()):
                if router in one.owed and slots_of(engine) in self._ledger:
                    one.owed.discard(router)
                    line.avoids.clear()
                    self.sync(engine, now)

    # Engines

    def drop_engine(self, engine: str, now: float) -> None:
        """An engine is gone, and what lay on it; routers that had something there have no credit now."""
        had = self.accounts.drop(engine)
        self.growth.drop(engine)
        for router, (slots, tokens) in had.items():
            self._say(router, Credit(engine, -slots, -tokens))
        leases = self._sessions.on(engine)
        for lease in leases:
            had |= dict.fromkeys(self.accounts.drop(lease), (0, 0))
            self._sessions.forget(lease)
        for router in had:
            tickets = self._tickets.get(router, {})
            for ticket in [one for one in tickets if self._requests[one].engine == engine]:
                tickets.pop(ticket, None)
                del self._requests[ticket]
        model = self._model_of.get(engine)
        if model is None:
            self._undraw(had, leases, now)
            return
        one = self.lines[model].engines[engine]
        one.slots, one.tokens, one.told = 0, 0, None
        one.owed |= had.keys()
        one.reached = {router: usable for router, usable in one.reached.items() if usable or router in had}
        self.lines[model].avoids.clear()
        self._act(model, self.lines[model].admission.on_replica_gone(engine, now))
        self._undraw(had, leases, now)
        self.tidy(model)

    def owing(self, engine: str) -> set[str]:
        """Routers that have to say anew what runs on an engine that was taken for gone, and is there."""
        model = self._model_of.get(engine)
        there = model is not None and slots_of(engine) in self._ledger
        return set(self.lines[model].engines[engine].owed) if model is not None and there else set()

    def sync(self, engine: str, now: float) -> None:
        """What is free of an engine may have changed: those who run and are owed some come first."""
        model = self._model_of.get(engine)
        if self.growth.owes(engine) and engine not in self.closed:
            waits = None if model is None else self.lines[model].waits
            least = min(RequestClass) if waits is None else waits
            self.growth.settle(engine, lambda who, tokens: self._give(engine, who, tokens), least)
        if model is None:
            return
        line = self.lines[model]
        one = line.engines[engine]
        debt = max(self.growth.levels(engine), default=None)
        if debt != one.debt:
            one.debt = debt
            self._act(model, line.admission.on_kv_debt(engine, debt, now))
        told = self._told(engine, one, line.routers)
        if told == one.told:
            return
        one.told = told
        slots, tokens, lent_slots, lent_tokens, reserved = told
        self._act(model, line.admission.on_replica(engine, slots, now, tokens, (lent_slots, lent_tokens), reserved))

    def reclaim(self, now: float) -> None:
        """Have growth of lower classes given back where somebody waits, and pay what is owed where nobody does any
        more. O(engines on which somebody is owed something)."""
        for engine in self.growth.engines:
            model = self._model_of.get(engine)
            one = None if model is None else self.lines[model].engines[engine]
            if model is None or one is None:
                continue
            waits = self.lines[model].waits
            if one.reclaimed is not None and (waits is None or waits < one.reclaimed):
                one.reclaimed = None
                self.sync(engine, now)
                waits = self.lines[model].waits
            if waits is None or one.reclaimed is not None or min(self.growth.levels(engine), default=waits) >= waits:
                continue
            one.reclaimed = waits
            for router in self.accounts.routers(engine):
                self._say(router, Reclaim(engine, waits))

    def close(self, engines: frozenset[str], now: float) -> None:
        """It is not known what routers hold on these engines, and on no others."""
        changed, self.closed = self.closed ^ engines, engines
        for engine in sorted(changed):
            self.sync(engine, now)

    def recovering(self) -> frozenset[str]:
        """Models whose lines can grant nothing, since of what they have all is closed. O(engines)."""
        found = set()
        for model, line in self.lines.items():
            there = {
                name
                for name, one in line.engines.items()
                if one.open_to(line.routers) and slots_of(name) in self._ledger
            }
            if self.closed & line.engines.keys() and there <= self.closed:
                found.add(model)
        return frozenset(found)

    def tidy(self, model: str) -> None:
        """Forget engines that nobody reaches, and a line without routers."""
        line = self.lines[model]
        for engine in [name for name, one in line.engines.items() if not one.reached and not one.slots]:
            del line.engines[engine], self._model_of[engine]
            self._act(model, line.admission.on_replica_gone(engine, -math.inf))
        left = not line.routers and not line.engines
        if left and not any(request.model == model for request in self._requests.values()):
            del self.lines[model]
            self.touched.discard(model)

    def on_tick(self, now: float) -> None:
        """Time has passed."""
        for model, line in list(self.lines.items()):
            due = line.admission.next_due()
            if due is not None and due <= now:
                self._act(model, line.admission.on_tick(now))
            self.touched.add(model)

    def waiting(self, model: str) -> bool:
        """Whether somebody waits for a model."""
        return model in self.lines and self.lines[model].admission.waiting > 0

    def engines(self, model: str) -> list[str]:
        """The engines in a model's line."""
        return list(self.lines[model].engines) if model in self.lines else []

    def model_of(self, engine: str) -> str:
        """The model that an engine serves, by its routers' word; empty: nobody has said."""
        return self._model_of.get(engine, "")

    def line(self, model: str) -> Line:
        """The line of a model; a new one if there is none."""
        line = self.lines.get(model)
        if line is None:
            line = self.lines[model] = Line(Admission(UNTOLD))
        return line

    def promised(self) -> dict[str, tuple[int, float]]:
        """Slots and tokens that the lines take for free, by engine. O(engines)."""
        found: dict[str, tuple[int, float]] = {}
        for line in self.lines.values():
            found.update({name: line.admission.free_on(name) for name in line.engines})
        return found

    # Inside

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
        request = self._requests.pop(ticket)
        line = self.lines[request.model]
        self._act(request.model, line.admission.on_cancel(ticket, now), ended=ticket)
        self._requests[ticket] = request
        request.arrival = replace(request.arrival, accepted=True, avoid=self._avoid(request))
        self._act(request.model, line.admission.on_arrive(request.arrival, now, now - request.arrived_s))

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
        self.sync(one.engine, now)
        self.used(Usage(request.model, arrival.request_class, arrival.tenant, 1, arrival.prompt_tokens, 0))
        self._say(router, Grant(arrival.request_id, one.engine, now - request.arrived_s))

    def draw_anew(self, now: float) -> None:
        """A session's slot that has come back is that of the first who waits and whom its tokens are enough for."""
        freed, self.accounts.freed = self.accounts.freed, set()
        for lease in sorted(freed & self._short.keys()):
            for ticket in list(self._short[lease]):
                request, (slots, tokens) = self._requests.get(ticket), self.accounts.free(lease)
                one = self._sessions.of(lease)
                if one is None or not slots or one.engine in self.closed:
                    break
                if request is None or request.engine or one.engine in request.arrival.avoid:
                    continue
                drawn = request.drawn
                whole = replace(request.whole or request.arrival, avoid=request.arrival.avoid)
                if tokens + (0 if drawn is None else drawn.tokens) < whole.cost:
                    continue
                del self._requests[ticket]
                self._act(request.model, self.lines[request.model].admission.on_cancel(ticket, now), ended=ticket)
                self._requests[ticket] = request
                if drawn is not None:
                    self.accounts.give_back(request.router, lease, 0, drawn.tokens)
                request.arrival, request.whole, request.drawn = whole, None, None
                self._draw(request, now)
                self._has_place(request)

    def _has_place(self, request: Request) -> None:
        """A request runs, or has ended: it is short of nothing."""
        if request.short_of:
            waiting = self._short[request.short_of]
            del waiting[request.arrival.request_id]
            if not waiting:
                del self._short[request.short_of]
            request.short_of = ""

    def _undraw(self, routers: Iterable[str], leases: Sequence[str], now: float) -> None:
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
        self.growth.ended(ticket)
        self._has_place(request)
        if request.drawn is not None:
            self.accounts.give_back(request.router, request.drawn.lease, request.drawn.slots, request.drawn.tokens)
            self._sessions.touch(request.drawn.lease, now)
        if request.engine:
            self.accounts.give_back(request.router, request.engine, request.slots, request.tokens)
            self._release(request, now)
        return request

    def _act(self, model: str, actions: Iterable[Action], ended: str = "") -> None:
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
            self.sync(request.engine, now)

    def _told(self, engine: str, one: Engine, routers: set[str]) -> tuple[int, int, int, int, int]:
        if not one.open_to(routers) or engine in self.closed or slots_of(engine) not in self._ledger:
            return 0, 0, 0, 0, 0
        slots, tokens = self._ledger.limit(slots_of(engine)), self._ledger.limit(engine)
        free_slots, free_tokens = self.accounts.free(engine)
        lent = max(0, slots - free_slots - one.slots), max(0, tokens - free_tokens - one.tokens)
        return slots, tokens, *lent, self._sessions.reserved(engine)

    def _unreach(self, router: str, engine: Engine) -> None:
        engine.owed.discard(router)
        engine.reached.pop(router, None)
