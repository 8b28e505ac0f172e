"""Messages between a router and the quota actor about requests: events to the actor, actions to the router.

Durations only, no timestamps: each side has its own clock. Tuples, because there are tens of thousands a second.

An account is what a router may use of one engine, in slots and KV tokens: the amount its requests hold plus its credit.
The ledger has the sum; every change is one event or one action of the ordered stream (`core.shared_queue.delivery`), so
both ends count the same whatever the network does. A session is a separate pool on its engine (`core.memory.sessions`),
named by its lease: there a router holds what its requests draw, and has no credit.
"""

from __future__ import annotations

from typing import NamedTuple

from serve_app.core.queue import Arrival, Grant, QueuePolicy, QueueStatus, Refuse
from serve_app.types import RequestClass

DEFAULT_POLICY = QueuePolicy(max_queued=1000, max_wait_s=60.0)  # of a model without a `ModelPolicy`


class Amount(NamedTuple):
    """Slots and KV tokens of one engine, or of one session."""

    engine: str
    slots: int
    tokens: int


# Events: router to actor


class Hello(NamedTuple):
    """First event of every incarnation: the router's accounts. The actor books as much as is free."""

    accounts: tuple[Amount, ...]


class ModelPolicy(NamedTuple):
    """The router serves this model, with these bounds of its queue; None: it no longer does."""

    model: str
    policy: QueuePolicy | None


class EngineReachability(NamedTuple):
    """Whether the router can send requests to this engine now."""

    model: str
    engine: str
    usable: bool


class EngineDropped(NamedTuple):
    """The router drops an engine: its account there is zero, its requests there are forgotten. Answered by
    `EngineDropAcknowledged`; the router does not use that engine again before that."""

    engine: str


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


class Cancel(NamedTuple):
    """The caller of this ticket is gone, or was served on credit; this event returns what the ticket was granted."""

    ticket: str


class TokenProgress(NamedTuple):
    """A running request has generated this many tokens since its last report."""

    ticket: str
    output_tokens: int


class Done(NamedTuple):
    """A granted request has ended; this event returns all that the account held for it."""

    ticket: str
    prompt_tokens: int
    output_tokens: int


class CreditUsage(NamedTuple):
    """Requests and tokens granted on credit since the last report, for the queue's fairness counters."""

    model: str
    request_class: RequestClass
    tenant: str
    requests: int
    prompt_tokens: int
    output_tokens: int


class GiveBack(NamedTuple):
    """Returns credit of this account, or what a request without a ticket had drawn on a session."""

    engine: str
    slots: int
    tokens: int


class CreditRequest(NamedTuple):
    """The router has this credit left on the engine and requests more."""

    engine: str
    slots: int
    tokens: int


class KvTokenRequest(NamedTuple):
    """A running request of this class needs more tokens than estimated. `ticket`: empty if granted on credit.
    `reclaimed`: the request had these tokens; `Reclaim` took them off the account.

    Answered by `KvTokenGrant` once they are free; the end of the request cancels it (`Done`, `Cancel`,
    `CancelKvTokenRequest`)."""

    request_id: str
    ticket: str
    engine: str
    tokens: int
    request_class: RequestClass
    reclaimed: bool = False


class AccountReport(NamedTuple):
    """The router's accounts, sent at every heartbeat; the actor compares them with the ledger.

    Args:
        in_use: what its requests hold, by engine.
        accounts: in use plus credit.
        last_action: the last action the router had taken at the time.
    """

    in_use: tuple[Amount, ...]
    accounts: tuple[Amount, ...]
    last_action: int


class CancelKvTokenRequest(NamedTuple):
    """A request granted on credit has ended: cancels its `KvTokenRequest`."""

    request_id: str
    engine: str


class StatusRequest(NamedTuple):
    """Requests the queue position of this ticket. Answered by `StatusReply` while it waits."""

    ticket: str


# Actions: actor to router; `Grant` and `Refuse` are those of `core.queue`, by ticket


class SessionOpened(NamedTuple):
    """A session is open. `name`: see `core.memory.sessions.session_name`."""

    name: str
    lease: str
    model: str
    engine: str


class SessionEnded(NamedTuple):
    """A session has ended; a later one of the same name has another lease."""

    name: str
    lease: str


class Booked(NamedTuple):
    """Answer to `Hello`: the part of the reported accounts that could not be booked, and the open sessions."""

    shortfall: tuple[Amount, ...]
    sessions: tuple[SessionOpened, ...]


class SessionDraw(NamedTuple):
    """A submitted request has this of its session. With the slot it runs at once, outside the queue; without, it waits
    in the queue for the rest."""

    ticket: str
    lease: str
    slots: int
    tokens: int

    def remainder(self, arrival: Arrival) -> tuple[int, int]:
        """Slots and tokens that the request needs of its engine besides."""
        missing = arrival.cost - self.tokens
        return (0, missing) if self.slots else (arrival.slots, max(1, missing))


class EngineDropAcknowledged(NamedTuple):
    """Answer to `EngineDropped`."""

    engine: str


class CreditChange(NamedTuple):
    """Change of the router's account, positive or negative."""

    engine: str
    slots: int
    tokens: int


class CreditGrant(NamedTuple):
    """Answer to `CreditRequest`: increase of the account, zero possible; `target_*`: the credit of each router there
    while no request waits."""

    engine: str
    slots: int
    tokens: int
    target_slots: int
    target_tokens: int


class KvTokenGrant(NamedTuple):
    """The request has this many more tokens, of its engine or its session. If it has ended, they become credit, or with
    a ticket were returned at its end."""

    request_id: str
    ticket: str
    engine: str
    tokens: int


class Reclaim(NamedTuple):
    """A request of this class waits: tokens beyond the estimates of lower classes on the engine are returned
    (`KvTokenRequest.reclaimed`) and become KV debt again."""

    engine: str
    request_class: RequestClass


class StatusReply(NamedTuple):
    """Answer to `StatusRequest`; the id in `status` is the ticket."""

    status: QueueStatus


RouterEvent = (
    Hello
    | ModelPolicy
    | EngineReachability
    | EngineDropped
    | Arrive
    | Cancel
    | TokenProgress
    | Done
    | CreditUsage
    | GiveBack
    | CreditRequest
    | KvTokenRequest
    | CancelKvTokenRequest
    | AccountReport
    | StatusRequest
)
ActorAction = (
    Grant
    | Refuse
    | Booked
    | EngineDropAcknowledged
    | CreditChange
    | CreditGrant
    | KvTokenGrant
    | Reclaim
    | StatusReply
    | SessionOpened
    | SessionEnded
    | SessionDraw
)
