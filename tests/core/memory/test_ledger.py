"""What the ledger promises, case by case."""

from __future__ import annotations

import pytest

from serve_app.core.memory.leases import DEFAULT_RESERVED_BYTES, Device, Hold, LeaseKind, Phase
from serve_app.core.memory.ledger import Ledger
from serve_app.core.pools import Holder, RequestPool
from serve_app.errors import InsufficientMemory, LeaseConflict, LeaseNotFound

GIB = 2**30
TTL_S = 5.0


def ledger(*, devices: int = 2, pool: int | None = 1000) -> Ledger:
    """Two devices of 10 GiB; an engine over both with a KV pool of 1,000 tokens; a router."""
    made = Ledger()
    for index in range(devices):
        made.add_device(Device("node", index, 10 * GIB, 0))
    made.join("engine", TTL_S, 0.0)
    made.join("router", TTL_S, 0.0)
    if pool is not None:
        made.reserve("grant", LeaseKind.ENGINE, "engine", [Hold(f"node/{index}", 6 * GIB) for index in range(devices)])
        made.commit("grant", pool)
    return made


def test_a_device_keeps_two_gigabytes_for_itself_by_default() -> None:
    assert DEFAULT_RESERVED_BYTES == 2_000_000_000
    assert Device("node", 0, 24 * GIB).capacity_bytes == 24 * GIB - DEFAULT_RESERVED_BYTES
    with pytest.raises(ValueError, match="reserved_bytes"):
        Device("node", 0, GIB)


def test_a_refusal_has_the_figures_and_changes_nothing() -> None:
    book = ledger()
    before = [*book.leases()], book.devices()
    with pytest.raises(InsufficientMemory, match=f"node/1: {5 * GIB} asked, {4 * GIB} of {10 * GIB} free"):
        book.reserve("second", LeaseKind.ENGINE, "router", [Hold("node/0", GIB), Hold("node/1", 5 * GIB)])
    assert ([*book.leases()], book.devices()) == before


def pool(book: Ledger, name: str, slots: int) -> RequestPool:
    book.open_pool(name, slots)
    found = book.pool(name)
    assert found is not None
    return found


def test_what_requests_use_of_a_session_counts_once() -> None:
    router = Holder("router")
    book = ledger()
    book.reserve("session", LeaseKind.SESSION, "router", [Hold("grant", 400)])
    pool(book, "session", 1).charge(router, 1, 300)
    assert (book.free("grant"), book.free("session")) == (500, 100)


def test_a_tenth_of_the_pool_is_for_those_who_outgrow_their_estimate() -> None:
    router = Holder("router")
    book = ledger()
    requests = pool(book, "grant", 4)
    requests.charge(router, 1, 900)
    with pytest.raises(InsufficientMemory):
        requests.charge(Holder("another"), 1, 1)
    requests.charge(router, 0, 100, growth=True)
    with pytest.raises(InsufficientMemory):
        requests.charge(router, 0, 1, growth=True)
    requests.give_back(router, 1, 1000)
    assert book.free("grant") == 900


def test_requests_and_sessions_of_an_engine_together_have_no_more_than_it_has() -> None:
    router = Holder("router")
    book = ledger()
    requests = pool(book, "grant", 4)
    requests.charge(router, 1, 500)
    with pytest.raises(InsufficientMemory, match="401 asked, 400 of 1000 free"):
        book.reserve("session", LeaseKind.SESSION, "router", [Hold("grant", 401)])
    book.reserve("session", LeaseKind.SESSION, "router", [Hold("grant", 400)])
    with pytest.raises(InsufficientMemory, match="1 asked, 0 of 1000 free"):
        requests.charge(router, 0, 1)


def test_a_pool_ends_with_its_engine_and_begins_empty() -> None:
    router = Holder("router")
    book = ledger()
    pool(book, "grant", 4).charge(router, 2, 100)
    book.end("grant", memory_gone=False)
    assert (book.pool("grant"), book.free("grant")) == (None, 0)
    with pytest.raises(LeaseConflict, match="ending"):
        book.open_pool("grant", 4)
    book.revive("grant")
    with pytest.raises(LeaseConflict, match="reserved"):
        book.open_pool("grant", 4)
    book.commit("grant", 100)
    again = pool(book, "grant", 2)
    assert (again.free_slots, again.accounts, book.free("grant")) == (2, {}, 90)


def test_fewer_slots_than_are_used_leave_none_free() -> None:
    router = Holder("router")
    requests = pool(ledger(), "grant", 4)
    requests.charge(router, 3, 0)
    requests.set_slots(2)
    assert requests.free_slots == 0
    requests.charge(router, 0, 1)
    with pytest.raises(InsufficientMemory, match="1 slots asked, 0 of 2 free"):
        requests.charge(router, 1, 1)


def test_slots_of_an_unknown_engine_and_negative_ones_are_refused() -> None:
    with pytest.raises(LeaseNotFound):
        ledger().open_pool("other", 1)
    with pytest.raises(ValueError, match="-1"):
        ledger().open_pool("grant", -1)


def test_nothing_lies_on_an_engine_that_loads_or_ends() -> None:
    book = ledger(pool=None)
    book.reserve("grant", LeaseKind.ENGINE, "engine", [Hold("node/0", GIB)])
    with pytest.raises(LeaseConflict, match="reserved"):
        book.reserve("share", LeaseKind.SESSION, "router", [Hold("grant", 1)])
    book.commit("grant", 100)
    with pytest.raises(LeaseConflict, match="committed"):
        book.commit("grant", 200)
    book.end("grant", memory_gone=False)
    with pytest.raises(LeaseConflict, match="ending"):
        book.reserve("share", LeaseKind.SESSION, "router", [Hold("grant", 1)])


