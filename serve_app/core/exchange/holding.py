"""What a router's running requests hold of its accounts, and in whose name.

A request that the router granted by itself has no ticket: what it held becomes credit when it ends, its use is told
in sums. One that the actor granted has one: what it held goes back with its end. A request that outlives the actor, or
the incarnation in which it was granted, counts as the first kind; what it has drawn of a session goes back as well.

Invariant: what is held of an engine, or of a session, is the sum of its requests.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from serve_app.core.exchange.credit import Accounts
from serve_app.core.exchange.link import Link
from serve_app.core.exchange.pending import Waiting
from serve_app.core.exchange.words import Done, Drawn, Enough, GiveBack, Grow, Grown
from serve_app.core.waiting.events import Arrival
from serve_app.types import RequestClass


@dataclass(slots=True)
class Running:
    """A request that runs. `slots` and `tokens`: what it holds of its engine, and `drawn` of its session. `ticket`: the
    actor's name for it; empty: it has none, or none any more."""

    model: str
    engine: str
    arrival: Arrival
    slots: int
    tokens: int
    estimate: int  # tokens with which it began
    ticket: str
    drawn: Drawn | None = None
    produced: int = 0  # output tokens so far
    reported: int = 0  # of these, told in sums
    owed: int = 0  # KV tokens that were asked for and have not come


