"""Messages about limits: events of a router to the quota actor, and actions of the actor to a router.

They travel in the stream of `core.shared_queue.delivery`: each takes effect once, in order. Durations only, no moments:
each side has its own clock.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from serve_app.core.limits.policy import NOTHING, Amounts, Kind, LimitReason, Limits, Period, Scopes, ended_allowances
from serve_app.core.messages import message

Version = tuple[int, int]  # the actor's epoch, and a number that rises with every state it sends
UNHEARD: Version = (0, 0)  # no state of this scope was received
LOST_RETRY_S = 1.0  # for the client of a request that was ended by an error of ours
UNCOUNTED = math.inf  # the level of what the actor does not count, or does not know yet


@message
class LimitState(NamedTuple):
    """Action: what is left of a scope.

    Args:
        level: at the actor, with what is reserved, and without the credit of routers; or `UNCOUNTED`.
        left: with the credit of all routers, and without what is reserved.
        is_near: routers keep no credit of it.
        slots_kept: concurrency that a router may keep between its requests.
        period: the present day and month of the allowances.
    """

    scope: str
    version: Version
    level: Amounts
    left: Amounts
    is_near: bool
    slots_kept: int
    period: Period = (0, 0)


@message
class LimitRequest(NamedTuple):
    """Event: a request wants to be charged. Answered by `LimitGrant` or `LimitRefuse`, once.

    Args:
        ticket: never used twice.
        need: of each scope.
        mean_s: how long requests of these scopes run.
    """

    ticket: str
    scopes: Scopes
    need: Amounts
    fingerprint: bytes
    may_wait: bool
    is_repeat: bool | None
    mean_s: float


@message
class LimitCancel(NamedTuple):
    """Event: the client of a `LimitRequest` is gone."""

    ticket: str


@message
class LimitReport(NamedTuple):
    """Event: what a router has spent of its credit since its last report, and what it gives back of it; a refund is
    spent negatively, a debt given back negatively.

    Args:
        is_answer: to a `LimitRecall`.
        wants_state: answered by a `LimitState`.
        refund: the part of `returned` that requests have settled, in this `period`; a debt is negative.
    """

    scope: str
    spent: Amounts
    returned: Amounts
    is_answer: bool = False
    wants_state: bool = False
    refund: Amounts = NOTHING
    period: Period = (0, 0)

    def in_period(self, present: Period) -> LimitReport:
        """The report without what was settled in allowances that have begun anew since."""
        late = ended_allowances(self.period, present) if any(self.refund) else ()
        if not late:
            return self
        spent = list(self.spent)
        returned = list(self.returned)
        for kind in late:
            spent[kind] += self.refund[kind]
            returned[kind] -= self.refund[kind]
        return self._replace(spent=tuple(spent), returned=tuple(returned), refund=NOTHING)


@message
class ScopeAccount(NamedTuple):
    """What a router knows of a scope.

    Args:
        account: its credit; of the concurrency also what its requests hold.
        version, level: of the last state it received, `age_s` ago, if it was of this scope.
    """

    scope: str
    limits: Limits
    account: Amounts
    version: Version
    level: Amounts
    age_s: float


@message
class ToldReservation(NamedTuple):
    """A refused request whose client was told to come back in `due_in_s`."""

    scopes: Scopes
    need: Amounts
    fingerprint: bytes
    due_in_s: float


@message
class LimitAccounts(NamedTuple):
    """Event, one of the first of every incarnation: all that a router holds and remembers. What it does not name, it
    does not have."""

    accounts: tuple[ScopeAccount, ...]
    reservations: tuple[ToldReservation, ...]


@message
class LimitGrant(NamedTuple):
    """Action: the request is charged. The router also gets credit for `more` such requests, and `slots` of concurrency
    of each scope. `period`: in which it is charged."""

    ticket: str
    more: int
    slots: int
    period: Period = (0, 0)


@message
class LimitRefuse(NamedTuple):
    """Action: the request is refused.

    Args:
        kind, scope: of the limit.
        retry_after_s: the moment reserved for it; None: it never can be charged.
        is_reserved: whether the moment is reserved, and not an estimate.
        is_unsure: the actor does not know what it has charged: the router begins another incarnation.
    """

    ticket: str
    reason: LimitReason
    kind: Kind
    scope: str
    retry_after_s: float | None
    is_reserved: bool
    is_unsure: bool = False


def lost(ticket: str) -> LimitRefuse:
    """The end of a request that the actor failed at."""
    return LimitRefuse(ticket, LimitReason.RATE_LIMIT, Kind.REQUESTS, "", LOST_RETRY_S, False, is_unsure=True)


@message
class LimitRecall(NamedTuple):
    """Action: give back all credit of a scope, and keep none; answered by a `LimitReport`."""

    scope: str


LimitEvent = LimitRequest | LimitCancel | LimitReport | LimitAccounts
LimitAction = LimitGrant | LimitRefuse | LimitRecall | LimitState
