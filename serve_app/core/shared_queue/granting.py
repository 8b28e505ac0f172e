"""What the queues of all models may grant, and to whom: `Admission` bound to what the ledger has free.

Rules
- What nobody has of an engine is the queue's: its free slots and KV tokens in the ledger.
- An engine is in a queue while some router of the model says that it can reach it.
- While nobody waits, half of an engine is divided among the routers as credit; the rest is for who asks.
- An engine that was taken for gone and is there is used again once whoever had something there has said what; so is one
  that is closed, where that is not known since the actor's own death.

Invariant: what a queue may grant on an engine is free there in the ledger.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from serve_app.core.memory import Ledger, Sessions, slots_of
from serve_app.core.queue import Admission, Policy
from serve_app.core.shared_queue.actor_credit import Accounts
from serve_app.core.shared_queue.kv_debt import Grower, Growth
from serve_app.core.shared_queue.messages import Action as Said
from serve_app.core.shared_queue.messages import Credit, Enough, Grow, Grown, Lent, Reclaim
from serve_app.core.shared_queue.model_state import Engine, Line
from serve_app.core.shared_queue.requests import Requests
from serve_app.errors import InsufficientMemory, LeaseConflict, LeaseNotFound
from serve_app.types import RequestClass


class Places:
    """The queues, by model, and the engines in them. O(log n) per event, save where it is said.

    Args:
        ledger: with the engines and their slots.
        sessions: those that are open.
        say: tells a router something.
        accounts: what routers have of it.
    """

    def __init__(
        self, ledger: Ledger, sessions: Sessions, say: Callable[[str, Said], None], accounts: Accounts
    ) -> None:
        self._ledger, self._sessions, self._say, self.accounts = ledger, sessions, say, accounts
        self.growth = Growth()
        self.requests = Requests(accounts, sessions, self.growth, say, self.sync)
        self.lines = self.requests.lines
        self._model_of: dict[str, str] = {}  # engines, by their routers' word

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
        calm = (
            calm
            and engine not in self.requests.closed
            and not self.growth.owes(engine)
            and not line.admission.contended
        )
        if calm and line.open(engine):
            more = self.accounts.lend(router, engine, spare, had)
            self.sync(engine, now)
        self._say(router, Lent(engine, *more, *spare))

    def grow(self, router: str, event: Grow, now: float) -> None:
        """A running request outgrows its estimate: it is given what its session has, and what is kept for that, or owed
        it."""
        request, tokens = self.requests.get(event.ticket), event.tokens
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
        request = self.requests.get(who.ticket)
        if request is not None:
            request.tokens += tokens
        self._say(who.router, Grown(who.request_id, who.ticket, engine, tokens))
        return True

    # Routers

    def forget(self, routers: Sequence[str], now: float) -> None:
        """Incarnations are over: who waits for them is gone, and what runs is in their accounts alone."""
        for engine in self.growth.forget(routers):
            self.sync(engine, now)
        self.requests.forget(routers, now)

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
        self.requests.act(model, line.admission.on_policy(policy, now))
        line.avoids.clear()
        for engine in list(line.engines):
            self.sync(engine, now)

    def reach(self, router: str, model: str, engine: str, usable: bool, now: float) -> None:
        """Whether a router can hand requests to an engine. O(requests of the router) where it can again."""
        line = self.requests.line(model)
        self._model_of[engine] = model
        line.engines.setdefault(engine, Engine()).reached[router] = usable
        line.avoids.clear()
        self.sync(engine, now)
        if usable:
            self.requests.come_in_again(router, model, now)

    def left(self, router: str, engine: str, now: float) -> None:
        """A router is done with an engine, and with all that it had there. O(requests of the router)."""
        self.requests.left(router, engine, now)
        self.growth.left(engine, router)
        self.requests.undraw([router], self._sessions.on(engine), now)
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
        self.requests.drop_engine(engine, had)
        model = self._model_of.get(engine)
        if model is None:
            self.requests.undraw(had, leases, now)
            return
        one = self.lines[model].engines[engine]
        one.slots, one.tokens, one.told = 0, 0, None
        one.owed |= had.keys()
        one.reached = {router: usable for router, usable in one.reached.items() if usable or router in had}
        self.lines[model].avoids.clear()
        self.requests.act(model, self.lines[model].admission.on_replica_gone(engine, now))
        self.requests.undraw(had, leases, now)
        self.tidy(model)

    def owing(self, engine: str) -> set[str]:
        """Routers that have to say anew what runs on an engine that was taken for gone, and is there."""
        model = self._model_of.get(engine)
        there = model is not None and slots_of(engine) in self._ledger
        return set(self.lines[model].engines[engine].owed) if model is not None and there else set()

    def sync(self, engine: str, now: float) -> None:
        """What is free of an engine may have changed: those who run and are owed some come first."""
        model = self._model_of.get(engine)
        if self.growth.owes(engine) and engine not in self.requests.closed:
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
            self.requests.act(model, line.admission.on_kv_debt(engine, debt, now))
        told = self._told(engine, one, line.routers)
        if told == one.told:
            return
        one.told = told
        slots, tokens, lent_slots, lent_tokens, reserved = told
        self.requests.act(
            model, line.admission.on_replica(engine, slots, now, tokens, (lent_slots, lent_tokens), reserved)
        )

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
        changed, self.requests.closed = self.requests.closed ^ engines, engines
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
            if self.requests.closed & line.engines.keys() and there <= self.requests.closed:
                found.add(model)
        return frozenset(found)

    def tidy(self, model: str) -> None:
        """Forget engines that nobody reaches, and a line without routers."""
        line = self.lines[model]
        for engine in [name for name, one in line.engines.items() if not one.reached and not one.slots]:
            del line.engines[engine], self._model_of[engine]
            self.requests.act(model, line.admission.on_replica_gone(engine, -math.inf))
        left = not line.routers and not line.engines
        if left and not self.requests.serves(model):
            del self.lines[model]
            self.requests.touched.discard(model)

    def on_tick(self, now: float) -> None:
        """Time has passed."""
        for model, line in list(self.lines.items()):
            due = line.admission.next_due()
            if due is not None and due <= now:
                self.requests.act(model, line.admission.on_tick(now))
            self.requests.touched.add(model)

    def engines(self, model: str) -> list[str]:
        """The engines in a model's line."""
        return list(self.lines[model].engines) if model in self.lines else []

    def model_of(self, engine: str) -> str:
        """The model that an engine serves, by its routers' word; empty: nobody has said."""
        return self._model_of.get(engine, "")

    # Inside

    def _told(self, engine: str, one: Engine, routers: set[str]) -> tuple[int, int, int, int, int]:
        if not one.open_to(routers) or engine in self.requests.closed or slots_of(engine) not in self._ledger:
            return 0, 0, 0, 0, 0
        slots, tokens = self._ledger.limit(slots_of(engine)), self._ledger.limit(engine)
        free_slots, free_tokens = self.accounts.free(engine)
        lent = max(0, slots - free_slots - one.slots), max(0, tokens - free_tokens - one.tokens)
        return slots, tokens, *lent, self._sessions.reserved(engine)

    def _unreach(self, router: str, engine: Engine) -> None:
        engine.owed.discard(router)
        engine.reached.pop(router, None)
