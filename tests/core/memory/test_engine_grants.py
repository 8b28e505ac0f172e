"""Engines under grant: who gets memory, who waits, whose turn it is, on a clock that is a number."""

from __future__ import annotations

from dataclasses import replace

import pytest

from serve_app.core.memory.checkpoint import Checkpoint
from serve_app.core.memory.engine_grants import OVERUSE_S, OVERUSE_SHARE, RESTART_INTERVAL_S, EngineGrants
from serve_app.core.memory.leases import Device, Hold, Phase
from serve_app.core.memory.ledger import Ledger
from serve_app.core.memory.reports import EngineReply, EngineReport, Rank
from serve_app.core.times import (
    ENGINE_ANSWER_S,
    ENGINE_ASK_S,
    ENGINE_HEARTBEAT_S,
    LOADING_TTL_S,
    OWNER_TTL_S,
)
from serve_app.errors import InsufficientMemory, LeaseConflict


class Host:
    """One node with two devices of 100 bytes, and what its engines were told last."""

    def __init__(self, *sizes: int) -> None:
        self.ledger = Ledger()
        for index, size in enumerate(sizes or (100, 100)):
            self.ledger.add_device(Device("n", index, size, 0))
        self.grants = EngineGrants(self.ledger, Checkpoint({}))
        self.now = 0.0

    def say(self, report: EngineReport, *, unheard: frozenset[str] = frozenset()) -> EngineReply:
        if report.gone:
            self.grants.forget(report.owner, memory_gone=True)
            return EngineReply(why="ended")
        return self.grants.report(report, self.now, unreported=unheard)

    def runs(self, report: EngineReport) -> EngineReport:
        """An engine from its first word to its first request."""
        reply = self.say(report)
        assert reply.may_load
        report = replace(report, holds=reply.holds, kv_tokens=1000, kv_bytes=10)
        self.say(report)
        return report


def engine(name: str, wanted: int, least: int | None = None, device: int | None = 0, ranks: int = 1) -> EngineReport:
    return EngineReport(name, "m", (Rank("n", device),) * ranks, wanted, wanted if least is None else least)


def test_an_engine_gets_what_it_wants_where_that_is_free() -> None:
    reply = Host().say(engine("a", 60))
    assert reply == EngineReply((Hold("n/0", 60),), may_load=True)


def test_an_engine_is_content_with_less_down_to_its_least() -> None:
    host = Host()
    host.runs(engine("a", 60))
    assert host.say(engine("b", 60, 30)).holds == (Hold("n/0", 40),)


def test_who_waits_is_given_what_is_missing_and_where() -> None:
    host = Host()
    host.runs(engine("a", 60))
    reply = host.say(engine("b", 60))
    assert (reply.holds, reply.may_load) == ((), False)
    assert reply.why == "n/0: at least 0.00 GB needed, 0.00 GB free"
    host.now = 3.0
    (blocked,) = host.grants.blocked(host.now)
    assert (blocked.owner, blocked.waits_s, blocked.why) == ("b", 3.0, reply.why)


def test_who_asked_later_does_not_starve_who_asked_first() -> None:
    host = Host()
    first = host.runs(engine("a", 60))
    host.say(engine("big", 80))
    assert host.say(engine("small", 10)).holds == ()
    host.say(replace(first, gone=True))
    assert host.say(engine("small", 10)).holds == (Hold("n/0", 10),)
    assert host.say(engine("big", 80)).holds == (Hold("n/0", 80),)


def test_who_asked_later_may_pass_on_a_device_that_the_first_cannot_use() -> None:
    host = Host()
    host.runs(engine("a", 60))
    host.say(engine("big", 80))
    assert host.say(engine("other", 80, device=1)).holds == (Hold("n/1", 80),)


def test_ranks_without_a_device_get_distinct_ones_of_their_node() -> None:
    reply = Host(100, 100, 100).say(engine("tp", 70, device=None, ranks=3))
    assert sorted(hold.on for hold in reply.holds) == ["n/0", "n/1", "n/2"]


def test_one_engine_loads_at_a_time_on_a_device_and_the_next_when_it_runs() -> None:
    host = Host()
    a = engine("a", 40)
    b = engine("b", 40)
    first = host.say(a)
    second = host.say(b)
    assert (first.may_load, second.may_load, second.why) == (True, False, "m loads on the same device")
    a, b = replace(a, holds=first.holds, loading=True), replace(b, holds=second.holds)
    assert not host.say(b).may_load
    host.say(replace(a, loading=False, kv_tokens=10))
    assert host.say(b).may_load


