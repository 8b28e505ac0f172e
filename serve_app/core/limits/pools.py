"""One limited amount of one scope, as the quota actor counts it: a bucket, an allowance of a period, or a concurrency.

- `level`: what is left here. A reservation is charged when it is made, so a bucket's level may be below zero: it says
  how long the line of reservations is (virtual scheduling, as in GCRA, ITU-T I.371).
- `reserved`: charged for reservations that are not over.
- `spare`: what came back while the level was below zero (refunds, estimates that were too high, reservations given up).
  Requests that are here now may take it, since those with a reservation keep the moment they were told.
- Slack: a reservation waits for the last of its pools, so the others have more than all reservations need by their
  moments. The least such surplus may be taken, too, as far as it is here already.
- `credit`: what routers may charge without asking, by router; of a concurrency also what their requests hold.

Invariant: level + spare + reserved + credit <= capacity. So what is charged in any window of t seconds is at most
capacity + rate x t, plus what requests used beyond their estimates: a debt, which the next ones pay.
"""

from __future__ import annotations

from serve_app.core.keyed_heap import KeyedHeap
from serve_app.core.limits.policy import BUCKETS, Kind, Limits

ROUNDING = 1e-6  # of floats: a bucket with 0.9999999 of a request has one


class Pool:
    """See the module.

    Args:
        level: at the beginning.
    """

    def __init__(self, kind: Kind, limits: Limits, level: float, now: float) -> None:
        self.kind = kind
        self.capacity = limits.capacities()[kind]
        self.rate = limits.rate(kind)
        self.level = level
        self.spare = self.reserved = 0.0
        self.credit: dict[str, float] = {}
        self._refilled_at = now
        self._slacks = KeyedHeap()  # of each reservation, plus what was `_taken` before it was made
        self._taken = 0.0  # of the level, by others than reservations

    @property
    def balance(self) -> float:
        """What is not used: never above the capacity."""
        present = self.level + self.reserved + self.spare
        return present + sum(self.credit.values()) if self.credit else present

    @property
    def present(self) -> float:
        """What has come and is in no router's hands. A reservation given up before it was covered is spare, and not
        present: others used more than their estimates, or the actor has restarted."""
        return self.level + self.reserved + self.spare

    @property
    def available(self) -> float:
        """What a request that is here now may take. O(log n), amortised."""
        free = self.level
        least = self._slacks.peek()
        if free < 0.0 and least is not None:
            free = least[0][0] - self._taken
        if free < 0.0:
            free = 0.0
        free += self.spare
        present = self.level + self.reserved + self.spare
        return max(free if free < present else present, 0.0)

    @property
    def is_whole(self) -> bool:
        """Whether it is as a new one, so that nothing is lost with it."""
        return self.level >= self.capacity - ROUNDING

    def has(self, need: float) -> bool:
        return need <= self.level or need <= 0.0 or self.available >= need - ROUNDING

    def refill(self, now: float) -> None:
        """Add what has come since the last call; for pools that have a rate. A clock that steps back adds nothing."""
        gone_s = now - self._refilled_at
        if gone_s <= 0.0:
            return
        self._refilled_at = now
        present = self.level + self.reserved + self.spare  # `balance`, without its call
        more = self.rate * gone_s
        room = self.capacity - (present + sum(self.credit.values()) if self.credit else present)
        if room > 0.0:
            self.level += more if more < room else room
        if self.spare:
            self._settle_spare()

    def take(self, need: float) -> None:
        """Charge a request that is here now, of the spare first."""
        if self.spare:
            of_spare = min(self.spare, need)
            self.spare -= of_spare
            need -= of_spare
        self._lower(need)

    def put(self, amount: float) -> None:
        """Take back an amount; a negative one is a debt."""
        if amount < 0.0:
            self.take(-amount)
            return
        self._add(amount, max(0.0, -(self.level + self.reserved)))

    def overflow(self) -> None:
        """Drop what no longer fits: a refund to a bucket that has refilled since."""
        over = self.balance - self.capacity
        if over > 0.0:
            of_spare = min(self.spare, over)
            self.spare -= of_spare
            self._lower(over - of_spare)

    def reserve(self, number: str, need: float, in_s: float) -> None:
        """Charge a reservation for a moment `in_s` from now, at which the level covers it."""
        self.level -= need
        self.reserved += need
        self._slacks.set(number, (self.level + self.rate * in_s + self._taken,))

    def release(self, number: str, need: float, *, is_used: bool) -> None:
        """End a reservation: its request runs, or it is given up."""
        self._slacks.discard(number)
        debt = max(0.0, -(self.level + self.reserved))
        self.reserved -= need
        if not is_used:
            self._add(need, debt)
        self._settle_spare()

    def undo(self, number: str, need: float) -> None:
        """Undo the newest reservation."""
        self._slacks.discard(number)
        self.reserved -= need
        self.level += need
        self._settle_spare()

    def wait_s(self, need: float) -> float:
        """Seconds until a reservation of this much that is made now is covered."""
        missing = need - self.level
        return max(0.0, missing / self.rate) if self.rate and missing > ROUNDING else 0.0

    def debt_s(self, need: float) -> float:
        """Seconds until this much of what is reserved is there, whatever its moment was."""
        missing = need - self.present
        return max(missing / self.rate, ROUNDING) if self.rate and missing > ROUNDING else 0.0

    def renew(self) -> None:
        """A new day or month begins: all is there but what is in other hands."""
        self.spare = 0.0
        self.level = self.capacity - self.reserved - sum(self.credit.values())

    def change(self, limits: Limits) -> None:
        """Take over a changed limit; what was used stays used."""
        capacity = limits.capacities()[self.kind]
        self.level += capacity - self.capacity
        self.capacity = capacity
        self.rate = limits.rate(self.kind)

    def drop_router(self, router: str, *, returns: bool) -> None:
        """A router is gone; `returns`: its credit comes back, otherwise it counts as used."""
        had = self.credit.pop(router, 0.0)
        if returns:
            self.put(had)

    def _add(self, amount: float, debt: float) -> None:
        """Add what comes back: it pays the debt first."""
        paid = min(amount, debt)
        self._lower(-paid)
        self.spare += amount - paid
        self._settle_spare()
        self.overflow()

    def _settle_spare(self) -> None:
        """Without a line, the spare is part of the level."""
        if self.spare and (self.level >= 0.0 or self.reserved <= ROUNDING):
            self._lower(-self.spare)
            self.spare = 0.0

    def _lower(self, amount: float) -> None:
        """Lower the level by what no reservation has."""
        self.level -= amount
        self._taken += amount


def new_pools(limits: Limits, now: float, empty_since: float | None) -> dict[Kind, Pool]:
    """The pools of a scope. `empty_since`: its buckets have what has refilled since; None: they are whole."""
    pools = {kind: Pool(kind, limits, capacity, now) for kind, capacity in limits.capacities().items()}
    for kind in BUCKETS:
        if kind in pools and empty_since is not None:
            pools[kind].level = min(pools[kind].capacity, pools[kind].rate * (now - empty_since))
    return pools
