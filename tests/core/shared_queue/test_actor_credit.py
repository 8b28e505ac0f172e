"""Slots and KV tokens of a router on an engine, as its pool has them."""

from __future__ import annotations

import pytest

from serve_app.core.memory import Device, Hold, LeaseKind, Ledger
from serve_app.core.shared_queue.actor_credit import ActorCredit
from serve_app.core.shared_queue.messages import Amount
from serve_app.errors import InsufficientMemory, LeaseNotFound


def book(slots: int = 4, tokens: int = 100) -> Ledger:
    ledger = Ledger()
    ledger.add_device(Device("n", 0, 1000, 0))
    ledger.join("e", 10.0, 0.0)
    ledger.reserve("e", LeaseKind.ENGINE, "e", [Hold("n/0", 1000)])
    ledger.commit("e", tokens)
    ledger.open_pool("e", slots)
    for router in ("a", "b"):
        ledger.join(router, 4.0, 0.0)
    return ledger


def test_an_account_is_in_its_pool_whole_and_leaves_nothing_behind() -> None:
    ledger = book()
    accounts = ActorCredit(ledger)
    accounts.charge("a", "e", 2, 50)
    accounts.charge("a", "e", 1, 10)
    assert (accounts.account("a", "e"), accounts.free("e")) == ((3, 60), (1, 30))
    accounts.give_back("a", "e", 1, 60)
    assert (accounts.account("a", "e"), accounts.free("e")) == ((2, 0), (2, 90))
    accounts.give_back("a", "e", 9, 9)
    assert (accounts.account("a", "e"), accounts.free("e")) == ((0, 0), (4, 90))
    assert accounts.amounts("a") == ()
    pool = ledger.pool("e")
    assert pool is not None
    assert pool.accounts == {}


def test_what_does_not_fit_in_one_of_the_two_is_charged_in_neither() -> None:
    accounts = ActorCredit(book())
    accounts.charge("a", "e", 1, 80)
    for slots, tokens in ((4, 1), (1, 11)):
        with pytest.raises(InsufficientMemory):
            accounts.charge("b", "e", slots, tokens)
        with pytest.raises(InsufficientMemory):
            accounts.charge("a", "e", slots, tokens)
        assert (accounts.account("a", "e"), accounts.account("b", "e"), accounts.free("e")) == (
            (1, 80),
            (0, 0),
            (3, 10),
        )
    accounts.charge("a", "e", 0, 20, growth=True)
    assert accounts.free("e") == (3, 0)


def test_a_router_that_says_more_than_there_is_gets_what_there_is() -> None:
    accounts = ActorCredit(book())
    accounts.charge("b", "e", 3, 70)
    assert accounts.book("a", [Amount("e", 2, 60)]) == [Amount("e", 1, 30)]
    assert (accounts.account("a", "e"), accounts.overdrawn) == ((1, 30), 30)
    assert accounts.book("a", [Amount("e", 1, 10)]) == []
    assert accounts.account("a", "e") == (1, 10)
    assert accounts.book("a", [Amount("gone", 1, 10)]) == [Amount("gone", 1, 10)]
    assert accounts.amounts("a") == ()


def test_accounts_of_an_ended_incarnation_stay_until_the_router_reports_again() -> None:
    accounts = ActorCredit(book())
    holder = accounts.holder("a")
    accounts.charge("a", "e", 2, 50)
    accounts.close("a")
    pool = next(iter(holder.accounts.values())).pool
    assert pool.give_back(holder, 1, 10) == (0, 0)
    pool.charge(holder, 1, 10)
    assert (accounts.account("a", "e"), accounts.free("e")) == ((2, 50), (2, 40))
    assert accounts.book("a", [Amount("e", 1, 20)]) == []
    pool.charge(holder, 1, 10)  # a request that is still to be forgotten
    pool.give_back(holder, 1, 10)
    assert (accounts.account("a", "e"), accounts.free("e")) == ((1, 20), (3, 70))


def test_accounts_end_with_their_router_and_their_engine() -> None:
    ledger = book()
    accounts = ActorCredit(ledger)
    accounts.charge("a", "e", 2, 50)
    accounts.charge("b", "e", 1, 0)
    accounts.remove_router("a")
    assert (accounts.free("e"), accounts.take_returned()) == ((3, 90), {"e": None})
    accounts.remove_router("b")
    accounts.charge("a", "e", 1, 1)
    ledger.end("e")
    assert accounts.remove_engine("e") == {"a": (1, 1)}
    assert (accounts.free("e"), accounts.amounts("a")) == ((0, 0), ())
    with pytest.raises(LeaseNotFound, match="'e' does not run"):
        accounts.charge("a", "e", 1, 1)


def test_what_requests_hold_is_the_sum_of_each_routers_last_report() -> None:
    accounts = ActorCredit(book())
    accounts.report_in_use("a", (Amount("e", 1, 10), Amount("f", 2, 20)))
    accounts.report_in_use("b", (Amount("e", 1, 5),))
    assert (accounts.in_use("e"), accounts.in_use("f")) == ((2, 15), (2, 20))
    accounts.report_in_use("a", (Amount("e", 3, 30),))
    assert (accounts.in_use("e"), accounts.in_use("f")) == ((4, 35), (0, 0))
    accounts.remove_router("b")
    assert accounts.in_use("e") == (3, 30)
