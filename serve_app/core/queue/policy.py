"""The bounds of a queue and the rights of its tenants: frozen values, checked when they are made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from serve_app.core.messages import message
from serve_app.types import RequestClass

# Longer than others, a request may wait that has begun and was stopped for others or lost its replica: it has a part of
# its answer. Its wait counts only while its class gets nothing (`Admission`): a peak of load of so long ends none.
BEGUN_WAIT_S = 600.0
DEFAULT_NO_REPLICA_WAIT_S = 60.0  # a crashed replica of a small model is back in less; raise it for slow loads
DEFAULT_MIN_SHARE = 0.05  # of granted tokens: a batch job goes on under overload, and higher classes hardly notice
MAX_GUARD_SLOTS_SHARE = 0.5  # above it the lower classes would be left the smaller part of the slots
DEFAULT_WEIGHT = 1.0  # tenants are equal unless configured
# A million to one is more than any sharing needs, and sums of such weights keep twelve digits: with 1e16 beside it, a
# tenant of weight 1 was lost in rounding.
MIN_WEIGHT = 1e-3
MAX_WEIGHT = 1e3


@message
@dataclass(frozen=True, slots=True)
class ClassBound:
    """How much of one class may wait; None: only the bounds of the whole queue apply."""

    max_queued: int | None = None
    max_queued_tokens: int | None = None


class QueuedAmount(NamedTuple):
    """Requests that wait, and their tokens."""

    requests: int
    tokens: int


@message
@dataclass(frozen=True, slots=True)
class TenantPolicy:
    """The rights of one tenant.

    Args:
        weight: its part of a class under overload, relative to other tenants; `MIN_WEIGHT` to `MAX_WEIGHT`.
        share: the guaranteed part of all slots and KV tokens; other tenants may use it while it is idle.
    """

    weight: float = DEFAULT_WEIGHT
    share: float = 0.0


@message
@dataclass(frozen=True, slots=True)
class QueuePolicy:
    """The bounds of a queue.

    Args:
        max_queued: requests that may wait; 0: a request that cannot run at once is refused.
        max_wait_s: the longest wait, in seconds.
        no_replica_wait_s: the longest wait while no replica has a slot, in seconds.
        max_queued_tokens: estimated tokens that may wait; None: any.
        classes: bounds of single classes, in addition.
        tenants: weights and guaranteed shares; a tenant that is not named has weight 1 and no share.
        min_share: the minimum share: the part of granted tokens that is guaranteed to each waiting class.
        guard_slots_share: the largest part of all slots kept free for the classes from `high` up while these arrive;
            0: none.

    Raises:
        ValueError: a bound out of range, or shares above 1 in sum.
    """

    max_queued: int
    max_wait_s: float
    no_replica_wait_s: float = DEFAULT_NO_REPLICA_WAIT_S
    max_queued_tokens: int | None = None
    classes: Mapping[RequestClass, ClassBound] = field(default_factory=dict)
    tenants: Mapping[str, TenantPolicy] = field(default_factory=dict)
    min_share: float = DEFAULT_MIN_SHARE
    guard_slots_share: float = 0.0

    def __post_init__(self) -> None:
        for bound in self._bounds():
            if (bound.max_queued or 0) < 0 or (bound.max_queued_tokens or 0) < 0:
                raise ValueError(f"max_queued is {bound.max_queued}, max_queued_tokens {bound.max_queued_tokens}")
        if not (self.max_wait_s > 0 and self.no_replica_wait_s > 0):
            raise ValueError("every wait must be above zero")
        if not 0.0 <= self.min_share * (len(RequestClass) - 1) < 1.0:
            raise ValueError(f"min_share is {self.min_share}: nothing would be left for the highest class")
        if not 0.0 <= self.guard_slots_share <= MAX_GUARD_SLOTS_SHARE:
            raise ValueError(f"guard_slots_share is {self.guard_slots_share} and at most {MAX_GUARD_SLOTS_SHARE}")
        for name, tenant in self.tenants.items():
            if not MIN_WEIGHT <= tenant.weight <= MAX_WEIGHT:
                raise ValueError(f"tenant {name!r}: weight is {tenant.weight}, not {MIN_WEIGHT:g} to {MAX_WEIGHT:g}")
            if not 0.0 <= tenant.share <= 1.0:
                raise ValueError(f"tenant {name!r}: share is {tenant.share}")
        if sum(tenant.share for tenant in self.tenants.values()) > 1.0 + 1e-9:
            raise ValueError("the tenants' shares are more than 1 in sum")

    def exceeded(self, level: RequestClass, of_class: QueuedAmount, of_all: QueuedAmount, cost: int = 1) -> str:
        """The bound that keeps out one more request of this class with `cost` tokens, and how much waits: "256 of 256
        requests wait"; empty: none does."""
        bound = self.classes.get(level, ClassBound())
        bounds = (
            ("requests", of_all.requests, 1, self.max_queued),
            (f"{level.label} requests", of_class.requests, 1, bound.max_queued),
            ("tokens", of_all.tokens, cost, self.max_queued_tokens),
            (f"tokens of {level.label} requests", of_class.tokens, cost, bound.max_queued_tokens),
        )
        found = (f"{waiting} of {most} {unit} wait" for unit, waiting, more, most in bounds
                 if most is not None and waiting + more > most)  # fmt: skip
        return next(found, "")

    @property
    def has_zero_bound(self) -> bool:
        """Whether some requests may not wait at all, not even for credit that another router has to return."""
        return any(0 in (bound.max_queued, bound.max_queued_tokens) for bound in self._bounds())

    def longest_wait_s(self, *, has_begun: bool) -> float:
        """The longest permitted wait of a request."""
        return self.max_wait_s + (BEGUN_WAIT_S if has_begun else 0.0)

    def weight(self, tenant: str) -> float:
        known = self.tenants.get(tenant)
        return DEFAULT_WEIGHT if known is None else known.weight

    def _bounds(self) -> tuple[QueuePolicy | ClassBound, ...]:
        """Those of the whole queue, and those of single classes."""
        return self, *self.classes.values()
