"""The scopes of the quota actor, each with its pools, and the calendar of the allowances.

Invariant: an allowance begins anew once for each day and month of UTC, also if the clock is set back, and goes on to
do so after a reading that was wrong.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from serve_app.core.limits.messages import UNCOUNTED, UNHEARD, LimitState, ScopeAccount, Version
from serve_app.core.limits.policy import ALLOWANCES, NO_KINDS, NOTHING, Amounts, Kind, Limits, Period
from serve_app.core.limits.pools import ROUNDING, Pool, new_pools

DAY_S = 86_400.0

Key = tuple[tuple[str, ...], bytes]  # scopes, and the fingerprint of a request
LONGEST_MONTH = 31  # days


@dataclass(slots=True)
class Scope:
    """One scope.

    Args:
        pools: of its limits, by kind.
        is_near: no router keeps credit of it; `recalled`: routers that have not given it back yet.
        waiting: numbers of the requests here that wait for it, in order.
        entries: numbers of all its reservations, in order.
        told: moments that clients were told of which nothing is reserved, by request.
        undecided: requests that wait for an answer before they can be decided.
        unknown: allowances of which it is not counted what was used; until then no request is charged here.
    """

    name: str
    limits: Limits
    pools: dict[Kind, Pool]
    version: Version = UNHEARD
    is_near: bool = False
    recalled: set[str] = field(default_factory=set)
    waiting: dict[str, None] = field(default_factory=dict)
    entries: dict[str, None] = field(default_factory=dict)
    estimates: dict[Key, list[float]] = field(default_factory=dict)
    undecided: int = 0
    unknown: frozenset[Kind] = NO_KINDS
    refilled_at: float | None = None

    def refill(self, now: float) -> None:
        if now == self.refilled_at:
            return
        self.refilled_at = now
        for pool in self.pools.values():
            if pool.rate:
                pool.refill(now)

    def change(self, limits: Limits, now: float) -> frozenset[Kind]:
        """Take over changed limits; what was used of those that stay is kept. Returns the new allowances."""
        wanted = limits.capacities()
        added = (wanted.keys() - self.pools.keys()) & set(ALLOWANCES)
        for kind in self.pools.keys() - wanted.keys():
            del self.pools[kind]
        for kind, capacity in wanted.items():
            if kind in self.pools:
                self.pools[kind].change(limits)
            else:
                self.pools[kind] = Pool(kind, limits, capacity, now)
        self.pools = {kind: self.pools[kind] for kind in sorted(self.pools)}
        self.limits = limits
        self.unknown = self.unknown & wanted.keys()
        return frozenset(added)

    @property
    def is_known(self) -> bool:
        """Whether requests can be charged here."""
        return not self.unknown

    @property
    def is_idle(self) -> bool:
        """Whether it is as a new one."""
        return not self.entries and not self.undecided and all(pool.is_whole for pool in self.pools.values())

    def credit_of(self, router: str) -> list[float]:
        """What a router has of each pool; not of the concurrency, which its requests may hold."""
        return [pool.credit.get(router, 0.0) for kind, pool in self.pools.items() if kind is not Kind.CONCURRENT]

    def holders(self, kinds: Iterable[Kind], router: str) -> set[str]:
        """The other routers with credit of these pools."""
        found = (name for kind in kinds for name, had in self.pools[kind].credit.items() if had > 0.0)
        return {name for name in found if name != router}

    def state(self, version: Version, routers: int, period: Period) -> LimitState:
        level = [UNCOUNTED] * len(Kind)
        left = list(NOTHING)
        for kind, pool in self.pools.items():
            free = pool.level + pool.spare
            if kind not in self.unknown:
                level[kind] = free + pool.reserved
            left[kind] = free + sum(pool.credit.values()) if pool.credit else free
        kept = self.slots_kept(routers)
        return LimitState(self.name, version, tuple(level), tuple(left), self.is_near, kept, period)

    def slots_kept(self, routers: int) -> int:
        """Concurrency that each router may keep while the scope is not near: half of it over all routers, or one."""
        pool = self.pools.get(Kind.CONCURRENT)
        return 0 if pool is None else max(1, int(pool.capacity) // (2 * max(1, routers)))

    def report(self, router: str, spent: Amounts, returned: Amounts) -> None:
        """A router has spent credit, and gives some back."""
        for kind, pool in self.pools.items():
            had = pool.credit.pop(router, 0.0)
            back = returned[kind]
            if kind is Kind.CONCURRENT:
                back = min(back, had)  # a slot that was taken before there was this limit is nobody's
            had -= spent[kind] + back
            if abs(had) > ROUNDING:
                pool.credit[router] = had
            if back:
                pool.put(back)
            if spent[kind] < 0.0:  # what was refunded to its credit
                pool.overflow()

    def book(self, router: str, account: Amounts) -> None:
        """Book a router's account as it is by its own report; the rest of what it had is used."""
        for kind, pool in self.pools.items():
            pool.drop_router(router, returns=kind is Kind.CONCURRENT)
            if account[kind]:
                pool.credit[router] = account[kind]
                if kind is Kind.CONCURRENT:
                    pool.level -= account[kind]
            pool.overflow()


