"""What a router holds: its running requests' parts of its accounts, in whose name, and the credit it asks for.

A request that the router granted by itself has no ticket: what it held becomes credit when it ends, its use is told
in sums. One that the actor granted has one: what it held goes back with its end. A request that outlives the actor, or
the incarnation in which it was granted, counts as the first kind; what it has drawn of a session goes back as well.

Invariant: what is held of an engine, or of a session, is the sum of its requests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from serve_app.core.queue import Arrival
from serve_app.core.shared_queue.messages import (
    Action,
    Amount,
    Booked,
    Credit,
    Done,
    Drawn,
    Enough,
    Event,
    GiveBack,
    Grow,
    Grown,
    Hello,
    Left,
    Lent,
    Reach,
    Reclaim,
    SessionEnded,
    SessionOpened,
)
from serve_app.core.shared_queue.pending import Waiting
from serve_app.core.shared_queue.router_credit import Accounts
from serve_app.core.shared_queue.router_session import Link
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
        self.closing: dict[str, tuple[str, bool, bool] | None] = {}  # engines let go of, and what they became since
        self.sessions: dict[str, SessionOpened] = {}  # those that are open, by name

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._running

    def __len__(self) -> int:
        return len(self._running)

    def count(self, model: str) -> int:
        """How many run of a model."""
        return self._counts[model]

    def reach(self, model: str, engine: str, usable: bool, once: bool) -> None:
        """See `RemoteLine.reach`."""
        if engine in self.closing:
            self.closing[engine] = (model, usable, once)
        elif self._accounts.reach(model, engine, usable, once=once):
            self._link.put(Reach(model, engine, usable))
            self.touched.add(engine)

    def drop(self, engine: str) -> None:
        """An engine is gone, and what ran there is forgotten. O(requests)."""
        if engine in self.closing:
            self.closing[engine] = None
        if engine not in self._accounts:
            return
        for request_id in [one for one, run in self._running.items() if run.engine == engine]:
            self._forget(request_id)
        self.touched.discard(engine)
        self._accounts.drop(engine)
        self.closing[engine] = None
        self._link.put(Left(engine))

    def take(self, said: Action, now: float) -> None:
        """What the actor says of accounts, of what runs and of sessions."""
        match said:
            case Credit(engine, slots, tokens) if engine in self._accounts:
                self._accounts.add(engine, slots, tokens)
                self.touched.add(engine)
            case Lent(engine, slots, tokens, spare_slots, spare_tokens) if engine in self._accounts:
                self._accounts.add(engine, slots, tokens)
                self._accounts.answered(engine, spare_slots, spare_tokens, now)
                self.touched.add(engine)
            case Reclaim(engine, request_class):
                self._reclaim(engine, request_class)
            case Grown():
                self._grown(said)
            case SessionOpened(name):
                self.sessions[name] = said
            case SessionEnded(name, lease):
                if name in self.sessions and self.sessions[name].lease == lease:
                    del self.sessions[name]
            case Booked(short, sessions):
                self.sessions.clear()
                self.sessions.update((one.name, one) for one in sessions)
                for pool, slots, tokens in short:
                    if pool in self._accounts:
                        self._accounts.add(pool, -slots, -tokens)
                    else:
                        self._undraw(pool, slots, tokens)

    def balance(self, now: float, *, every: bool = False) -> None:
        """Give back credit and ask for it, on engines where it has changed."""
        contended = self._link.contended
        for engine in self._accounts.names() if every else sorted(self.touched):
            if self._accounts.model(engine) in self._link.recovering:
                continue
            back = self._accounts.surplus(engine, contended)
            wanted = self._accounts.ask(engine, contended, now) if back is None else None
            for event in (back, wanted):
                if event is not None:
                    self._link.put(event)
        self.touched.clear()

    def begin_here(self, waiting: Waiting) -> str | None:
        """Run a request on credit, of its session's engine or its affinity's if that has room; returns the engine, None
        where none has. O(sessions) for a request of one."""
        arrival = waiting.arrival
        affinity = arrival.affinity
        if arrival.session is not None:
            affinity = next((one.engine for one in self.sessions.values() if one.lease == arrival.session), affinity)
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

    def _owed(self) -> list[Grow]:
        """What was asked for and has not come, as it is to be said to an actor that does not know. O(requests)."""
        running = self._running.items()
        return [
            Grow(request_id, "", run.engine, run.owed, run.arrival.request_class)
            for request_id, run in running
            if run.owed
        ]

    def _reclaim(self, engine: str, above: RequestClass) -> None:
        """Give back what requests below a class have beyond their estimates; they are owed it. O(requests)."""
        for request_id, run in self._running.items():
            more, level = run.tokens - run.estimate, run.arrival.request_class
            if run.engine == engine and level < above and more > 0:
                self._accounts.hold(engine, 0, -more)
                run.tokens -= more
                run.owed += more
                self._link.put(Grow(request_id, run.ticket, engine, more, level, back=True))

    def _grown(self, said: Grown) -> None:
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

    def _undraw(self, lease: str, slots: int, tokens: int) -> None:
        """So much of what requests have drawn of a session is not ours any more: it may have ended. O(requests)."""
        for run in self._running.values():
            drawn = run.drawn
            if drawn is not None and drawn.lease == lease:
                less_slots, less_tokens = min(slots, drawn.slots), min(tokens, drawn.tokens)
                slots, tokens = slots - less_slots, tokens - less_tokens
                run.drawn = drawn._replace(slots=drawn.slots - less_slots, tokens=drawn.tokens - less_tokens)

    def drawn(self, waiting: Iterable[Drawn] = ()) -> tuple[Amount, ...]:
        """What requests that run have of sessions, and these of those who wait, by lease. O(requests)."""
        found: dict[str, tuple[int, int]] = {}
        for one in (*(run.drawn for run in self._running.values() if run.drawn is not None), *waiting):
            slots, tokens = found.get(one.lease, (0, 0))
            found[one.lease] = slots + one.slots, tokens + one.tokens
        return tuple(Amount(lease, *amounts) for lease, amounts in found.items())

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

    def restate(self, rules: Iterable[Event], *, good: bool) -> list[Event]:
        """What begins an incarnation: the actor does not know of these requests any more. `good`: the credit is ours
        still. O(requests + engines)."""
        self.closing.clear()
        for run in self._running.values():
            run.ticket = ""
        reached = (Reach(model, engine, usable) for engine, model, usable in self._accounts.engines())
        return [Hello(self._accounts.restate(good=good) + self.drawn()), *rules, *reached, *self._owed()]

    def _begin(self, run: Running) -> None:
        self._running[run.arrival.request_id] = run
        self._counts[run.model] += 1
        if self._accounts.was_last(run.engine) and self._accounts.reach(run.model, run.engine, False):
            self._link.put(Reach(run.model, run.engine, False))  # it closes behind the only one that it takes
            self.touched.add(run.engine)

    def _forget(self, request_id: str) -> None:
        model = self._running.pop(request_id).model
        self._counts[model] -= 1
        if not self._counts[model]:
            del self._counts[model]
