"""How routers divide a pool: what each is told, and that what is given never exceeds what there is."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from serve_app.core.memory.leases import Device, Hold, Kind
from serve_app.core.memory.ledger import Ledger
from serve_app.core.memory.shares import SPARE_PARTS, PoolReport, Shares
from serve_app.errors import LeaseNotFound

POOL, TOKENS = "engine", 1600
LIMIT = TOKENS - TOKENS // 10  # what is not kept for growth
SPARE = LIMIT // SPARE_PARTS


@dataclass
class Router:
    """One that does as it is told, at once."""

    shares: Shares
    name: str
    version: int = 0
    target: int = 0

    def say(self, used: int = 0, want: int = 0, *, frozen: bool = False) -> int:
        told = PoolReport(POOL, self.version, max(self.target, used), used, want)
        reply, _ = self.shares.report(self.name, told, frozen=frozen)
        if reply.version > self.version:
            self.version, self.target = reply.version, reply.target
        return self.target


class Pool:
    def __init__(self) -> None:
        self.ledger = Ledger()
        self.ledger.add_device(Device("n", 0, 100, 0))
        for owner in (POOL, "a", "b", "c"):
            self.ledger.join(owner, 1e6, 0.0)
        self.ledger.reserve(POOL, Kind.ENGINE, POOL, [Hold("n/0", 100)])
        self.ledger.commit(POOL, TOKENS)
        self.shares = Shares(self.ledger)
        self.routers = {name: Router(self.shares, name) for name in ("a", "b", "c")}

    def held(self) -> int:
        return self.ledger.lease(POOL).held


def test_a_share_has_room_above_what_is_used_and_wanted() -> None:
    pool = Pool()
    a = pool.routers["a"]
    assert a.say(want=1) == 1 + SPARE
    assert a.say(used=50) == 1 + SPARE, "what is enough is left alone"
    assert a.say(used=50, want=200) == 250 + SPARE
    assert pool.held() == 250 + SPARE


def test_what_is_far_above_the_need_is_given_back() -> None:
    pool = Pool()
    a = pool.routers["a"]
    a.say(want=1000)
    assert a.say(used=10) == 10 + SPARE
    assert pool.held() == 1000 + SPARE, "the ledger follows what the router says, not what it was told"
    a.say(used=10)
    assert pool.held() == 10 + SPARE


def test_a_short_pool_is_divided_equally_among_those_who_want() -> None:
    pool = Pool()
    a, b = pool.routers["a"], pool.routers["b"]
    assert a.say(want=10_000) == LIMIT
    assert b.say(want=10_000) == 0
    assert a.say(want=10_000) == LIMIT // 2
    a.say(want=10_000)
    assert b.say(want=10_000) == LIMIT - LIMIT // 2
    assert pool.held() <= TOKENS


def test_who_wants_more_is_to_know_when_another_has_given_it_back() -> None:
    pool = Pool()
    a, b = pool.routers["a"], pool.routers["b"]
    a.say(want=10_000)
    b.say(want=500)
    told = PoolReport(POOL, a.version + 1, 0, 0, 0)
    assert pool.shares.report("a", told)[1] == ["b"]
    assert pool.shares.report("a", told)[1] == [], "once"
    assert b.say(want=500) == 500


def test_what_is_in_use_is_not_taken() -> None:
    pool = Pool()
    a, b = pool.routers["a"], pool.routers["b"]
    a.say(want=10_000)
    a.say(used=LIMIT)
    b.say(want=10_000)
    told = PoolReport(POOL, a.version + 1, LIMIT, LIMIT, 0)  # it has heard of its lower target and uses more
    pool.shares.report("a", told)
    assert b.say(want=10_000) == 0
    assert pool.held() == LIMIT


def test_a_router_that_was_silent_gets_back_what_is_still_free() -> None:
    pool = Pool()
    a, b = pool.routers["a"], pool.routers["b"]
    a.say(want=1000)
    pool.ledger.leave("a")
    pool.shares.leave("a")
    b.say(want=800)
    pool.ledger.join("a", 1e6, 0.0)
    a.say(used=1000)
    assert pool.held() <= TOKENS
    assert pool.shares.overdrawn_tokens == 1000 + SPARE - (TOKENS - 800 - SPARE), "what it went by all the same"


def test_nothing_new_is_given_while_frozen_and_what_is_presented_is_kept() -> None:
    pool = Pool()
    a = pool.routers["a"]
    a.version, a.target = 7, 300
    assert a.say(used=10, want=500, frozen=True) == 300
    assert pool.held() == 300


def test_a_late_word_under_an_older_version_lowers_nothing() -> None:
    pool = Pool()
    a = pool.routers["a"]
    old = PoolReport(POOL, 0, 0, 0, 1)
    a.say(want=500)
    pool.shares.report("a", old)
    assert pool.held() >= 500


def test_while_somebody_else_waits_no_share_grows_and_what_is_unused_comes_back() -> None:
    pool = Pool()
    a, b = pool.routers["a"], pool.routers["b"]
    a.say(want=500)
    a.say(used=100, want=400)
    assert pool.shares.recall(POOL) == ["a"]
    a.target, a.version = 100, a.version + 1
    a.say(used=100)
    assert pool.held() == 100
    assert b.say(want=50) == 0
    pool.shares.report("b", PoolReport(POOL, b.version, 0, 0, 50))
    assert pool.shares.reopen(POOL) == ["b"]
    assert b.say(want=50) == 50 + SPARE


def test_a_pool_that_is_not_there_is_an_error_and_leaves_nothing_behind() -> None:
    pool = Pool()
    with pytest.raises(LeaseNotFound):
        pool.shares.report("a", PoolReport("other", 0, 0, 0, 1))
    assert pool.shares.targets("a") == []


def test_a_pool_and_a_router_that_left_are_forgotten() -> None:
    pool = Pool()
    for router in pool.routers.values():
        router.say(want=10)
    pool.shares.leave("a")
    assert pool.shares.drop(POOL) == ["b", "c"]
    assert pool.shares.targets("b") == []
    assert pool.shares.used(POOL) == 0


@pytest.mark.parametrize(("limit", "used", "want"), [(1, 2, 0), (1, -1, 0), (1, 1, -1)])
def test_a_word_that_makes_no_sense_is_refused(limit: int, used: int, want: int) -> None:
    with pytest.raises(ValueError, match=f"pool '{POOL}'"):
        Pool().shares.report("a", PoolReport(POOL, 0, limit, used, want))
