"""The bounds of a waiting line and the rights of its tenants: frozen values, checked when they are made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from serve_app.types import RequestClass

DEFAULT_NO_REPLICA_WAIT_S = 30.0  # a replica that crashed is back in less if its model is small; else say so
TRICKLE_SHARE = 0.05  # of granted tokens: keeps a batch alive under overload, and a person hardly notices it
MAX_HEADROOM_SHARE = 0.5  # beyond, the classes that pay for it would be the exception
DEFAULT_WEIGHT = 1.0  # tenants are equal until somebody says otherwise


@dataclass(frozen=True, slots=True)
class ClassBound:
    """How much of one class may wait, by the class that was claimed; None: only the whole line is bounded."""

    max_queued: int | None = None
    max_queued_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class TenantPolicy:
    """What one tenant may have.

    Args:
        weight: its part of a class under overload, relative to the other tenants' weights.
        share: the part of all slots and KV tokens that is its own as soon as it asks; others may use it meanwhile.
    """

    weight: float = DEFAULT_WEIGHT
    share: float = 0.0


@dataclass(frozen=True, slots=True)
class Policy:
    """The bounds of a line.

    Args:
        max_queued: requests that may wait; 0: whoever cannot run at once is refused.
        max_wait_s: the longest wait, in seconds.
        no_replica_wait_s: how long a request waits while no replica has a slot at all.
        max_queued_tokens: estimated tokens that may wait; None: any.
        classes: bounds of single classes, on top.
        tenants: weights and guaranteed shares; who is not named has weight 1 and no share.
        trickle_share: the guaranteed minimum share: of granted tokens, for each class that waits.
        headroom_share: of all slots, at most, kept free for the classes from `high` up while these come; 0: none.

    Raises:
        ValueError: a bound out of range, or shares above 1 in sum.
    """

    max_queued: int
    max_wait_s: float
    no_replica_wait_s: float = DEFAULT_NO_REPLICA_WAIT_S
    max_queued_tokens: int | None = None
    classes: Mapping[RequestClass, ClassBound] = field(default_factory=dict)
    tenants: Mapping[str, TenantPolicy] = field(default_factory=dict)
    trickle_share: float = TRICKLE_SHARE
    headroom_share: float = 0.0

    def __post_init__(self) -> None:
        bounds: list[tuple[int | None, int | None]] = [(self.max_queued, self.max_queued_tokens)]
        bounds += [(bound.max_queued, bound.max_queued_tokens) for bound in self.classes.values()]
        for requests, tokens in bounds:
            if requests is not None and requests < 0:
                raise ValueError(f"max_queued is {requests}")
            if tokens is not None and tokens < 0:
                raise ValueError(f"max_queued_tokens is {tokens}")
        if not all(wait_s > 0 for wait_s in (self.max_wait_s, self.no_replica_wait_s)):
            raise ValueError("every wait must be above zero")
        if not 0.0 <= self.trickle_share * (len(RequestClass) - 1) < 1.0:
            raise ValueError(f"trickle_share is {self.trickle_share}: nothing would be left for the highest class")
        if not 0.0 <= self.headroom_share <= MAX_HEADROOM_SHARE:
            raise ValueError(f"headroom_share is {self.headroom_share}, at most {MAX_HEADROOM_SHARE} can be kept")
        for name, tenant in self.tenants.items():
            if not tenant.weight > 0:
                raise ValueError(f"tenant {name!r}: weight is {tenant.weight}")
            if not 0.0 <= tenant.share <= 1.0:
                raise ValueError(f"tenant {name!r}: share is {tenant.share}")
        if sum(tenant.share for tenant in self.tenants.values()) > 1.0 + 1e-9:
            raise ValueError("the tenants' shares are more than 1 in sum")

    @property
    def turns_away(self) -> bool:
        """Whether some requests may not wait at all, not even for a place that another router has to give back."""
        return 0 in (
            self.max_queued,
            self.max_queued_tokens,
            *(bound.max_queued for bound in self.classes.values()),
            *(bound.max_queued_tokens for bound in self.classes.values()),
        )

    def weight(self, tenant: str) -> float:
        known = self.tenants.get(tenant)
        return DEFAULT_WEIGHT if known is None else known.weight
