"""Messages between a router and the quota actor about requests: events to the actor, actions to the router.

Durations only, no timestamps: each side has its own clock. Tuples, because there are tens of thousands a second.

An account is what a router may use of one engine, in slots and KV tokens: the amount its requests hold plus its credit.
The actor has the sum; every change is one event or one action of the ordered stream (`core.shared_queue.delivery`), so
both ends count the same whatever the network does. A session is a place of its own on its engine
(`core.queue.session_place`), named by its lease: a router holds it while a request runs there, and has no credit of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from serve_app.core.limits import LimitAction, LimitEvent
from serve_app.core.memory import NodeProcesses, SessionEntry
from serve_app.core.messages import message
from serve_app.core.queue import Arrival, Backlog, BegunRun, Grant, Preempt, QueuePolicy, QueueStatus, Refuse
from serve_app.types import RequestClass

MAX_TENANTS_REPORTED = 32  # tenants of a class in the figures, which are sent with every answer to an arrival
DEFAULT_POLICY = QueuePolicy(max_queued=1000, max_wait_s=60.0)  # of a model without a `ModelPolicy`


@message
class Amount(NamedTuple):
    """Slots and KV tokens of one engine, or of one session."""

    engine: str
    slots: int
    tokens: int


# Events: router to actor


@message
class Hello(NamedTuple):
    """First event of every incarnation: the router's accounts, of which the actor books as much as is free; and its
    process, so that its death is seen at once (None: only by its silence)."""

    accounts: tuple[Amount, ...]
    process: NodeProcesses | None = None


@message
class ModelPolicy(NamedTuple):
    """The router serves this model, with these bounds of its queue; None: it no longer does."""

    model: str
    policy: QueuePolicy | None


@message
class StoreAddress(NamedTuple):
    """Where the store of keys and use is; None: the SQLite file of the head node."""

    url: str | None


@message
class EngineReachability(NamedTuple):
    """Whether the router can send requests to this engine now."""

    model: str
    engine: str
    usable: bool


@message
class EngineDropped(NamedTuple):
    """The router drops an engine: its account there is zero, its requests there are forgotten. Answered by
    `EngineDropAcknowledged`; the router does not use that engine again before that."""

    engine: str


@message
class Arrive(NamedTuple):
    """A request enters the queue.

    Args:
        model: the model of the queue.
        arrival: its `request_id` is the ticket, never used twice; its `deadline` is the seconds left.
        waited_s: time waited so far; ageing and the maximum wait include it.
    """

    model: str
    arrival: Arrival
    waited_s: float


@message
class Began(NamedTuple):
    """A request runs that its router has granted on its credit, or that has outlived an incarnation: the account has
    what it holds already. The `request_id` of its arrival is its ticket."""

    model: str
    run: BegunRun


@message
class Cancel(NamedTuple):
    """The caller of this ticket is gone, or was served on credit; this event returns what the ticket was granted."""

    ticket: str


@message
class TokenProgress(NamedTuple):
    """A running request has generated this many tokens since its last report. `prompt_tokens`: of its prompt, once its
    engine has counted them; 0: not yet, or in an earlier report."""

    ticket: str
    output_tokens: int
    prompt_tokens: int = 0


@message
class Done(NamedTuple):
    """A running request has ended. The router's account in this pool, of an engine or a session, returns so many slots
    and tokens; the rest of what the request held is credit now. `pool`: empty: it returns what its queue granted."""

    ticket: str
    prompt_tokens: int
    output_tokens: int
    pool: str = ""
    slots: int = 0
    tokens: int = 0


@message
class CreditUsage(NamedTuple):
    """Tokens of requests on credit that have ended before they were announced (`Began`), for the fairness counters."""

    model: str
    request_class: RequestClass
    tenant: str
    prompt_tokens: int
    output_tokens: int


@message
class GiveBack(NamedTuple):
    """Returns credit of this account."""

    engine: str
    slots: int
    tokens: int


@message
class CreditRequest(NamedTuple):
    """The router has this credit left on the engine and requests more."""

    engine: str
    slots: int
    tokens: int


@message
class KvTokenRequest(NamedTuple):
    """A running request of this class needs more tokens than estimated. `reclaimed`: the request had these tokens;
    `Reclaim` took them off the account.

    Answered by `KvTokenGrant` once they are free; the end of the request cancels it."""

    request_id: str
    ticket: str
    engine: str
    tokens: int
    request_class: RequestClass
    reclaimed: bool = False


@message
class AccountReport(NamedTuple):
    """The router's accounts, sent at every heartbeat; the actor compares them with its own.

    Args:
        in_use: what its requests hold, by engine.
        accounts: in use plus credit.
        last_action: the last action the router had taken at the time.
    """

    in_use: tuple[Amount, ...]
    accounts: tuple[Amount, ...]
    last_action: int


@message
class StatusRequest(NamedTuple):
    """Requests the queue position of this ticket. Answered by a `QueueStatus` with the ticket as its id, while it
    waits."""

    ticket: str


# Actions: actor to router; `Grant`, `Refuse` and `Preempt` are those of `core.queue`, by ticket; a
# `SessionEntry` of `core.memory`: the session is open


@message
class SessionEnded(NamedTuple):
    """A session has ended; a later one of the same name has another lease."""

    name: str
    lease: str


@message
class Booked(NamedTuple):
    """Answer to `Hello`: the part of the reported accounts that could not be booked, and the open sessions."""

    shortfall: tuple[Amount, ...]
    sessions: tuple[SessionEntry, ...]


@message
class SessionDraw(NamedTuple):
    """For a router of release 0.5.0, before the `Grant`: the request has the place of its session. One that
    `takes_lease` is not sent it."""

    ticket: str
    lease: str
    slots: int
    tokens: int


@message
class EngineDropAcknowledged(NamedTuple):
    """Answer to `EngineDropped`."""

    engine: str


@message
class CreditChange(NamedTuple):
    """Change of the router's account, positive or negative."""

    engine: str
    slots: int
    tokens: int


