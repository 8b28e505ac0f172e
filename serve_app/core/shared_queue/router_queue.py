"""The line as a router sees it: it grants from credit at once while nobody waits, and asks the quota actor else.

The same style as `core.queue.admission`: events in, `Grant` and `Refuse` out, by the request's own id. A shell carries
`next_exchange` and `watch` to the quota actor and the answers back to `on_reply`.

Rules
- A request is granted here if its model is not contended by the actor's last word, none of this router's own waits,
  and some engine's credit has room; else it is handed in, and the actor's order counts.
- A request of a session is handed in whenever the actor is there: its place is granted where all routers' are. Which
  sessions are open the actor tells; while it is away its last word counts, and such a request runs on credit of its
  session's engine.
- The actor is away from the first call that fails until its next answer. Meanwhile the router grants to who waits by
  class, then by age, from the credit it has. Who was handed in is withdrawn then, so nobody is granted twice.
- Nothing begins later than `FENCE_S` after the last word that was answered was sent: the credit may be another's. It is
  not claimed from the next actor, either.
- A new epoch, or an incarnation the actor does not know: the router says what it has and hands in again who waits, with
  the time already waited.
- Requests are handed in as what was said before is acknowledged, higher classes first. While the actor is away no more
  wait here than the model's own bounds allow.
- The actor's last figures refuse who cannot be served in time, or finds the line full, without a question.

Invariant: every arrival ends as exactly one of granted, refused, cancelled while waiting, or still waits.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import replace

from serve_app.core.memory import FENCE_S
from serve_app.core.queue import Action, Arrival, Grant, Policy, QueueStatus, Reason, Refuse
from serve_app.core.shared_queue.delivery import Exchange, Reply
from serve_app.core.shared_queue.early_refusal import Outlook
from serve_app.core.shared_queue.in_flight import Holding
from serve_app.core.shared_queue.messages import (
    UNTOLD,
    Amount,
    Arrive,
    Cancel,
    Closed,
    Done,
    Drawn,
    Look,
    Reach,
    Rules,
    Stands,
)
from serve_app.core.shared_queue.messages import Action as Said
from serve_app.core.shared_queue.pending import Pending, Waiting
from serve_app.core.shared_queue.router_credit import Accounts
from serve_app.core.shared_queue.router_session import Link
from serve_app.types import RequestClass

LATE_S = 0.5  # past the end of a wait: the actor's own refusal comes before that


class RemoteLine:
    """The lines of all models, for one router.

    Args:
        router: its name, unique among routers.
        incarnation: at least the last one this name has had.
    """

    def __init__(self, router: str, incarnation: int = 0) -> None:
        self._link = Link(router, incarnation)
        self._router = router
        self._accounts = Accounts()
        self._policies: dict[str, Policy] = {}
        self._pending = Pending()
        self._running = Holding(self._accounts, self._link)
        self._numbers = itertools.count(1)
        self._outlook = Outlook(self._link, self._policies)
        self._good_until = -math.inf
        self.alone = True  # the actor does not answer, or has not booked yet what this router has
        self.granted_here = 0  # counters
        self.granted_there = 0
        self._odd: dict[str, object] = {}  # requests that were not the same on both sides at the last look
        self.sessions = self._running.sessions  # those that are open, by name
        self._begin(0, 0.0)

    def serve(self, model: str, policy: Policy) -> None:
        """The router serves this model, with these bounds."""
        self._policies[model] = policy
        self._link.put(Rules(model, policy))

    def retire(self, model: str) -> None:
        """It does so no more; who waits for it has been told."""
        if self._policies.pop(model, None) is not None:
            self._link.put(Rules(model, None))

    def reach(self, model: str, engine: str, usable: bool, now: float, *, once: bool = False) -> list[Action]:
        """An engine is there, and requests can be handed to it or not at the moment; `once`: one, and no more until
        this is said again."""
        self._running.reach(model, engine, usable, once)
        return self._serve_alone(now, model)

    def drop(self, engine: str) -> None:
        """An engine is gone, and what ran there is forgotten; such a request may arrive again by its id."""
        self._running.drop(engine)

    def decides(self, model: str) -> bool:
        """Whether this router grants by itself to who waits: the actor is away, or does not know yet what all routers
        hold of this model's engines."""
        return self.alone or model in self._link.recovering

    # Requests

    def on_arrive(self, model: str, arrival: Arrival, now: float) -> list[Action]:
        """A request asks for a place. ValueError: one of this id waits or runs already."""
        if arrival.request_id in self._pending or arrival.request_id in self._running:
            raise ValueError(f"{arrival.request_id!r} waits or runs already")
        if arrival.deadline is not None and arrival.deadline <= now:
            return [self._outlook.refusal(model, arrival, Reason.DEADLINE)]
        waiting = Waiting(model, arrival, now)
        alone = self.decides(model)
        if arrival.session is not None and not alone:
            self._wait(waiting, now)
            return []
        if not self._pending.count(model) and (alone or model not in self._link.contended):
            granted = self._grant_here(waiting, now)
            if granted is not None:
                self._balance(now)
                return [granted]
        if not alone:
            reason = self._outlook.hopeless(model, arrival, now)
        else:
            full = self._pending.full(model, self._policies.get(model, UNTOLD), arrival.request_class)
            reason = Reason.QUEUE_FULL if full and not arrival.accepted else None
        if reason is not None:
            return [self._outlook.refusal(model, arrival, reason)]
        self._wait(waiting, now)
        return self._serve_alone(now, model)

    def on_cancel(self, request_id: str, now: float) -> list[Action]:
        """The caller is gone, waiting or running; what it has produced counts. An unknown id changes nothing."""
        if self._withdraw(request_id) is None:
            return self.on_done(request_id, now, None, self._running.produced(request_id))
        return []

    def on_done(
        self, request_id: str, now: float, prompt_tokens: int | None = None, output_tokens: int | None = None
    ) -> list[Action]:
        """A granted request has ended after so many tokens; None: not known, its estimate counts.

        An unknown id, or one that waits, changes nothing.
        """
        run = self._running.end(request_id, prompt_tokens, output_tokens)
        if run is None or run.ticket:
            return []
        actions = self._serve_alone(now, run.model)
        self._balance(now)
        return actions

    def on_progress(self, request_id: str, output_tokens: int) -> None:
        """A request has put out so many tokens more."""
        self._running.progress(request_id, output_tokens)

    def grow(self, request_id: str, tokens: int) -> bool:
        """A running request needs more KV tokens; False: they are asked for, and it has not got them yet."""
        return self._running.grow(request_id, tokens)

    def on_tick(self, now: float) -> list[Action]:
        """Time has passed: refuses who has waited too long, be it for an answer."""
        actions: list[Action] = []
        while (late := self._pending.late(now)) is not None:
            self._withdraw(late.request_id)
            deadline = late.arrival.deadline
            served = any(usable for _, model, usable in self._accounts.engines() if model == late.model)
            reason = Reason.TIMEOUT if served else Reason.NO_REPLICA
            if deadline is not None and deadline <= now:
                reason = Reason.DEADLINE
            actions.append(self._outlook.refusal(late.model, late.arrival, reason))
        return actions

    def next_due(self) -> float | None:
        """The moment for the next `on_tick`; None while nothing can come due."""
        return self._pending.next_due()

    def waiting(self, model: str) -> int:
        """This router's requests in the line of a model."""
        return self._pending.count(model)

    def waiting_by_class(self, model: str) -> dict[RequestClass, int]:
        """The same by the class they claimed."""
        return self._pending.by_class(model)

    def running_of(self, model: str) -> int:
        """This router's requests of a model that hold a place."""
        return self._running.count(model)

    @property
    def running(self) -> int:
        """Requests that hold a place."""
        return len(self._running)

    def ahead(self, model: str, request_class: RequestClass) -> tuple[tuple[RequestClass, int], ...]:
        """How many wait that a request of this class would stand behind, by the class they claimed: of all routers by
        the actor's last figures, of this one where these are older."""
        return self._outlook.ahead(model, request_class, self._pending.by_class(model))

    def status(self, request_id: str) -> QueueStatus | None:
        """Where a request stands by the actor's last answer, and ask it again; before there is one, by its last
        figures. None: it does not wait."""
        waiting = self._pending.get(request_id)
        if waiting is None:
            return None
        if waiting.ticket and not waiting.looks and self._link.room:
            waiting.looks = True
            self._link.put(Look(waiting.ticket))
        if waiting.status is not None:
            return waiting.status
        level = waiting.arrival.request_class
        ahead = sum(count for _, count in self.ahead(waiting.model, level))  # it is among them
        start_s = self._outlook.wait_s(waiting.model, level, waiting.arrival.tenant, waiting.arrival.slots)
        return QueueStatus(request_id, level, max(1, ahead), start_s)

    @property
    def epoch(self) -> int:
        """The quota actor's, as far as it is known."""
        return self._link.epoch

    @property
    def blocked(self) -> Mapping[str, int]:
        """Engines that wait for memory, by model."""
        return self._link.blocked

    @property
    def booked(self) -> bool:
        """Whether the actor has said what the accounts are, since this router last said everything."""
        return self._link.booked

    @property
    def contended(self) -> bool:
        """Whether requests of some model wait, by the actor's last word."""
        return bool(self._link.contended)

    @property
    def has_sums(self) -> bool:
        """See `Link.has_sums`."""
        return self._link.has_sums

    def next_exchange(self, now: float, *, beat: bool = False) -> Exchange | None:
        """What is to be said now; None: nothing that waits for no beat. `beat`: say that the router is there, and what
        its requests have used."""
        if self._link.too_far_behind:
            self._begin(self._link.epoch, now)
        self._balance(now, every=beat)
        return self._link.next_exchange(beat=beat)

    def reconcile(self, alive: Mapping[str, bool], now: float) -> tuple[list[Action], list[str], list[str]]:
        """At a beat: have this line, the process it is in and the actor agree about who waits and what is held.

        Args:
            alive: the requests that live in this process, and whether each of them holds a place.

        Returns:
            What follows; requests that are known on one side only, or as something else there, at two beats in a row,
            and so were ended here; and engines whose sums were not those of their requests. O(requests).
        """
        known: dict[str, object] = {**self._pending.places(), **self._running.places()}
        ours = {request_id: request_id in self._running for request_id in known}
        odd = {one: known.get(one) for one in known.keys() | alive.keys() if ours.get(one) is not alive.get(one)}
        lost = [one for one, what in odd.items() if one in self._odd and self._odd[one] is what]
        self._odd = odd
        actions = [action for request_id in lost for action in self.on_cancel(request_id, now)]
        wrong = self._running.recount()
        drawn = self._running.drawn(self._pending.drawn())
        self._link.held(self._accounts.holds() + drawn, self._accounts.wholes() + drawn)
        return actions, lost, wrong

    def account(self, engine: str) -> tuple[int, Amount]:
        """Slots that requests hold on an engine, and this router's account there by the actor's last word."""
        return self._accounts.held(engine)[0], self._link.accounts.get(engine, Amount(engine, 0, 0))

    def watch(self) -> Exchange:
        """The standing question for what is decided later."""
        return self._link.watch()

    def on_lost(self, now: float) -> list[Action]:
        """A call to the actor has failed or was not answered in time; it may have got through all the same."""
        self._link.lost()
        self.alone = True
        return self._serve_alone(now, *self._pending.models())

    def on_reply(self, reply: Reply, sent_at: float, now: float) -> list[Action]:
        """The answer to what was sent at that moment, the watch's included."""
        link = self._link
        if link.outdated(reply):
            return []
        if link.begins(reply):
            self._begin(reply.epoch, now)
            return []
        if now >= sent_at + FENCE_S:
            return self.on_lost(now)
        before = link.contended, link.recovering
        actions = [action for said in link.heard(reply) for action in self._take(said, now)]
        if link.booked:
            self._good_until = max(self._good_until, sent_at + FENCE_S)
        self._outlook.heard(sent_at, reply.ack)
        self.alone = not link.booked
        actions += self._serve_alone(now, *self._pending.models())
        if self.alone:
            return actions
        for waiting in self._pending.not_handed_in(link.room, self.decides):
            self._hand_in(waiting, now)
        self._balance(now, every=(link.contended, link.recovering) != before)
        return actions

    def _begin(self, epoch: int, now: float) -> None:
        """Say everything anew."""
        self._pending.forget_tickets()
        self._outlook.begin()
        self.alone = True
        rules = [Rules(model, policy) for model, policy in self._policies.items()]
        self._link.begin(epoch, self._running.restate(rules, good=now < self._good_until))

    def _take(self, said: Said, now: float) -> list[Action]:
        match said:
            case Grant(ticket, engine, _):
                return self._granted(ticket, engine, now)
            case Refuse(ticket, reason, retry_after_s):
                waiting = self._pending.take(ticket)
                if waiting is not None:
                    return [Refuse(waiting.request_id, reason, retry_after_s)]
            case Stands(status):
                self._pending.stands(status.request_id, status)
            case Drawn():
                self._pending.drew(said)
            case Closed(engine):
                again = self._running.closing.pop(engine, None)
                if again is not None:
                    return self.reach(again[0], engine, again[1], now, once=again[2])
            case _:
                self._running.take(said, now)
        return []

    def _granted(self, ticket: str, engine: str, now: float) -> list[Action]:
        waiting = self._pending.take(ticket)
        if waiting is None:
            return []  # withdrawn; what it was granted comes back with that
        arrival = waiting.arrival
        if not self._accounts.usable(engine):
            if engine not in self._accounts and engine not in self._running.closing:
                self._link.put(Reach(waiting.model, engine, False))  # else the actor has heard so, or is about to
            self._link.done(Done(ticket, 0, 0))
            again = replace(arrival, accepted=True, session=None)
            self._wait(Waiting(waiting.model, again, waiting.arrived_s), now)
            return []
        self._running.begin_there(waiting, engine)
        self.granted_there += 1
        return [Grant(arrival.request_id, engine, now - waiting.arrived_s)]

    def _grant_here(self, waiting: Waiting, now: float) -> Grant | None:
        """Grant from credit; None: there is none, or it may be another's by now."""
        if now >= self._good_until:
            return None
        engine = self._running.begin_here(waiting)
        if engine is None:
            return None
        self.granted_here += 1
        return Grant(waiting.request_id, engine, now - waiting.arrived_s)

    def _serve_alone(self, now: float, *models: str) -> list[Action]:
        """Grant to who waits, in order, while the actor cannot."""
        actions: list[Action] = []
        for model in models:
            while self.decides(model) and (first := self._pending.first(model)) is not None:
                granted = self._grant_here(first, now)
                if granted is None:
                    break
                self._withdraw(first.request_id)
                actions.append(granted)
        return actions

    def _wait(self, waiting: Waiting, now: float) -> None:
        due = waiting.arrived_s + self._policies.get(waiting.model, UNTOLD).max_wait_s
        deadline = waiting.arrival.deadline
        self._pending.add(waiting, (due if deadline is None else min(due, deadline)) + LATE_S)
        if not self.decides(waiting.model) and self._link.room:
            self._hand_in(waiting, now)

    def _hand_in(self, waiting: Waiting, now: float) -> None:
        ticket = f"{self._router}:{next(self._numbers)}"
        deadline = waiting.arrival.deadline
        left_s = None if deadline is None else deadline - now
        arrival = replace(waiting.arrival, request_id=ticket, deadline=left_s)
        self._pending.hand_in(waiting, ticket)
        number = self._link.put(Arrive(waiting.model, arrival, now - waiting.arrived_s))
        self._outlook.handed_in(number, waiting.model, arrival)

    def _withdraw(self, request_id: str) -> Waiting | None:
        """Somebody waits no more, by our own doing."""
        waiting = self._pending.remove(request_id)
        if waiting is not None and waiting.ticket:
            self._link.put(Cancel(waiting.ticket))
        return waiting

    def _balance(self, now: float, *, every: bool = False) -> None:
        if not self.alone:
            self._running.balance(now, every=every)
