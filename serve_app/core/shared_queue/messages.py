"""What a router and the quota actor say to each other about requests: values that cross the border as they are.

Spans only, no moments: each side has a clock of its own. Tuples: there are tens of thousands of them a second.

An account is what a router may use of one engine, slots and KV tokens: what its requests hold there and what it has
besides, its credit. The ledger holds the account's sum; every change of it is one event or one action of the ordered
stream (`core.shared_queue.delivery`), so both ends count the same however the messages travel. A session is a pool of
its own beside its engine (`core.memory.sessions`), by the name of its lease: there a router holds what requests draw,
and has no credit.
"""

from __future__ import annotations

from typing import NamedTuple

from serve_app.core.queue import Arrival, Grant, Policy, Preempt, QueueStatus, Refuse
from serve_app.types import RequestClass

UNTOLD = Policy(max_queued=1000, max_wait_s=60.0)  # of a model of which nobody has said its `Rules`


class Amount(NamedTuple):
    """Slots and KV tokens of one engine, or of one session."""

    engine: str
    slots: int
    tokens: int


# Events: router to actor


class Hello(NamedTuple):
    """The first event of every incarnation: what the router's accounts are. The actor books what it can of it."""

    holds: tuple[Amount, ...]


class Rules(NamedTuple):
    """The router serves this model, with these bounds of its line; None: not any more."""

    model: str
    policy: Policy | None


class Reach(NamedTuple):
    """Whether the router can hand requests to this engine now."""

    model: str
    engine: str
    usable: bool


class Left(NamedTuple):
    """The router is done with an engine; its account there is nothing, and what ran there is forgotten. Answered by
    `Closed`, before which it does not begin with that engine again."""

    engine: str


class Arrive(NamedTuple):
    """A request asks for a place.

    Args:
        model: whose line.
        arrival: its `request_id` is the ticket, never used twice; its `deadline` is the seconds left.
        waited_s: how long it has waited so far; ageing and the longest wait count from there.
    """

    model: str
    arrival: Arrival
    waited_s: float


class Cancel(NamedTuple):
    """The caller of this ticket is gone, or has been served otherwise; what it was granted comes back with this."""

    ticket: str


class Progress(NamedTuple):
    """A request runs and has put out this many tokens since the last word of it."""

    ticket: str
    output_tokens: int


class Done(NamedTuple):
    """A granted request has ended; all that its account held for it comes back with this."""

    ticket: str
    prompt_tokens: int
    output_tokens: int


class Usage(NamedTuple):
    """What the router has granted by itself since its last word, for the fairness counters of the line."""

    model: str
    request_class: RequestClass
    tenant: str
    requests: int
    prompt_tokens: int
    output_tokens: int


class GiveBack(NamedTuple):
    """Credit of this account, or what a request without a ticket had drawn of a session, is the actor's again."""

    engine: str
    slots: int
    tokens: int


class Ask(NamedTuple):
    """The router has this credit left on the engine, and would have more."""

    engine: str
    slots: int
    tokens: int


class Grow(NamedTuple):
    """A running request of this class outgrows its estimate by so much more. `ticket`: empty if its router granted it.
    `back`: the request had them, and they have been taken off the account, by `Reclaim`.

    Answered by `Grown` once it is to be had; the end of the request (`Done`, `Cancel`, `Enough`) takes it back."""

    request_id: str
    ticket: str
    engine: str
    tokens: int
    request_class: RequestClass
    back: bool = False


class Held(NamedTuple):
    """What the router goes by, said at every beat: the actor compares it with what it has booked.

    Args:
        holds: what its requests hold, by engine.
        accounts: that and its credit together.
        heard: the last action that the router had taken when it said so.
    """

    holds: tuple[Amount, ...]
    accounts: tuple[Amount, ...]
    heard: int


class Enough(NamedTuple):
    """A request that the router granted by itself has ended, and is owed nothing of what it asked for in `Grow`."""

    request_id: str
    engine: str


class Look(NamedTuple):
    """Where does this ticket stand? Answered by `Stands` while it waits."""

    ticket: str


# Actions: actor to router; `Grant`, `Refuse` and `Preempt` (reserved) are the line's own, by ticket


class SessionOpened(NamedTuple):
    """A session is open: its name (`core.memory.sessions.name_of`), its lease, its model and its engine."""

    name: str
    lease: str
    model: str
    engine: str


class SessionEnded(NamedTuple):
    """It is not any more; a later one of the same name has another lease."""

    name: str
    lease: str


class Booked(NamedTuple):
    """The answer to `Hello`: what is missing in the ledger of what the router said it has, and the open sessions."""

    short: tuple[Amount, ...]
    sessions: tuple[SessionOpened, ...]


class Drawn(NamedTuple):
    """A request that was handed in has this of its session. With the slot it runs at once, beside the line; without, it
    waits in the line for what is missing."""

    ticket: str
    lease: str
    slots: int
    tokens: int

    def rest(self, arrival: Arrival) -> tuple[int, int]:
        """Slots and tokens that the request needs of its engine beside that."""
        missing = arrival.cost - self.tokens
        return (0, missing) if self.slots else (arrival.slots, max(1, missing))


class Closed(NamedTuple):
    """The answer to `Left`."""

    engine: str


class Credit(NamedTuple):
    """The account has grown by this much, or has fallen."""

    engine: str
    slots: int
    tokens: int


class Lent(NamedTuple):
    """The answer to `Ask`: the account has grown by this much, which may be nothing; `spare_*`: the credit each router
    is to have there while nobody waits."""

    engine: str
    slots: int
    tokens: int
    spare_slots: int
    spare_tokens: int


class Grown(NamedTuple):
    """The request has so many tokens more, of its engine or its session. If it has ended, they are credit; under a
    ticket they came back with it."""

    request_id: str
    ticket: str
    engine: str
    tokens: int


class Reclaim(NamedTuple):
    """Somebody of this class waits: what requests of lower ones have on the engine beyond their estimates is given back
    (`Grow`, `back`), and owed to them again."""

    engine: str
    request_class: RequestClass


class Stands(NamedTuple):
    """The answer to `Look`; `status` has the ticket for its id."""

    status: QueueStatus


Event = (
    Hello
    | Rules
    | Reach
    | Left
    | Arrive
    | Cancel
    | Progress
    | Done
    | Usage
    | GiveBack
    | Ask
    | Grow
    | Enough
    | Held
    | Look
)
Action = (
    Grant
    | Refuse
    | Preempt
    | Booked
    | Closed
    | Credit
    | Lent
    | Grown
    | Reclaim
    | Stands
    | SessionOpened
    | SessionEnded
    | Drawn
)