@message
class CreditGrant(NamedTuple):
    """Answer to `CreditRequest`: increase of the account, zero possible; `target_*`: the credit of each router there
    while no request waits."""

    engine: str
    slots: int
    tokens: int
    target_slots: int
    target_tokens: int


@message
class KvTokenGrant(NamedTuple):
    """The request has this many more tokens, of its engine or of the place of its session. If it has ended, they become
    credit, or are returned."""

    request_id: str
    ticket: str
    engine: str
    tokens: int


@message
class Reclaim(NamedTuple):
    """A request of this class waits: tokens beyond the estimates of lower classes on the engine are returned
    (`KvTokenRequest.reclaimed`) and become KV debt again."""

    engine: str
    request_class: RequestClass


RequestEvent = Arrive | Began | Cancel | TokenProgress | Done | KvTokenRequest | StatusRequest
CreditEvent = CreditUsage | GiveBack | CreditRequest | AccountReport
SessionEvent = Hello | StoreAddress | ModelPolicy | EngineReachability | EngineDropped
RouterEvent = RequestEvent | CreditEvent | LimitEvent | SessionEvent

RequestAction = Grant | Refuse | Preempt | KvTokenGrant | QueueStatus | SessionDraw
CreditAction = CreditChange | CreditGrant | Reclaim
ActorAction = RequestAction | CreditAction | LimitAction | Booked | EngineDropAcknowledged | SessionEntry | SessionEnded


# Both directions: the numbered batches


@message
class ClassQueueFigures(NamedTuple):
    """One class of a queue with waiting requests.

    Args:
        waiting: requests that claimed this class.
        is_full: whether an arrival would be refused because the queue is full.
        backlog: the work ahead of an arrival.
        tenant_slots: slots that each tenant waits for; None: more than `MAX_TENANTS_REPORTED` tenants wait.
    """

    waiting: int
    is_full: bool
    backlog: Backlog
    tenant_slots: Mapping[str, int] | None


@message
class QueueFigures(NamedTuple):
    """A model's queue with waiting requests.

    Args:
        version: rises with each update of any queue's figures, in an epoch.
        model: the model's name.
        classes: from the lowest.
    """

    version: int
    model: str
    classes: tuple[ClassQueueFigures, ...]


@message
class ActorState(NamedTuple):
    """The actor's state for all routers; part of every reply, so that no reply's actions are newer than its state.

    Args:
        version: rises with every change, in an epoch.
        contended: models with waiting requests, engines with KV debt, and those that drain: no credit there.
        recovering: models whose queue grants nothing yet: the routers' holdings on their engines are unknown.
        blocked: number of engines that wait for memory, by model, for models with any.
        fragmentation: by node, the share of free GPU memory that no engine of a present model could use.
    """

    version: int
    contended: frozenset[str]
    recovering: frozenset[str]
    blocked: Mapping[str, int]
    fragmentation: tuple[tuple[str, float], ...] = ()


@message
class RouterMessage(NamedTuple):
    """A router's message.

    Args:
        router: its name.
        incarnation: rises with every new session of the router.
        epoch: the actor's, as far as the router knows.
        seq: the number of the first event.
        events: in order.
        last_acked_event: the last event acknowledged by the actor.
        last_taken_action: the last action the router has taken.
        resend: replies may have been lost; send unacknowledged actions again.
        takes_lease: whether the router's release knows by `Grant.lease` that a request has the place of its session.
    """

    router: str
    incarnation: int
    epoch: int
    seq: int
    events: tuple[RouterEvent, ...]
    last_acked_event: int
    last_taken_action: int
    resend: bool = False
    takes_lease: bool = False


@message
class ActorReply(NamedTuple):
    """The actor's message.

    Args:
        epoch: the actor's.
        incarnation: the router's, as in the message this answers.
        last_taken_event: the last event taken.
        seq: the number of the first action.
        actions: in order.
        state: None only in a stale reply.
        figures: of contended models, those newer than the ones sent before.
        is_stale: the router must begin another incarnation, in this epoch.
        has_more: some actions did not fit.
        ledger_accounts: the router's accounts at the actor, in the answer to an `AccountReport`.
        takes_begun: whether the actor's release knows `Began`.
    """

    epoch: int
    incarnation: int
    last_taken_event: int
    seq: int
    actions: tuple[ActorAction, ...]
    state: ActorState | None
    figures: tuple[QueueFigures, ...] = ()
    is_stale: bool = False
    has_more: bool = False
    ledger_accounts: tuple[Amount, ...] | None = None
    takes_begun: bool = False


# Of release 0.5.0, whose routers may still speak during an upgrade: read, and ignored


@message
class CancelKvTokenRequest(NamedTuple):
    """A request on credit, which had no ticket, had ended: its `KvTokenRequest` was cancelled."""

    request_id: str
    engine: str
