"""Events and actions of `Admission`: frozen values that can be sent to another process unchanged.

All moments are seconds of the monotonic clock of the process that hosts the `Admission`. A caller on another machine
sends durations, and the host adds them to its own clock.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field

from serve_app.core.messages import message
from serve_app.errors import BadRequest, EngineFailed, Overloaded, ServeAppError, Unavailable
from serve_app.types import RequestClass

# The only replica that is allowed (None: any), and the replicas that are excluded.
PlacementConstraint = tuple[str | None, frozenset[str]]


@message
@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that asks for a grant on a replica.

    Args:
        request_id: unique among the requests that wait or run.
        request_class: the class it may claim (the ASGI app has checked the right to it).
        tenant: the tenant whose use it counts as.
        slots: slots of one replica's batch that it takes, at least 1 (n x prompts).
        cost_tokens: estimated prompt plus output tokens: its KV budget.
        prompt_tokens: the prompt's part of `cost_tokens`.
        deadline: moment after which a grant is of no use; None: only the longest wait bounds the wait.
        affinity: the preferred replica; the request does not wait for it.
        accepted: it was granted before and lost its replica, or what it is a part of has begun; a full queue or a
            forecast does not refuse it.
        age_s: seconds since it first arrived, if it comes back after the loss of its replica: its tenant's requests are
            ordered by it, and it is no waiting.
        preemptible: whether it can be stopped while it runs and continued without loss (`core.queue.preemption`).
        preempted: how often it was. produced_tokens: output of its earlier runs, with which this one begins.
        only_replica: the one replica that it may run on (that of its session); None: any.
        avoid_replicas: replicas that it may not run on: its router cannot reach them, or they do not know its
            operation.
        session: the lease of the session in whose place it may run (`core.queue.session_place`); None: no session.
        fingerprint: that of the engine which has begun it: it continues at those with the same one; None: it may run on
            any (`core.shared_queue.engines`).

    Raises:
        ValueError: slots below 1, negative tokens, or a deadline that is not a number.
    """

    request_id: str
    request_class: RequestClass
    tenant: str
    slots: int = 1
    cost_tokens: int = 0
    deadline: float | None = None
    affinity: str | None = None
    accepted: bool = False
    prompt_tokens: int = 0
    only_replica: str | None = None
    avoid_replicas: frozenset[str] = frozenset()
    session: str | None = None
    age_s: float = 0.0
    preemptible: bool = False
    preempted: int = 0
    produced_tokens: int = 0
    fingerprint: str | None = None

    def __post_init__(self) -> None:
        if self.slots < 1:
            raise ValueError(f"slots is {self.slots}; a request occupies at least one")
        if min(self.cost_tokens, self.prompt_tokens) < 0:
            raise ValueError(f"negative: cost_tokens is {self.cost_tokens}, prompt_tokens {self.prompt_tokens}")
        if self.deadline is not None and math.isnan(self.deadline):
            raise ValueError("deadline is not a number")

    @property
    def has_begun(self) -> bool:
        """Whether it has a part of its answer."""
        return self.preempted > 0 or self.produced_tokens > 0 or self.fingerprint is not None

    @property
    def cost(self) -> int:
        """The KV tokens that it takes from a replica; at least one, since no request is free."""
        return self.cost_tokens or 1

    @property
    def unpaid_tokens(self) -> int:
        """The tokens that its class pays for its grant (`core.queue.min_share`): its cost without what its earlier runs
        have produced. The prompt is read again, and paid again. At least one."""
        return max(1, self.cost - self.produced_tokens)

    @property
    def placement(self) -> PlacementConstraint | None:
        """None: it may run on any replica."""
        if self.only_replica is None and not self.avoid_replicas:
            return None
        return self.only_replica, self.avoid_replicas


@message
@dataclass(frozen=True, slots=True)
class BegunRun:
    """A request that runs on a replica without a grant of this queue.

    Args:
        running_s: for how long.
        prompt_tokens, output_tokens: so far; the prompt's as counted by its engine, 0: not yet.
        is_paid: its tenant has been charged for these already.
        lease: of the session in whose place it runs; empty: it has slots and KV tokens of the replica.
        was_due: see `Grant`.
    """

    arrival: Arrival
    replica_id: str
    running_s: float
    prompt_tokens: int = 0
    output_tokens: int = 0
    is_paid: bool = False
    lease: str = ""
    was_due: bool = False


class RefusalReason(enum.StrEnum):
    """Why a request was refused; a label of the metrics and the `code` of the error."""

    QUEUE_FULL = "queue_full"  # the queue, or its class queue, is full of requests with as much right to wait
    SHED = "shed"  # it waited, and was evicted for a request of a higher class or a lighter tenant
    DEADLINE = "deadline"  # its deadline has passed, or ends before the predicted wait
    TIMEOUT = "timeout"  # it waited the longest wait, or its predicted wait is longer
    NO_REPLICA = "no_replica"  # no replica has had a slot for `no_replica_wait_s`
    TOO_LARGE = "too_large"  # it needs more slots or KV tokens than any replica has
    SESSIONS = "sessions"  # it waited the longest wait, and no replica had enough KV tokens beside its sessions
    LOST = "request_lost"  # an error of ours: router and quota actor do not agree on it, or one of them failed at it
    NOT_CONTINUABLE = "not_continuable"  # another engine has begun it, and none of the same model runs or starts