def test_an_engines_memory_is_free_only_when_it_has_been_seen_free() -> None:
    book = ledger()
    book.reserve("share", LeaseKind.SESSION, "router", [Hold("grant", 10)])
    assert [lease.lease_id for lease in book.expire(TTL_S - 0.1)] == []
    book.heartbeat("router", TTL_S - 0.1)
    assert [lease.lease_id for lease in book.expire(TTL_S)] == ["share", "grant"]
    assert book.lease("grant").phase is Phase.ENDING
    assert book.devices()[0].free_bytes == 4 * GIB
    book.end("grant")
    assert book.devices()[0].free_bytes == 10 * GIB
    assert "grant" not in book


def test_a_silent_owner_loses_all_it_has_and_has_to_join_again() -> None:
    book = ledger()
    book.heartbeat("engine", 4.0)
    book.reserve("share", LeaseKind.SESSION, "router", [Hold("grant", 400)])
    assert [lease.lease_id for lease in book.expire(5.0)] == ["share"]
    assert book.free("grant") == 900
    assert not book.heartbeat("router", 5.0)
    with pytest.raises(LeaseNotFound, match="router"):
        book.reserve("share", LeaseKind.SESSION, "router", [Hold("grant", 400)])
    book.join("router", TTL_S, 5.0)
    book.reserve("share", LeaseKind.SESSION, "router", [Hold("grant", 400)])


def test_every_heartbeat_puts_the_end_off_and_the_last_one_counts() -> None:
    book = ledger()
    for second in range(1, 8):
        book.heartbeat("engine", float(second))
        book.heartbeat("router", float(second))
        assert book.expire(float(second)) == []
    book.heartbeat("engine", 3.0)  # late on its way
    assert book.expire(11.9) == []
    assert [lease.lease_id for lease in book.expire(12.0)] == ["grant"]


def test_a_lease_of_its_own_time_ends_unless_renewed() -> None:
    book = ledger()
    book.join("engine", 1000.0, 0.0)
    book.reserve_alone("session", LeaseKind.SESSION, Hold("grant", 100), 10.0, 0.0)
    book.heartbeat("session", 20.0)
    book.heartbeat("session", 10.0)  # never brought forward
    assert [lease.lease_id for lease in book.expire(29.9)] == []
    assert [lease.lease_id for lease in book.expire(30.0)] == ["session"]
    assert not book.knows("session")


def test_a_lease_of_its_own_time_that_is_refused_leaves_no_owner() -> None:
    book = ledger()
    with pytest.raises(InsufficientMemory):
        book.reserve_alone("session", LeaseKind.SESSION, Hold("grant", 901), 10.0, 0.0)
    assert not book.knows("session")
    book.reserve_alone("session", LeaseKind.SESSION, Hold("grant", 100), 10.0, 0.0)
    with pytest.raises(LeaseConflict):
        book.reserve_alone("session", LeaseKind.SESSION, Hold("grant", 100), 10.0, 0.0)
    assert book.lease("session").amount == 100


def test_an_empty_device_may_change_its_size() -> None:
    book = ledger(pool=None)
    book.add_device(Device("node", 0, 20 * GIB, 0))
    assert book.free("node/0") == 20 * GIB
    book.reserve("grant", LeaseKind.ENGINE, "engine", [Hold("node/0", GIB)])
    with pytest.raises(LeaseConflict, match="in use"):
        book.add_device(Device("node", 0, 10 * GIB, 0))
    assert book.free("node/0") == 19 * GIB


def test_a_session_never_shrinks_below_what_lies_on_it() -> None:
    router = Holder("router")
    book = ledger()
    book.reserve("session", LeaseKind.SESSION, "router", [Hold("grant", 400)])
    pool(book, "session", 1).charge(router, 1, 300)
    with pytest.raises(InsufficientMemory, match="300 of 400 are in use, 299 wanted"):
        book.resize("session", [299])
    book.resize("session", [300])
    assert book.lease("session").capacity == 300
    assert book.free("grant") == 600


def test_a_lost_device_takes_its_engines_along() -> None:
    book = ledger()
    assert [lease.lease_id for lease in book.remove_device("node/0")] == ["grant"]
    lease = book.lease("grant")
    assert (lease.phase, [hold.on for hold in lease.holds]) == (Phase.ENDING, ["node/1"])
    book.remove_device("node/1")
    assert "grant" not in book
    book.add_device(Device("node", 0, 10 * GIB, 0))
    assert book.devices()[0].free_bytes == 10 * GIB


def test_two_ranks_of_an_engine_are_on_two_devices() -> None:
    with pytest.raises(LeaseConflict, match="one device"):
        ledger(pool=None).reserve("grant", LeaseKind.ENGINE, "engine", [Hold("node/0", 1), Hold("node/0", 1)])


@pytest.mark.parametrize("holds", [[], [Hold("grant", 0)], [Hold("grant", 5), Hold("share", 5)]])
def test_what_cannot_be_a_hold_is_reported(holds: list[Hold]) -> None:
    with pytest.raises(ValueError, match=r"lies on|asked"):
        ledger().reserve("share", LeaseKind.SESSION, "router", holds)


def test_memory_follows_what_is_leased_however_often_owners_come_back() -> None:
    book = ledger()
    for turn in range(1000):
        now = float(turn)
        book.join("router", TTL_S, now)
        book.join("engine", TTL_S, now)
        book.reserve(f"share-{turn}", LeaseKind.SESSION, "router", [Hold("grant", 1)])
        book.end(f"share-{turn}")
        book.expire(now)
    assert (len(book.lease_owners), len(list(book.leases()))) == (2, 1)
