"""Sessions: reserved tokens that wait, are refused with figures, end by silence, and are nobody else's meanwhile."""

from __future__ import annotations

from dataclasses import replace

import pytest
from serve_app.core.memory.shares import PoolReport, Shares

from serve_app.core.memory.grants import EngineReport, Grants, Rank
from serve_app.core.memory.leases import Device
from serve_app.core.memory.ledger import Ledger
from serve_app.core.memory.sessions import SessionAsk, Sessions
from serve_app.errors import BadRequest, InsufficientMemory, LeaseConflict, LeaseNotFound, Unavailable

TOKENS, LIMIT = 1000, 900  # a tenth is kept for growth


class Place:
    """Two engines of one model, and a router."""

    def __init__(self, engines: int = 1) -> None:
        self.ledger = Ledger()
        self.grants = Grants(self.ledger)
        self.shares = Shares(self.ledger)
        self.sessions = Sessions(self.ledger, self.grants, self.shares, 0.0)
        for index in range(engines):
            self.ledger.add_device(Device("n", index, 100, 0))
            told = EngineReport(f"e{index}", "m", (Rank("n", index),), 100, 100)
            holds = self.grants.report(told, 0.0).holds
            self.grants.report(replace(told, holds=holds, kv_tokens=TOKENS, kv_bytes=1), 0.0)
            self.ledger.join(f"e{index}", 1e9, 0.0)
        self.ledger.join("router", 1e9, 0.0)

    def ask(self, name: str, tokens: int, wait_until: float | None = None, now: float = 0.0, ttl_s: float = 10.0):  # type: ignore[no-untyped-def]
        return self.sessions.ask(SessionAsk(name, "m", tokens, ttl_s, wait_until, "given"), now)


def test_a_session_has_its_tokens_and_they_are_nobody_elses() -> None:
    place = Place()
    session = place.ask("s", 600)
    assert (session.pool, session.tokens, session.expires_at, session.given) == ("e0", 600, 10.0, "given")
    assert place.ledger.free("e0") == LIMIT - 600
    with pytest.raises(InsufficientMemory, match="400 KV tokens asked, 300 free"):
        place.ask("t", 400)
    assert [one.session_id for one in place.sessions.all(0.0)] == ["s"]
    assert place.sessions.waiting() == []


def test_it_is_on_the_engine_with_most_tokens_free() -> None:
    place = Place(engines=2)
    assert place.ask("s", 600).pool != place.ask("t", 500).pool


def test_one_that_could_never_fit_is_refused_at_once_even_if_it_would_wait() -> None:
    with pytest.raises(BadRequest) as refused:
        Place().ask("s", LIMIT + 1, wait_until=100.0)
    assert refused.value.code == "session_too_large"
    assert str(LIMIT) in refused.value.message


def test_one_of_a_model_without_an_engine_is_refused() -> None:
    with pytest.raises(Unavailable, match="no engine of 'm'"):
        Place(engines=0).ask("s", 1)


def test_one_that_waits_opens_when_there_is_room_in_the_order_of_asking() -> None:
    place = Place()
    place.ask("s", 600)
    assert place.ask("large", 500, wait_until=9.0) is None
    assert place.ask("small", 100, wait_until=9.0) is None, "it would fit, and waits behind who asked first"
    place.sessions.close("s")
    opened, late = place.sessions.settle(1.0)
    assert ([one.session_id for one in opened], late) == (["large", "small"], [])


def test_one_that_waited_for_too_long_is_told_and_holds_back_nobody() -> None:
    place = Place()
    place.ask("s", 600)
    place.ask("large", 500, wait_until=5.0)
    place.ask("small", 100, wait_until=9.0)
    opened, late = place.sessions.settle(5.0)
    assert (opened, [one.session_id for one in late]) == ([], ["large"])
    opened, _ = place.sessions.settle(5.5)
    assert [one.session_id for one in opened] == ["small"]


def test_while_one_waits_routers_keep_what_they_use_and_no_more() -> None:
    place = Place()
    target, _ = place.shares.report("router", PoolReport("e0", 0, 0, 0, 800))
    place.shares.report("router", PoolReport("e0", target.version, target.target, 100, 0))
    assert place.ask("s", 700, wait_until=9.0) is None
    (recalled,) = place.shares.targets("router")
    assert recalled.target == 100
    place.shares.report("router", PoolReport("e0", recalled.version, 100, 100, 0))
    opened, _ = place.sessions.settle(1.0)
    assert [one.session_id for one in opened] == ["s"]
    target, _ = place.shares.report("router", PoolReport("e0", recalled.version, 100, 100, 50))
    assert target.target > 100, "nobody waits any more"


def test_one_that_is_renewed_lives_and_a_silent_one_ends() -> None:
    place = Place()
    place.ask("s", 100)
    place.ask("t", 100)
    assert place.sessions.renew("s", 8.0).expires_at == 18.0
    place.sessions.forget(place.ledger.expire(10.0))
    assert [one.session_id for one in place.sessions.all(10.0)] == ["s"]
    with pytest.raises(LeaseNotFound, match="'t'"):
        place.sessions.renew("t", 10.0)
    with pytest.raises(LeaseNotFound, match="'t'"):
        place.sessions.close("t")


def test_the_same_ask_again_is_the_same_session_and_another_is_a_conflict() -> None:
    place = Place()
    place.ask("s", 100)
    assert place.ask("s", 100, now=5.0).expires_at == 15.0
    assert place.ledger.free("e0") == LIMIT - 100
    with pytest.raises(LeaseConflict, match="open with 100 KV tokens"):
        place.ask("s", 200)


def test_a_session_ends_with_its_engine() -> None:
    place = Place()
    place.ask("s", 100)
    place.sessions.forget(place.grants.forget("e0", memory_gone=True))
    assert place.sessions.all(0.0) == []


@pytest.mark.parametrize(("tokens", "ttl_s"), [(0, 1.0), (1, 0.0)])
def test_an_ask_that_makes_no_sense_is_refused(tokens: int, ttl_s: float) -> None:
    with pytest.raises(ValueError, match="session 's'"):
        SessionAsk("s", "m", tokens, ttl_s)
