"""The states of both ends of the queue's protocol, as tables of (state, event) -> state. Pure.

A router's session with the actor, a request in its router, a request at the actor, a router at the actor.
`docs/explanation/architecture.md` shows these tables; `python -m tests.states_table` writes them there.

A state is kept once: a request's is where its id or ticket is known (`RouterQueue.state_of`, `ActorRequests.state_of`).
Both ends ask these tables before they act, which takes a few hashes of strings an event: the enums are strings since a
hash of a plain `Enum` calls a Python function.

Invariant: an event of this side that is in no row of its state is a fault of this code, and raises. A message of the
other side that is in none is illegal: only a faulty peer sends it. It raises, too, which ends what the message is about
(`.applied_events`, `.applied_actions`), and changes nothing else.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Any, Generic, NamedTuple, TypeVar

from serve_app.core.queue import Grant, Preempt, QueueStatus, Refuse
from serve_app.core.shared_queue import messages


class OwnEvent(enum.StrEnum):
    """What this side does, or what its callers and timers do."""


class PeerEvent(enum.StrEnum):
    """A message of the other side; the value has the name of its class, if that alone tells it."""


class UnexpectedEvent(Exception):
    """An event of this side in a state that does not have it."""


class RouterSessionState(enum.StrEnum):
    """A router's session with the actor."""

    NEW = "the actor has not booked its accounts; else as ALONE"
    BOOKED = "the actor answers, and has booked its accounts"
    ALONE = (
        "a call has failed since the last answer. Waiting requests are granted on credit, by class, then age, until "
        "`FENCE_S` after the last answered message was sent"
    )


class RouterSessionStep(OwnEvent):
    LOST = "a call fails, or is answered later than `FENCE_S`"
    RENEWED = "more than `MAX_UNACKED_EVENTS` wait, or an account of a limit is unsure"


class RouterSessionReply(PeerEvent):
    BOOKED = "`Booked`"
    OTHER = "another reply"
    STALE = "a stale reply, or one of a newer epoch"
    OLD = "a reply of an older epoch or incarnation"


class RequestState(enum.StrEnum):
    """A request in its router."""

    WAITING = "has no ticket"
    SUBMITTED = "waits at the actor, under a ticket"
    RUNNING = "has slots and KV tokens of an engine"
    ENDED = "not known any more"


class RequestStep(OwnEvent):
    ARRIVED = "arrives"
    SUBMITTED = "the actor answers and the window of events is not full"
    BEGUN = "credit suffices: no request waits before it, or ALONE"
    REFUSED = "overdue, or refused early"
    CANCELLED = "its caller is gone"
    STATUS = "its caller asks for its position"
    PROGRESS = "it produces tokens"
    GROWN = "it needs more KV tokens"
    UNREACHED = "the router does not reach the engine that it was granted"
    DONE = "it ends"
    RECLAIMED = "a higher class waits for its engine (`Reclaim`)"
    DROPPED = "its engine is gone"
    INCARNATION = "the router begins a new incarnation"


class RequestAction(PeerEvent):
    GRANT = "`Grant`"
    REFUSE = "`Refuse`"
    STATUS = "`QueueStatus`"
    PREEMPT = "`Preempt`"
    TOKENS = "`KvTokenGrant`"


class TicketState(enum.StrEnum):
    """A request at the actor."""

    POSTPONED = "waits until its model has recovered"
    WAITING = "is in its model's queue"
    RUNNING = "has slots and KV tokens, charged to its router's account"
    ENDED = "not known any more"


class TicketStep(OwnEvent):
    RECOVERED = "its model has recovered"
    GRANTED = "the queue grants it"
    UNREACHED = "the queue grants it an engine that its router does not reach"
    REFUSED = "the queue refuses it, or its event has failed"
    STOPPED = "it stops for others"
    PAID = "KV tokens that it is owed are free"
    ENGINE_GONE = "its engine is gone"
    ROUTER_GONE = "the incarnation of its router ends"


class TicketEvent(PeerEvent):
    ARRIVE = "`Arrive`"
    POSTPONED = "`Arrive` while its model recovers"
    BEGAN = "`Began`"
    CANCEL = "`Cancel`"
    DONE = "`Done`"
    PROGRESS = "`TokenProgress`"
    TOKENS = "`KvTokenRequest`"
    STATUS = "`StatusRequest`"


class RouterState(enum.StrEnum):
    """A router at the actor."""

    UNKNOWN = "has no session; what its account holds stays booked for a while"
    KNOWN = "has a session"


class RouterCheck(OwnEvent):
    UNRESPONSIVE = "acknowledges nothing for `UNRESPONSIVE_S`"
    UNSURE = "its account differs, or an event of it that is no arrival has failed"
    SILENT = "no message for `OWNER_TTL_S`, or its process is gone from its node"