def test_an_engine_that_measures_nothing_neither_waits_for_a_turn_nor_takes_one() -> None:
    host = Host()
    assert host.say(engine("a", 20)).may_load
    assert host.say(replace(engine("free", 20), measures=False)).may_load
    host = Host()
    assert host.say(replace(engine("free", 20), measures=False)).may_load
    assert host.say(engine("a", 20)).may_load


def test_the_turn_of_an_engine_that_died_while_it_loaded_goes_on() -> None:
    host = Host()
    a = engine("a", 40)
    b = engine("b", 40)
    host.say(a)
    b = replace(b, holds=host.say(b).holds)
    host.grants.forget("a", memory_gone=True)
    assert host.say(b).may_load


def test_nobody_loads_beside_an_engine_that_has_ended_before_its_memory_is_gone() -> None:
    host = Host()
    a = engine("a", 40)
    b = engine("b", 40)
    host.say(a)
    b = replace(b, holds=host.say(b).holds)
    host.grants.forget("a", memory_gone=False)
    reply = host.say(b)
    assert (reply.may_load, reply.why) == (False, "an engine that has ended still has memory of the same device")
    assert host.say(engine("c", 40, device=1)).may_load
    host.ledger.end("a")
    assert host.say(b).may_load


def test_an_actor_that_has_just_come_up_lets_nobody_load_beside_one_that_does() -> None:
    """It learns of the one that loads from its own word, and gives no turn before it has heard from all."""
    host = Host()
    a = replace(engine("a", 40), holds=(Hold("n/0", 40),), loading=True)
    b = replace(engine("b", 40), holds=(Hold("n/0", 40),))
    elsewhere = replace(engine("c", 40), ranks=(Rank("n", 1),), holds=(Hold("n/1", 40),))
    for restored in (replace(a, loading=False), b, elsewhere):
        assert not host.say(restored, unheard=frozenset("abc")).may_load
    assert not host.say(b, unheard=frozenset("ac")).may_load
    assert host.say(elsewhere, unheard=frozenset("a")).may_load, "on another device nobody is waited for"
    host.say(a)
    assert not host.say(b).may_load


def test_memory_is_granted_while_it_is_not_known_who_loads() -> None:
    """What is granted is stored, so an actor that comes up knows it all."""
    host = Host()
    host.say(replace(engine("b", 40), holds=(Hold("n/0", 40),)), unheard=frozenset("b"))
    reply = host.say(engine("a", 10), unheard=frozenset("b"))
    assert (reply.holds, reply.may_load) == ((Hold("n/0", 10),), False)


def test_memory_that_is_anothers_by_now_is_refused_with_an_error() -> None:
    host = Host()
    host.runs(engine("a", 80))
    with pytest.raises(InsufficientMemory):
        host.say(replace(engine("b", 80), holds=(Hold("n/0", 80),)))


def test_an_engine_whose_report_was_refused_waits_for_no_memory_and_keeps_none_from_others() -> None:
    host = Host()
    a = host.runs(engine("a", 80))
    with pytest.raises(InsufficientMemory):
        host.say(replace(engine("b", 80), holds=(Hold("n/0", 80),)))
    assert host.grants.blocked(0.0) == []
    assert not host.ledger.knows("b")
    host.say(replace(a, gone=True))
    assert host.say(engine("c", 80)).holds == (Hold("n/0", 80),), "the device is not given to one that ends"


def test_an_engine_that_falls_silent_keeps_its_memory_until_that_is_seen_free() -> None:
    host = Host()
    reported = host.runs(engine("a", 80))
    ended = host.ledger.expire(OWNER_TTL_S + 0.1)
    assert [lease.lease_id for lease in ended] == ["a"]
    assert host.ledger.lease("a").phase is Phase.ENDING
    host.now = OWNER_TTL_S + 0.2
    assert host.say(engine("b", 80)).holds == ()
    assert host.say(reported).holds == reported.holds, "it stood still, and nobody has its memory"
    assert host.ledger.lease("a").phase is Phase.COMMITTED


def test_an_engine_whose_report_is_lost_keeps_its_lease() -> None:
    """Its next report comes once it has given up the answer to the lost one."""
    host = Host()
    host.runs(engine("a", 80))
    assert host.ledger.expire(host.now + ENGINE_HEARTBEAT_S + ENGINE_ANSWER_S + ENGINE_ASK_S) == []