def restored(
    account: ScopeAccount, credit: Amounts, calendar: Calendar, now: float, empty_since: float | None
) -> tuple[Scope, frozenset[Kind]]:
    """A scope after a restart of the actor, by the newest state that a router had received of it; and the allowances of
    which no router knows what was used. What was not heard of is as in a new scope.

    Args:
        credit: of all routers, by their reports.
        empty_since: see `new_pools`.
    """
    pools = new_pools(account.limits, now, empty_since)
    unheard = set[Kind]()
    for kind, pool in pools.items():
        if kind is Kind.CONCURRENT:
            continue  # what requests hold of it is in the accounts
        whole = pool.capacity - credit[kind]
        level = account.level[kind]
        if account.version == UNHEARD or level == UNCOUNTED:
            pool.level = min(pool.level, whole)
            unheard |= {kind} & set(ALLOWANCES)
        elif kind in ALLOWANCES and account.age_s > calendar.begun_s(kind, now):
            pool.level = whole
        else:
            pool.level = min(level + pool.rate * account.age_s, whole)
    return Scope(account.scope, account.limits, pools), frozenset(unheard)


class Calendar:
    """The present day and month of UTC, of a wall clock that may be wrong. Days are counted from 1970-01-01."""

    def __init__(self) -> None:
        self._offset_s = 0.0  # of the wall clock to the monotonic one
        self.day = self.month = -1  # the latest ones so far; the month as its first day

    def set_clock(self, wall_s: float, now: float) -> set[Kind]:
        """Set the clock; returns the allowances that begin anew. `wall_s`: seconds since 1970."""
        self._offset_s = wall_s - now
        day = int(wall_s // DAY_S)
        month = day - civil_date(day)[2] + 1
        renewed = set[Kind]()
        if day < self.day - 1:  # no correction around midnight: an earlier reading was wrong, and renewed too early
            self.day = day
            self.month = month
        if day > self.day:
            renewed |= {Kind.REQUESTS_OF_DAY, Kind.TOKENS_OF_DAY} if self.day >= 0 else set()
            self.day = day
        if month > self.month:
            renewed |= {Kind.COST_OF_MONTH} if self.month >= 0 else set()
            self.month = month
        return renewed

    @property
    def period(self) -> Period:
        return self.day, self.month

    def begun_s(self, kind: Kind, now: float) -> float:
        """Seconds since an allowance began anew."""
        return now + self._offset_s - self._first_day(kind, now) * DAY_S

    def reset_s(self, kind: Kind, now: float) -> float:
        """Seconds until an allowance begins anew."""
        first = self._first_day(kind, now)
        days = 1
        if kind is Kind.COST_OF_MONTH:
            days = LONGEST_MONTH - civil_date(first + LONGEST_MONTH)[2] + 1
        return days * DAY_S - self.begun_s(kind, now)

    def first_day(self, kind: Kind) -> str:
        """The day on which an allowance began anew, as `2026-11-25`."""
        return "{:04}-{:02}-{:02}".format(*civil_date(self.month if kind is Kind.COST_OF_MONTH else self.day))

    def _first_day(self, kind: Kind, now: float) -> int:
        day = int((now + self._offset_s) // DAY_S)
        return day - civil_date(day)[2] + 1 if kind is Kind.COST_OF_MONTH else day


def civil_date(day: int) -> tuple[int, int, int]:
    """Year, month and day of the month, from days since 1970-01-01 (H. Hinnant, chrono-compatible low-level date
    algorithms, 2021): years begin in March there, so that the leap day is their last."""
    era, of_era = divmod(day + 719_468, 146_097)
    year = (of_era - of_era // 1460 + of_era // 36_524 - of_era // 146_096) // 365
    of_year = of_era - (365 * year + year // 4 - year // 100)
    march_month = (5 * of_year + 2) // 153
    month = march_month + 3 if march_month < 10 else march_month - 9
    return year + era * 400 + (month <= 2), month, of_year - (153 * march_month + 2) // 5 + 1


def version_counter(epoch: int) -> Iterator[Version]:
    return ((epoch, number) for number in itertools.count(1))