class RouterEvent(PeerEvent):
    FIRST = "`Hello`, as event 1 of a new incarnation"
    LATE = "a message of another incarnation, or one that acknowledges what was never sent"
    MODEL = "`ModelPolicy`"
    STORE = "`StoreAddress`"
    REACHABILITY = "`EngineReachability`"
    DROPPED = "`EngineDropped`"
    USAGE = "`CreditUsage`"
    GIVE_BACK = "`GiveBack`"
    CREDIT = "`CreditRequest`"
    REPORT = "`AccountReport`"


S = TypeVar("S", bound=enum.StrEnum)


class Transition(NamedTuple, Generic[S]):
    """Events with one effect. `states`: in which they occur; empty: before the first one. `then`: None: it stays."""

    states: tuple[S, ...]
    events: tuple[OwnEvent | PeerEvent, ...]
    then: S | None
    effect: str


class StateTable(Generic[S]):
    """The states of one thing, and the events that change them. O(1)."""

    def __init__(
        self, title: str, states: type[S], kinds: tuple[type[OwnEvent], type[PeerEvent]], rows: Iterable[Transition[S]]
    ) -> None:
        self.title = title
        self.states = states
        self.events = [event for kind in kinds for event in kind]
        self.rows = tuple(rows)
        self._then = {
            (state, event): row.then or state for row in self.rows for state in row.states for event in row.events
        }

    def is_illegal(self, state: S, event: PeerEvent) -> bool:
        """Whether only a faulty peer sends this in this state."""
        return (state, event) not in self._then

    def require(self, state: S, event: OwnEvent | PeerEvent) -> None:
        """Raises UnexpectedEvent: the event is in no row of this state."""
        if (state, event) not in self._then:
            raise UnexpectedEvent(f"{self.title}: {event.value!r} while {state.name}")

    def after(self, state: S, event: OwnEvent | PeerEvent) -> S:
        """The state after an event; the same one after an illegal one of the other side.

        Raises:
            UnexpectedEvent: this side has no such event in this state.
        """
        if isinstance(event, OwnEvent):
            self.require(state, event)
        return self._then.get((state, event), state)


def _router_session_rows() -> Iterable[Transition[RouterSessionState]]:
    new, booked, alone = RouterSessionState
    step = RouterSessionStep
    reply = RouterSessionReply
    known = "`CreditChange`, `CreditGrant`, `Reclaim`, `SessionEntry`, `SessionEnded`, `EngineDropAcknowledged`"
    renewed = "a new incarnation: reports accounts, policies and running requests"
    return (
        Transition((new,), (reply.BOOKED,), booked, "waiting requests are submitted"),
        Transition((new,), (reply.OTHER,), None, "nothing but its state and figures"),
        Transition((new, alone), (step.LOST,), None, "events are sent again"),
        Transition((booked,), (step.LOST,), alone, "the same"),
        Transition(
            (booked, alone), (reply.OTHER,), booked, f"{known} and those of requests are applied, in order, each once"
        ),
        Transition(tuple(RouterSessionState), (step.RENEWED, reply.STALE), new, renewed),
        Transition(tuple(RouterSessionState), (reply.OLD,), None, "ignored"),
    )


def _request_rows() -> Iterable[Transition[RequestState]]:
    waiting, submitted, running, ended = RequestState
    step = RequestStep
    action = RequestAction
    left = (action.GRANT, action.REFUSE, action.STATUS, action.PREEMPT)
    more = "`KvTokenRequest` with `reclaimed`: tokens beyond its estimate return"
    return (
        Transition((), (step.ARRIVED,), waiting, ""),
        Transition((waiting,), (step.SUBMITTED,), submitted, "`Arrive`"),
        Transition(
            (waiting, submitted), (step.BEGUN,), running, "`Began`, with the next message; if submitted, `Cancel`"
        ),
        Transition((waiting, submitted), (step.REFUSED, step.CANCELLED), ended, "if submitted, `Cancel`"),
        Transition((waiting, submitted), (step.STATUS,), None, "by the last figures; if submitted, `StatusRequest`"),
        Transition((waiting, submitted), (step.INCARNATION,), waiting, "keeps its age"),
        Transition((submitted,), (action.GRANT,), running, "its account grows"),
        Transition((submitted,), (action.REFUSE,), ended, ""),
        Transition((submitted,), (action.STATUS,), None, "its position"),
        Transition((running,), (step.UNREACHED,), waiting, "`Done`; keeps its age"),
        Transition((running,), (step.STATUS,), None, "none: it does not wait"),
        Transition((running,), (step.PROGRESS,), None, "`TokenProgress`, in sums"),
        Transition((running,), (step.GROWN,), None, "from credit, else `KvTokenRequest`"),
        Transition((running,), (step.INCARNATION,), None, "`Began`, with a new ticket"),
        Transition((running,), (action.PREEMPT,), None, "its engine stops it: it ends, and arrives again"),
        Transition((running,), (action.TOKENS,), None, "holds more"),
        Transition((running,), (step.RECLAIMED,), None, more),
        Transition(
            (running,),
            (step.DONE, step.CANCELLED),
            ended,
            "`Done`, or `CreditUsage` if the actor does not know it; what it held returns or becomes credit",
        ),
        Transition((running,), (step.DROPPED,), ended, "`EngineDropped`"),
        Transition(
            (waiting, ended),
            left,
            None,
            "of a ticket that it has left: ignored; its `Cancel` or `Done` returns the grant",
        ),
        Transition((ended,), (action.TOKENS,), None, "becomes credit, or `GiveBack`"),
        Transition(
            (ended,), (step.DONE, step.CANCELLED, step.PROGRESS, step.GROWN, step.STATUS), None, "comes late: ignored"
        ),
    )