def test_an_engine_that_lost_a_device_meanwhile_is_asked_to_end() -> None:
    host = Host()
    reported = host.say(engine("tp", 50, device=None, ranks=2))
    host.ledger.remove_device("n/1")
    with pytest.raises(LeaseConflict):
        host.say(replace(engine("tp", 50, device=None, ranks=2), holds=reported.holds))
    assert host.grants.owners() == []
    assert host.ledger.lease("tp").phase is Phase.ENDING, "until its processes are gone"


@pytest.mark.parametrize("waits", [True, False])
def test_who_waits_is_given_up_sooner_than_who_loads(waits: bool) -> None:
    """Waiting leaves the process free to speak; loading does not."""
    host = Host()
    if waits:
        host.runs(engine("a", 80))
    host.say(engine("b", 80))
    host.ledger.expire(OWNER_TTL_S + 0.1)
    assert host.ledger.knows("b") is not waits
    host.ledger.expire(LOADING_TTL_S + 0.1)
    assert not host.ledger.knows("b")


def test_silent_are_those_that_have_not_reported_since() -> None:
    host = Host()
    reported = host.runs(engine("a", 80))
    host.say(engine("waits", 80))
    assert host.grants.silent(-1.0) == []
    assert [one.owner for one in host.grants.silent(0.0)] == ["a", "waits"]
    host.now = 5.0
    host.say(reported)
    assert [one.owner for one in host.grants.silent(4.0)] == ["waits"]


def test_more_than_was_granted_is_an_alarm_until_it_is_less() -> None:
    host = Host()
    reported = host.runs(engine("a", 80))
    host.say(replace(reported, measured_bytes=(81,)))
    (alarm,) = host.grants.alarms()
    assert (alarm.replica, alarm.device, alarm.granted_bytes, alarm.measured_bytes) == ("a", "n/0", 80, 81)
    host.say(replace(reported, measured_bytes=(None,)))
    host.say(replace(reported, measured_bytes=(80,)))
    assert host.grants.alarms() == []
    host.say(replace(reported, measured_bytes=(81,)))
    host.grants.forget("a", memory_gone=True)
    assert host.grants.alarms() == []


def test_an_engine_that_outgrew_its_grant_drains_once_that_lasts() -> None:
    host = Host()
    reported = host.runs(engine("a", 80))
    host.say(replace(reported, measured_bytes=(80,)))
    over = replace(reported, measured_bytes=(85,))
    host.now += 1.0
    assert not host.say(over).drain
    host.now += OVERUSE_S - 1
    assert not host.say(over).drain
    assert not host.say(reported).drain  # back within it: the next time counts from the start
    host.say(over)
    host.now += OVERUSE_S
    assert host.say(over).drain
    assert host.grants.drains.active() == ["a"]
    assert host.say(reported).drain  # it goes, whatever it uses now


def test_a_little_more_than_granted_is_reported_and_nothing_else() -> None:
    host = Host()
    reported = host.runs(engine("a", 80))
    host.say(replace(reported, measured_bytes=(80,)))
    for _ in range(3):
        host.now += OVERUSE_S
        assert not host.say(replace(reported, measured_bytes=(int(80 * (1 + OVERUSE_SHARE)),))).drain
    assert host.grants.alarms()


def test_an_engine_that_never_fitted_is_not_started_again_and_again() -> None:
    host = Host()
    reported = host.runs(engine("a", 40))
    for _ in range(3):
        host.now += OVERUSE_S
        assert not host.say(replace(reported, measured_bytes=(90,))).drain


def test_engines_of_a_model_that_outgrew_their_grants_drain_one_after_the_other() -> None:
    host = Host()
    reported = [host.runs(engine(name, 40)) for name in ("a", "b")]
    for report in reported:
        host.say(replace(report, measured_bytes=(40,)))
    over = [replace(one, measured_bytes=(60,)) for one in reported]
    for report in over:
        host.say(report)
    host.now += OVERUSE_S
    assert [host.say(one).drain for one in over] == [True, False]
    host.grants.forget("a", memory_gone=True)
    assert not host.say(over[1]).drain
    host.now += RESTART_INTERVAL_S
    assert host.say(over[1]).drain


@pytest.mark.parametrize(("ranks", "wanted", "least"), [(0, 1, 1), (1, 1, 2), (1, 1, 0)])
def test_a_word_that_makes_no_sense_is_refused(ranks: int, wanted: int, least: int) -> None:
    with pytest.raises(ValueError, match="a: "):
        EngineReport("a", "m", (Rank("n"),) * ranks, wanted, least)