class Holding:
    """Requests that run, by id. O(1) each but `drop`."""

    def __init__(self, accounts: Accounts, link: Link) -> None:
        self._accounts, self._link = accounts, link
        self._running: dict[str, Running] = {}
        self._counts: Counter[str] = Counter()  # by model
        self.touched: set[str] = set()  # engines whose credit has changed

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._running

    def __len__(self) -> int:
        return len(self._running)

    def count(self, model: str) -> int:
        """How many run of a model."""
        return self._counts[model]

    def begin_here(self, waiting: Waiting, affinity: str | None) -> str | None:
        """Run a request on credit, of this engine if it has room; returns the engine, None where none has."""
        arrival = waiting.arrival
        engine = self._accounts.choose(waiting.model, arrival.slots, arrival.cost, affinity)
        if engine is not None:
            self._accounts.take(engine, arrival.slots, arrival.cost)
            self.touched.add(engine)
            self._begin(Running(waiting.model, engine, arrival, arrival.slots, arrival.cost, arrival.cost, ""))
        return engine

    def begin_there(self, waiting: Waiting, engine: str) -> None:
        """The actor has granted a request; the account grows with what it holds."""
        arrival, drawn = waiting.arrival, waiting.drawn
        slots, tokens = (arrival.slots, arrival.cost) if drawn is None else drawn.rest(arrival)
        self._accounts.hold(engine, slots, tokens)
        self._begin(Running(waiting.model, engine, arrival, slots, tokens, tokens, waiting.ticket, drawn))

    def end(self, request_id: str, prompt_tokens: int | None, output_tokens: int | None) -> Running | None:
        """A request has ended after so many tokens (None: not known, its estimate counts); None: it did not run."""
        run = self._running.get(request_id)
        if run is None:
            return None
        self._forget(request_id)
        if prompt_tokens is None:
            prompt_tokens = run.arrival.prompt_tokens
        if output_tokens is None:
            output_tokens = max(0, run.arrival.cost_tokens - run.arrival.prompt_tokens)
        if run.ticket:
            self._accounts.hold(run.engine, -run.slots, -run.tokens)
            self._link.done(Done(run.ticket, prompt_tokens, output_tokens))
        else:
            if run.drawn is not None:
                self._link.put(GiveBack(run.drawn.lease, run.drawn.slots, run.drawn.tokens))
            self._accounts.put_back(run.engine, run.slots, run.tokens)
            self.touched.add(run.engine)
            self._link.used(run.model, run.arrival, 1, prompt_tokens, max(0, output_tokens - run.reported))
            if run.owed:
                self._link.put(Enough(request_id, run.engine))
        return run

    def produced(self, request_id: str) -> int:
        """Output tokens of a request so far; none of one that does not run."""
        run = self._running.get(request_id)
        return 0 if run is None else run.produced

    def progress(self, request_id: str, output_tokens: int) -> None:
        """A request has put out so many tokens more."""
        run = self._running.get(request_id)
        if run is None:
            return
        run.produced += output_tokens
        if run.ticket:
            self._link.progress(run.ticket, output_tokens)
        else:
            run.reported += output_tokens
            self._link.used(run.model, run.arrival, 0, 0, output_tokens)

    def grow(self, request_id: str, tokens: int) -> bool:
        """A request needs more KV tokens; False: they are asked for, and it has not got them yet."""
        run = self._running.get(request_id)
        if run is None:
            return False
        if not run.ticket and self._accounts.credit(run.engine)[1] >= tokens:
            self._accounts.take(run.engine, 0, tokens)
            run.tokens += tokens
            self.touched.add(run.engine)
            return True
        run.owed += tokens
        self._link.put(Grow(request_id, run.ticket, run.engine, tokens, run.arrival.request_class))
        return False

    def owed(self) -> list[Grow]:
        """What was asked for and has not come, as it is to be said to an actor that does not know. O(requests)."""
        running = self._running.items()
        return [
            Grow(request_id, "", run.engine, run.owed, run.arrival.request_class)
            for request_id, run in running
            if run.owed
        ]

    def reclaim(self, engine: str, above: RequestClass) -> None:
        """Give back what requests below a class have beyond their estimates; they are owed it. O(requests)."""
        for request_id, run in self._running.items():
            more, level = run.tokens - run.estimate, run.arrival.request_class
            if run.engine == engine and level < above and more > 0:
                self._accounts.hold(engine, 0, -more)
                run.tokens -= more
                run.owed += more
                self._link.put(Grow(request_id, run.ticket, engine, more, level, back=True))

    def grown(self, said: Grown) -> None:
        """The actor has given a request more."""
        run = self._running.get(said.request_id)
        if run is not None and run.drawn is not None and (run.drawn.lease, run.ticket) == (said.engine, said.ticket):
            run.drawn = run.drawn._replace(tokens=run.drawn.tokens + said.tokens)
            run.owed -= said.tokens
        elif run is not None and (run.engine, run.ticket) == (said.engine, said.ticket):
            self._accounts.hold(said.engine, 0, said.tokens)
            run.tokens += said.tokens
            run.owed -= said.tokens
        elif not said.ticket and said.engine in self._accounts:  # else its end, said later, has given that back, too
            self._accounts.add(said.engine, 0, said.tokens)
            self.touched.add(said.engine)

    def undraw(self, lease: str, slots: int, tokens: int) -> None:
        """So much of what requests have drawn of a session is not ours any more: it may have ended. O(requests)."""
        for run in self._running.values():
            drawn = run.drawn
            if drawn is not None and drawn.lease == lease:
                less_slots, less_tokens = min(slots, drawn.slots), min(tokens, drawn.tokens)
                slots, tokens = slots - less_slots, tokens - less_tokens
                run.drawn = drawn._replace(slots=drawn.slots - less_slots, tokens=drawn.tokens - less_tokens)

    def drawn(self) -> list[Drawn]:
        """What is held of sessions. O(requests)."""
        return [run.drawn for run in self._running.values() if run.drawn is not None]

    def places(self) -> dict[str, Running]:
        """Every request that runs, by its id."""
        return dict(self._running)

    def recount(self) -> list[str]:
        """Have each engine's account hold what its requests do; returns engines where that was another amount.
        O(requests + engines)."""
        held = {engine: [0, 0] for engine in self._accounts.names()}
        for run in self._running.values():
            held[run.engine][0] += run.slots
            held[run.engine][1] += run.tokens
        wrong = [engine for engine, sums in held.items() if tuple(sums) != self._accounts.held(engine)]
        for engine in wrong:
            slots, tokens = self._accounts.held(engine)
            self._accounts.hold(engine, held[engine][0] - slots, held[engine][1] - tokens)
        return wrong

    def drop(self, engine: str) -> None:
        """An engine is gone, and what ran there is forgotten. O(requests)."""
        for request_id in [one for one, run in self._running.items() if run.engine == engine]:
            self._forget(request_id)
        self.touched.discard(engine)

    def forget_tickets(self) -> None:
        """The actor does not know of these requests any more."""
        for run in self._running.values():
            run.ticket = ""

    def _begin(self, run: Running) -> None:
        self._running[run.arrival.request_id] = run
        self._counts[run.model] += 1

    def _forget(self, request_id: str) -> None:
        model = self._running.pop(request_id).model
        self._counts[model] -= 1
        if not self._counts[model]:
            del self._counts[model]