class WaitReason(enum.StrEnum):
    """What a request waited for: the last cause that was found when it was first in its class, else its turn."""

    TURN = "turn"  # other requests of its class or above
    SLOTS = "slots"  # free slots on a replica that has enough KV tokens, if any has
    KV_TOKENS = "kv_tokens"  # free KV tokens on a replica with enough free slots
    PLACEMENT = "placement"  # free capacity on the replicas that it may run on; others had some
    KV_DEBT = "kv_debt"  # the replicas with room were closed: requests there needed more KV tokens than estimated
    HELD_BACK = "held_back"  # the replica with room was held back for a larger request
    GUARD_SLOTS = "guard_slots"  # the free slots are kept for higher classes
    NO_REPLICA = "no_replica"  # the first replica
    SESSION = "session"  # the place of its session, which another request of the session used
    QUOTA_ACTOR = "quota_actor"  # the quota actor, which did not answer


@message
@dataclass(frozen=True, slots=True)
class Grant:
    """The request may run on this replica; its slots and KV tokens, or the place of its session, stay taken until
    `on_done` or `on_cancel`."""

    request_id: str
    replica_id: str
    waited_s: float
    waited_for: WaitReason | None = field(default=None, compare=False)  # an explanation; None: it did not wait
    lease: str = ""  # of the session in whose place it runs; empty: it has slots and KV tokens of the replica
    was_due: bool = field(default=False, compare=False)  # by the minimum share of its class: it is not stopped

    @property
    def pool(self) -> str:
        """The name of the pool that it uses (`core.pools`)."""
        return self.lease or self.replica_id


@message
@dataclass(frozen=True, slots=True)
class Refuse:
    """The request is refused.

    Args:
        retry_after_s: after this a repeat is expected to run at once; None: it never can.
        full: how many wait of how many in a full queue (`QueuePolicy.exceeded`); empty: the queue is not full, or the
            sender does not know.
    """

    request_id: str
    reason: RefusalReason
    retry_after_s: float | None
    full: str = field(default="", compare=False)  # an explanation


@message
@dataclass(frozen=True, slots=True)
class Preempt:
    """A running request stops at its engine, which ends its grant, and arrives again with what it has produced.

    `keeps_place`: ahead of later requests of its tenant; else behind them, since it has had its turn.
    """

    request_id: str
    replica_id: str
    keeps_place: bool = True


Decision = Grant | Refuse  # of a waiting request
Action = Decision | Preempt


@message
@dataclass(frozen=True, slots=True)
class QueueStatus:
    """The position of a waiting request.

    Args:
        queue_class: its class.
        position: 1: it is expected to start next. An estimate: a later arrival may still start before it.
        expected_start_s: seconds from now; None: nothing measured yet.
    """

    request_id: str
    queue_class: RequestClass
    position: int
    expected_start_s: float | None


_MESSAGES = {
    RefusalReason.QUEUE_FULL: "The queue of this model is full.",
    RefusalReason.SHED: "The queue is full; the request was evicted for one of a higher class or a lighter tenant.",
    RefusalReason.DEADLINE: "The request cannot start before its deadline.",
    RefusalReason.TIMEOUT: "No slot is free for the request within the longest wait allowed.",
    RefusalReason.NO_REPLICA: "No replica of this model can serve now; Retry-After says when one is expected.",
    RefusalReason.SESSIONS: "Sessions hold the KV tokens that the request needs; it waited the longest wait allowed.",
    RefusalReason.LOST: "The router or the quota actor failed at this request; its log says more. Try again.",
    RefusalReason.NOT_CONTINUABLE: "The stream cannot be continued: no engine of the model that began it is left.",
    RefusalReason.TOO_LARGE: "The request needs more sequences or tokens at once than a replica of this model has.",
}
_KINDS: dict[RefusalReason, type[ServeAppError]] = {
    RefusalReason.NO_REPLICA: Unavailable,
    RefusalReason.LOST: Unavailable,
    RefusalReason.NOT_CONTINUABLE: EngineFailed,
}


def refusal_error(refusal: Refuse) -> ServeAppError:
    """The error for the client of a refused request: 503 without a replica or by an error of ours, 400 if it can never
    fit, 502 of a stream that cannot be continued, else 429."""
    message = _MESSAGES[refusal.reason]
    if refusal.full:
        message = f"{message.removesuffix('.')}: {refusal.full}."
    if refusal.reason is RefusalReason.TOO_LARGE:
        return BadRequest(message, param="n", code=refusal.reason.value)
    kind = _KINDS.get(refusal.reason, Overloaded)
    return kind(message, retry_after_s=refusal.retry_after_s, code=refusal.reason.value)