def _ticket_rows() -> Iterable[Transition[TicketState]]:
    postponed, waiting, running, ended = TicketState
    step = TicketStep
    event = TicketEvent
    known = (postponed, waiting, running)
    crossing = (event.CANCEL, event.PROGRESS, event.TOKENS)
    return (
        Transition((), (event.ARRIVE,), waiting, ""),
        Transition((), (event.POSTPONED,), postponed, ""),
        Transition((), (event.BEGAN,), running, "charged already; ENDED if its engine or session is gone"),
        Transition((postponed,), (step.RECOVERED,), waiting, "with all others of its model, in order"),
        Transition((waiting,), (step.GRANTED,), running, "`Grant`, charged to its router's account"),
        Transition((waiting,), (step.UNREACHED, step.ENGINE_GONE), None, "queued again; keeps its age"),
        Transition((waiting,), (step.REFUSED,), ended, "`Refuse`"),
        Transition((waiting,), (event.STATUS,), None, "`QueueStatus`"),
        Transition((running,), (step.STOPPED,), None, "`Preempt`"),
        Transition((running,), (step.PAID,), None, "`KvTokenGrant`"),
        Transition((running,), (event.PROGRESS,), None, "charged to its tenant"),
        Transition((running,), (event.TOKENS,), None, "KV debt, paid from free tokens"),
        Transition((running,), (event.DONE,), ended, "returns what it held, but for what stays as credit"),
        Transition((running,), (step.ENGINE_GONE,), ended, "the account there is zero"),
        Transition(known, (event.CANCEL,), ended, "returns what it holds"),
        Transition(known, (step.ROUTER_GONE,), ended, "forgotten, a part in each event; its account stays as it is"),
        Transition((postponed, running, ended), (event.STATUS,), None, "no answer"),
        Transition((ended,), (event.DONE,), None, "the account returns what it says"),
        Transition((ended,), crossing, None, "ignored"),
    )


def _router_rows() -> Iterable[Transition[RouterState]]:
    unknown, known = RouterState
    check = RouterCheck
    event = RouterEvent
    news = (event.MODEL, event.STORE, event.REACHABILITY, event.DROPPED)
    of_account = (event.USAGE, event.GIVE_BACK, event.CREDIT, event.REPORT)
    return (
        Transition((unknown, known), (event.FIRST,), known, "`Booked`; an incarnation before this one ends"),
        Transition((unknown, known), (event.LATE,), None, "a stale reply; no event is applied"),
        Transition((known,), news, None, "the queues follow; `EngineDropAcknowledged`"),
        Transition((known,), of_account, None, "`CreditGrant`, `CreditChange`"),
        Transition(
            (known,), (check.UNRESPONSIVE, check.UNSURE), unknown, "its requests end; its next message is stale"
        ),
        Transition((unknown, known), (check.SILENT,), unknown, "its account is free for others"),
    )


ROUTER_SESSION = StateTable(
    "Router session, in the router", RouterSessionState, (RouterSessionStep, RouterSessionReply), _router_session_rows()
)
REQUEST = StateTable("Request in the router", RequestState, (RequestStep, RequestAction), _request_rows())
TICKET = StateTable("Request at the actor", TicketState, (TicketStep, TicketEvent), _ticket_rows())
ROUTER = StateTable("Router at the actor", RouterState, (RouterCheck, RouterEvent), _router_rows())
TABLES: tuple[StateTable[Any], ...] = (ROUTER_SESSION, REQUEST, TICKET, ROUTER)

# The messages of one request, and what they are in the tables
TICKET_EVENTS: dict[type, TicketEvent] = {
    messages.Cancel: TicketEvent.CANCEL,
    messages.Done: TicketEvent.DONE,
    messages.TokenProgress: TicketEvent.PROGRESS,
    messages.KvTokenRequest: TicketEvent.TOKENS,
    messages.StatusRequest: TicketEvent.STATUS,
}
REQUEST_ACTIONS: dict[type, RequestAction] = {
    Grant: RequestAction.GRANT,
    Refuse: RequestAction.REFUSE,
    QueueStatus: RequestAction.STATUS,
    Preempt: RequestAction.PREEMPT,
    messages.KvTokenGrant: RequestAction.TOKENS,
}
