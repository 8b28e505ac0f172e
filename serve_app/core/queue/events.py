"""What goes into admission and what comes out: frozen values that can cross a process border as they are.

All moments are seconds of the one monotonic clock of whoever hosts the `Admission`; a caller on another machine sends
spans and the host adds them to its own clock.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass

from serve_app.errors import BadRequest, Overloaded, ServeAppError, Unavailable
from serve_app.types import RequestClass

TENANTS_SHOWN = 50  # by name in a snapshot: each is a label of several metrics
OTHER_TENANTS = "(other)"  # no tenant's name has brackets


Where = tuple[
    str | None, frozenset[str]
]  # a placement constraint: the one replica that is allowed, and those that are not


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that asks for a place on a replica.

    Args:
        request_id: unique among the requests that wait or run.
        request_class: the class it may claim (the edge has checked the right to it).
        tenant: whom it is counted for.
        slots: sequences of one replica's batch it occupies, at least 1 (n x prompts).
        cost_tokens: estimated prompt plus output tokens: its KV budget.
        prompt_tokens: those of the prompt among them.
        deadline: moment after which a grant is of no use; None: only the longest wait bounds it.
        affinity: the replica it would rather have; never waited for.
        accepted: it was granted before and lost its replica; a full line or a forecast does not refuse it any more.
        only: the one replica it may run on (that of its session); None: any.
        avoid: replicas it may not run on (its router cannot reach them).
        session: the KV lease of the open session whose tokens it draws first (`core.shared_queue.granting`); None: of
        none.

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
    only: str | None = None
    avoid: frozenset[str] = frozenset()
    session: str | None = None

    def __post_init__(self) -> None:
        if self.slots < 1:
            raise ValueError(f"slots is {self.slots}; a request occupies at least one")
        if self.cost_tokens < 0:
            raise ValueError(f"cost_tokens is {self.cost_tokens}; it cannot be negative")
        if self.prompt_tokens < 0:
            raise ValueError(f"prompt_tokens is {self.prompt_tokens}; it cannot be negative")
        if self.deadline is not None and math.isnan(self.deadline):
            raise ValueError("deadline is not a number")

    @property
    def cost(self) -> int:
        """The tokens it takes from a replica; at least one, since no request is free."""
        return self.cost_tokens or 1

    @property
    def where(self) -> Where | None:
        """Its placement constraint; None: it may run on any replica."""
        return None if self.only is None and not self.avoid else (self.only, self.avoid)


class Reason(enum.StrEnum):
    """Why a request was refused; a label of the metrics and the `code` of the error."""

    QUEUE_FULL = "queue_full"  # the line, or its class, is full of requests that have as much right to wait
    SHED = "shed"  # it was in the line, and a higher class or a lighter tenant needed its place
    DEADLINE = "deadline"  # passed, or the predicted wait exceeds it
    TIMEOUT = "timeout"  # it waited the longest wait, or by the forecast would have to wait longer
    NO_REPLICA = "no_replica"  # no replica has had a slot for too long
    TOO_LARGE = "too_large"  # more slots or KV tokens than any replica has
    SESSIONS = "sessions"  # it waited the longest wait, and no replica had enough KV tokens beside its sessions


@dataclass(frozen=True, slots=True)
class Grant:
    """The request may run on this replica; its slots and tokens are taken until `on_done` or `on_cancel`."""

    request_id: str
    replica_id: str
    waited_s: float


@dataclass(frozen=True, slots=True)
class Refuse:
    """The request is out. `retry_after_s`: when a repeat can be expected to run at once; None: never as it is."""

    request_id: str
    reason: Reason
    retry_after_s: float | None


@dataclass(frozen=True, slots=True)
class Preempt:
    """A running request gives its place back and waits again with what it has produced.

    Nothing decides so yet: a tenant's guaranteed share is taken back from what ends by itself. It is the place for it.
    """

    request_id: str
    replica_id: str


Action = Grant | Refuse


@dataclass(frozen=True, slots=True)
class QueueStatus:
    """Where a request stands.

    Args:
        level: its class.
        position: 1: it is expected to start next. An estimate: whoever arrives later may still come before it.
        expected_start_s: seconds from now; None: nothing measured yet.
    """

    request_id: str
    level: RequestClass
    position: int
    expected_start_s: float | None


@dataclass(frozen=True, slots=True)
class ReplicaUse:
    """What a replica has for us, and what is in use; more in use than it has while it shrinks or drains.

    `kv_tokens` is None where KV tokens are not bounded here.
    """

    slots: int
    used: int
    kv_tokens: int | None = None
    kv_used: int = 0


@dataclass(frozen=True, slots=True)
class ClassFigures:
    """One class. `granted_tokens` only ever grows; `drain_slots_per_s` is what is left to it."""

    waiting: int
    waiting_tokens: int
    granted_tokens: int
    drain_slots_per_s: float | None


@dataclass(frozen=True, slots=True)
class TenantFigures:
    """One tenant at this moment. `below_share`: it has less than its guaranteed share, so what comes free is its."""

    waiting: int
    waiting_tokens: int
    slots: int
    kv_tokens: int
    below_share: bool


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state in figures. Classes by label, reasons by value; counters only ever grow.

    `arrived` always equals `granted` + `refused` + `cancelled_waiting` + `waiting`, each summed. `tenants` names those
    with the most slots and waiting requests, at most `TENANTS_SHOWN`; all others are summed under `OTHER_TENANTS`.
    """

    waiting: Mapping[str, int]
    waiting_tokens: int
    oldest_wait_s: float
    replicas: Mapping[str, ReplicaUse]
    arrived: int
    granted: Mapping[str, int]
    refused: Mapping[str, int]
    cancelled_waiting: int
    cancelled_running: int
    done: int
    done_tokens: int
    drain_slots_per_s: float | None
    classes: Mapping[str, ClassFigures]
    tenants: Mapping[str, TenantFigures]


_MESSAGES = {
    Reason.QUEUE_FULL: "The waiting line of this model is full.",
    Reason.SHED: "The request gave its place in the full waiting line to one of a higher class or a lighter tenant.",
    Reason.DEADLINE: "The request cannot start before its deadline.",
    Reason.TIMEOUT: "No slot is free for the request within the longest wait that is allowed.",
    Reason.NO_REPLICA: "No replica of this model can serve at the moment; Retry-After says when one is expected.",
    Reason.SESSIONS: "Sessions hold the KV tokens that the request would need; it waited as long as is allowed.",
    Reason.TOO_LARGE: "The request asks for more sequences or tokens at once than a replica of this model can hold.",
}


def refusal_error(refusal: Refuse) -> ServeAppError:
    """What the caller of a refused request is told: 503 without a replica, 400 if it can never fit, else 429."""
    message = _MESSAGES[refusal.reason]
    if refusal.reason is Reason.TOO_LARGE:
        return BadRequest(message, param="n", code=refusal.reason.value)
    kind = Unavailable if refusal.reason is Reason.NO_REPLICA else Overloaded
    return kind(message, retry_after_s=refusal.retry_after_s, code=refusal.reason.value)
