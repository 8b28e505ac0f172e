"""Slots and KV tokens of a router on an engine, as the ledger has them."""

from __future__ import annotations

import pytest

from serve_app.core.memory import Device, Hold, LeaseKind, Ledger, Phase, slots_of
from serve_app.core.shared_queue.actor_credit import ActorCredit
from serve_app.core.shared_queue.messages import Amount
from serve_app.errors import InsufficientMemory, LeaseConflict, LeaseNotFound


def book(slots: int = 4, tokens: int = 100) -> Ledger:
    ledger = Ledger()
    ledger.add_device(Device("n", 0, 1000, 0))
    ledger.join("e", 10.0, 0.0)
    ledger.reserve("e", LeaseKind.ENGINE, "e", [Hold("n/0", 1000)])
    ledger.commit("e", tokens)
    ledger.open_slots("e", slots)
    for router in ("a", "b"):
        ledger.join(router, 4.0, 0.0)
    return ledger


def test_slots_are_a_pool_that_takes_nothing_of_its_engine_and_ends_with_it() -> None:
    ledger = book()
    assert (ledger.free("e"), ledger.free(slots_of("e"))) == (90, 4)
    ledger.reserve("x", LeaseKind.SHARE, "a", [Hold(slots_of("e"), 3)])
    assert (ledger.free("e"), ledger.free(slots_of("e"))) == (90, 1)
    ended = ledger.end("e", memory_gone=False)
    assert [lease.lease_id for lease in ended] == ["x", slots_of("e"), "e"]
    assert ledger.lease("e").phase is Phase.ENDING
    with pytest.raises(LeaseConflict):
        ledger.open_slots("e", 4)
    ledger.revive("e")
    ledger.commit("e", 100)
    ledger.open_slots("e", 2)
    assert ledger.free(slots_of("e")) == 2


def test_slots_of_an_engine_that_does_not_run_cannot_be_opened() -> None:
    ledger = book()
    with pytest.raises(LeaseNotFound):
        ledger.open_slots("other", 1)
    with pytest.raises(ValueError, match="-1"):
        ledger.open_slots("e", -1)


def test_an_account_is_in_the_ledger_whole_and_leaves_nothing_behind() -> None:
    ledger = book()
    accounts = ActorCredit(ledger)
    accounts.charge("a", "e", 2, 50)
    accounts.charge("a", "e", 1, 10)
    assert (accounts.account("a", "e"), accounts.free("e")) == ((3, 60), (1, 30))
    accounts.give_back("a", "e", 1, 60)
    assert (accounts.account("a", "e"), accounts.free("e")) == ((2, 0), (2, 90))
    accounts.give_back("a", "e", 9, 9)
    assert (accounts.account("a", "e"), accounts.free("e")) == ((0, 0), (4, 90))
    assert accounts.by_router == {}
    assert len(list(ledger.leases())) == 2


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
    assert accounts.book("a", "e", 2, 60) == (1, 30)
    assert accounts.overdrawn == 30
    assert accounts.book("a", "e", 1, 10) == (1, 10)
    assert accounts.book("a", "gone", 1, 10) == (0, 0)


def test_accounts_end_with_their_router_and_their_engine() -> None:
    ledger = book()
    accounts = ActorCredit(ledger)
    accounts.charge("a", "e", 2, 50)
    accounts.charge("b", "e", 1, 0)
    assert accounts.remove_router("a") == ["e"]
    assert accounts.free("e") == (3, 90)
    ledger.leave("b")  # fell silent: its leases have ended by themselves
    assert accounts.remove_router("b") == ["e"]
    accounts.charge("a", "e", 1, 1)
    ledger.end("e")
    assert accounts.remove_engine("e") == {"a": (1, 1)}
    assert (accounts.free("e"), accounts.by_router) == ((0, 0), {})


def test_what_requests_hold_is_the_sum_of_each_routers_last_report() -> None:
    accounts = ActorCredit(book())
    accounts.report_in_use("a", (Amount("e", 1, 10), Amount("f", 2, 20)))
    accounts.report_in_use("b", (Amount("e", 1, 5),))
    assert (accounts.in_use("e"), accounts.in_use("f")) == ((2, 15), (2, 20))
    accounts.report_in_use("a", (Amount("e", 3, 30),))
    assert (accounts.in_use("e"), accounts.in_use("f")) == ((4, 35), (0, 0))
    accounts.remove_router("b")
    assert accounts.in_use("e") == (3, 30)
