"""What a request is charged, what its router is lent of its scopes, and the first moment at which one is covered."""

from __future__ import annotations

from serve_app.core.limits.policy import ALLOWANCES, Amounts, Kind
from serve_app.core.limits.scopes import Scope

MORE = 4  # requests: with credit for fewer, asking for each costs about the same
MAX_MORE = 256
ALLOWANCE_CREDIT = 0.01  # of an allowance, at most, with one router: it is lost for the day if that router dies
EARLY_SLOT = 0.75  # of the estimated moment of a free slot: who comes early waits here, who comes late wastes it


def charge(scopes: list[Scope], router: str, need: Amounts, routers: int) -> tuple[int, int]:
    """Charge a request that is here now, and give its router credit where plenty is left: see `credit`."""
    for scope in scopes:
        for kind, pool in scope.pools.items():
            pool.take(need[kind])
            if kind is Kind.CONCURRENT:
                pool.credit[router] = pool.credit.get(router, 0.0) + 1.0
    more, slots = credit(scopes, router, need, routers)
    for scope in scopes:
        if more:
            scope.is_near = False
            scope.recalled = set()
        for kind, pool in scope.pools.items():
            given = float(slots) if kind is Kind.CONCURRENT else more * need[kind]
            if given:
                pool.level -= given
                pool.credit[router] = pool.credit.get(router, 0.0) + given
    return more, slots


def credit(scopes: list[Scope], router: str, need: Amounts, routers: int) -> tuple[int, int]:
    """Requests like this one for which the router gets credit, and slots of concurrency: while nobody waits, half of
    what is left, over all routers."""
    more = float(MAX_MORE)
    slots = MAX_MORE
    for scope in scopes:
        if scope.entries or scope.undecided or not scope.is_known:
            return 0, 0
        for kind, pool in scope.pools.items():
            if kind is Kind.CONCURRENT:
                slots = min(slots, int(scope.slots_kept(routers) - pool.credit[router]), int(pool.level))
                more = 0.0 if pool.level < routers else more
            elif need[kind]:
                given = pool.level / (2 * routers)
                if kind in ALLOWANCES:
                    given = min(given, ALLOWANCE_CREDIT * pool.capacity - pool.credit.get(router, 0.0))
                more = min(more, given / need[kind])
    if more < MORE:
        return 0, 0
    has_slots = any(Kind.CONCURRENT in scope.pools for scope in scopes)
    return int(more), max(0, min(slots, int(more))) if has_slots else 0


def first_moment(scopes: list[Scope], need: Amounts, mean_s: float) -> tuple[float, Scope, Kind]:
    """Seconds until a reservation that is made now is covered, and the limit that covers it last. Of a concurrency they
    are an estimate, by how long requests run (`mean_s`)."""
    wait_s = 0.0
    last_scope = scopes[0]
    last_kind = Kind.CONCURRENT
    for scope in scopes:
        for kind, pool in scope.pools.items():
            if kind is Kind.CONCURRENT:
                position = len(scope.entries) + 1 if pool.level < 1.0 else 0
                found_s = EARLY_SLOT * mean_s * position / pool.capacity
            else:
                found_s = pool.wait_s(need[kind])
            if found_s > wait_s:
                wait_s = found_s
                last_scope = scope
                last_kind = kind
    return wait_s, last_scope, last_kind
