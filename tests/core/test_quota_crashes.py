"""The quota actor's brain over crashes and standstills, its own and those of others; the clock is a number."""

from __future__ import annotations

from dataclasses import replace

import pytest

from serve_app.core.memory import (
    CheckpointKey,
    Device,
    EngineReply,
    EngineReport,
    EntryKind,
    Hold,
    Phase,
    Rank,
    SessionRequest,
)
from serve_app.core.memory.crash_loops import KEPT_S
from serve_app.core.queue.admission import QueuePolicy
from serve_app.core.quota import Quota
from serve_app.core.shared_queue import ActorReply, RouterMessage, RouterQueue
from serve_app.core.shared_queue.messages import Hello
from serve_app.core.shared_queue.router_credit import CREDIT_REQUEST_PAUSE_S
from serve_app.core.times import ACTOR_TICK_S, ENGINE_SILENT_S, OWNER_TTL_S, RECOVERY_S, ROUTER_SILENT_S
from serve_app.errors import InsufficientMemory

TOKENS = 1600
POLICY = QueuePolicy(max_queued=10, max_wait_s=60.0)
DEVICES = [Device("n", 0, 100, 0), Device("n", 1, 100, 0)]


class Shell:
    """What the actor does around its brain, one that dies included."""

    def __init__(self) -> None:
        self.now = 100.0
        self.stored: dict[CheckpointKey, object] = {}
        self.lines: dict[str, RouterQueue] = {}
        self.seq = 0
        self.quota = Quota(1, {}, self.now)
        self.quota.on_devices(DEVICES, self.now)

    def store(self) -> None:
        changes = self.quota.changes()
        self.quota.checkpoint.stored(changes)
        for key, (keep, value) in changes.items():
            if keep:
                self.stored[key] = value
            else:
                del self.stored[key]

    def crash(self, *, devices_known: bool = True) -> None:
        self.quota = Quota(self.quota.epoch + 1, dict(self.stored), self.now)
        if devices_known:
            self.quota.on_devices(DEVICES, self.now)

    def engine(self, report: EngineReport) -> EngineReply:
        reply = self.quota.on_engine(report, self.now)
        self.store()
        return reply

    def runs(self, name: str, size: int = 60, device: int = 0) -> EngineReport:
        report = EngineReport(name, "m", (Rank("n", device),), size, size, processes=(("n", ((1, 1),)),), slots=4)
        report = replace(report, holds=self.engine(report).holds, kv_tokens=TOKENS, kv_bytes=10)
        self.engine(report)
        return report

    def router(self, name: str, pool: str = "e") -> ActorReply:
        """A router says all it has to say, of an engine that it can reach."""
        line = self.lines.setdefault(name, RouterQueue(name))
        line.serve("m", POLICY)
        line.set_reachability("m", pool, True, self.now)
        for _ in range(4):
            self.now += CREDIT_REQUEST_PAUSE_S
            reported = line.next_message(self.now, beat=True)
            assert reported is not None
            reply = self.quota.on_exchange(reported, self.now)
            self.store()
            line.on_reply(reply, self.now, self.now)
        return reply

    def limit(self, name: str, pool: str = "e") -> int:
        """What a router could grant by itself."""
        return self.lines[name].accounts.credit(pool)[1]

    def wait(self, span_s: float, *alive: EngineReport) -> None:
        """Time with ticks in it, in which these speak."""
        until = self.now + span_s
        while self.now < until:
            self.now += ACTOR_TICK_S
            for reported in alive:
                self.engine(reported)
            self.quota.on_tick(self.now)
            self.store()


def test_a_standstill_of_the_actor_is_nobodys_silence() -> None:
    shell = Shell()
    reported = shell.runs("e")
    shell.router("r")
    shell.quota.on_open_session(SessionRequest("s", "m", 10, 5.0), shell.now)
    shell.now += 20.0  # nobody could be heard
    shell.quota.on_tick(shell.now)
    assert shell.quota.ledger.lease("e").phase is Phase.COMMITTED
    assert shell.quota.ledger.knows("r")
    assert shell.quota.sessions.view("s").request.tokens == 10
    shell.wait(6.0, reported)
    assert not shell.quota.ledger.knows("r"), "silence after it counts as ever"
    assert shell.quota.sessions.all() == []


def test_a_silent_engine_is_looked_for_and_one_found_dead_is_free_at_once() -> None:
    shell = Shell()
    shell.runs("e")
    other = shell.runs("other", device=1)
    shell.wait(ENGINE_SILENT_S - ACTOR_TICK_S, other)
    assert shell.quota.silent_engines(shell.now) == []
    shell.wait(ACTOR_TICK_S, other)
    assert [silent_engine.owner for silent_engine in shell.quota.silent_engines(shell.now)] == ["e"]
    shell.quota.on_processes_gone("e", shell.now)
    shell.store()
    assert "e" not in shell.quota.ledger
    assert (EntryKind.ENGINE, "e") not in shell.stored
    assert shell.quota.ledger.free("n/0") == 100


def test_what_a_silent_router_held_is_free_once_its_process_is_gone_and_not_before() -> None:
    shell = Shell()
    engine = shell.runs("e")
    process = ("n", ((9, 1),))
    shell.lines = {name: RouterQueue(name, process=process) for name in ("dead", "lives")}
    shell.router("dead")
    shell.router("lives")
    assert shell.quota.queue.accounts.amounts("dead")
    assert shell.quota.silent_routers(shell.now) == {}
    shell.wait(ROUTER_SILENT_S, engine)
    shell.router("lives")
    assert shell.quota.silent_routers(shell.now) == {"dead": process}
    shell.quota.on_router_gone("lives", shell.now)
    assert shell.quota.ledger.knows("lives"), "it has sent a message since"
    shell.quota.on_router_gone("dead", shell.now)
    shell.store()
    assert not shell.quota.ledger.knows("dead")
    assert (EntryKind.ROUTER, "dead") not in shell.stored
    assert set(shell.quota.queue.accounts.by_router) == {"lives"}
    assert shell.quota.silent_routers(shell.now) == {}


def test_an_answer_to_a_watch_is_no_message_of_the_router() -> None:
    shell = Shell()
    engine = shell.runs("e")
    shell.lines["r"] = RouterQueue("r", process=("n", ((9, 1),)))
    shell.router("r")
    watch = shell.lines["r"].router_session.watch_message()
    shell.wait(ROUTER_SILENT_S, engine)
    shell.quota.on_watch(watch, shell.now, timed_out=True)
    assert "r" in shell.quota.silent_routers(shell.now)
    shell.quota.on_watch(watch, shell.now, timed_out=False)
    assert shell.quota.silent_routers(shell.now) == {}


def test_an_engine_that_died_while_it_waited_holds_back_nobody() -> None:
    shell = Shell()
    reported = shell.runs("e")
    waits = EngineReport("w", "m", (Rank("n", 0),), 90, 90, processes=(("n", ((2, 1),)),))
    shell.engine(waits)
    behind = EngineReport("behind", "m", (Rank("n", 0),), 20, 20)
    assert shell.engine(behind).holds == ()
    shell.wait(ENGINE_SILENT_S, reported)
    assert [one.owner for one in shell.quota.silent_engines(shell.now)] == ["w"]
    shell.quota.on_processes_gone("w", shell.now)
    assert shell.engine(behind).holds == (Hold("n/0", 20),)


def test_an_engine_that_fails_to_load_keeps_its_memory_until_it_is_gone_and_the_reason_is_reported() -> None:
    shell = Shell()
    report = EngineReport("e", "m", (Rank("n", 0),), 60, 60, processes=(("n", ((1, 1),)),))
    report = replace(report, holds=shell.engine(report).holds, loading=True)
    waits = EngineReport("w", "o", (Rank("n", 0),), 60, 60)
    shell.engine(waits)
    shell.engine(replace(report, failed="no progress"))
    assert failures(shell) == [("m", "no progress")]
    assert not shell.engine(waits).may_load
    shell.wait(ENGINE_SILENT_S, waits)
    shell.quota.on_processes_gone("e", shell.now)
    assert shell.engine(waits).may_load
    assert failures(shell) == [("m", "no progress")]
    assert failures(shell, later_s=KEPT_S) == []


def failures(shell: Shell, later_s: float = 0.0) -> list[tuple[str, str]]:
    """The models whose engines have failed, with what is told of the last one."""
    return [(one.model, one.why) for one in shell.quota.grants.crash_loops.failures(shell.now + later_s)]


def test_an_engine_that_spoke_while_it_was_looked_for_is_not_dead() -> None:
    shell = Shell()
    reported = shell.runs("e")
    shell.wait(ENGINE_SILENT_S)
    shell.engine(reported)
    shell.quota.on_processes_gone("e", shell.now)
    assert "e" in shell.quota.ledger


def test_an_engine_whose_ranks_are_processes_it_does_not_know_is_given_its_time() -> None:
    """Ranks on GPUs are Ray's processes: they may outlive the replica's own by a moment."""
    shell = Shell()
    report = EngineReport("tp", "m", (Rank("n"), Rank("n")), 50, 50, processes=(("n", ((1, 1),)),))
    shell.engine(replace(report, holds=shell.engine(report).holds, kv_tokens=TOKENS))
    shell.wait(ENGINE_SILENT_S)
    assert shell.quota.silent_engines(shell.now) == []
    shell.wait(OWNER_TTL_S)
    assert list(shell.quota.ending_engines()) == ["tp"]


def test_an_engine_that_died_with_the_actor_is_looked_for_at_once() -> None:
    shell = Shell()
    shell.runs("e")
    shell.crash()
    assert [silent_engine.owner for silent_engine in shell.quota.silent_engines(shell.now)] == ["e"]
    shell.quota.on_processes_gone("e", shell.now)
    assert not shell.quota.recovering
    assert shell.quota.ledger.free("n/0") == 100


def test_nothing_new_is_granted_after_a_crash_before_all_have_spoken() -> None:
    shell = Shell()
    reported = shell.runs("e")
    shell.router("r")
    shell.crash()
    shell.engine(reported)
    assert shell.quota.recovering
    shell.router("new")
    assert shell.limit("new") == 0
    shell.router("r")
    assert not shell.quota.recovering
    shell.router("new")
    assert shell.limit("new") >= 10


def test_device_memory_is_granted_after_a_crash_before_anybody_has_spoken() -> None:
    """What is granted was stored, so nobody can hold what the new actor does not know."""
    shell = Shell()
    shell.runs("e", size=60)
    shell.router("r")
    shell.crash()
    assert shell.engine(EngineReport("new", "m", (Rank("n", 0),), 50, 50)).holds == ()
    reply = shell.engine(EngineReport("small", "m", (Rank("n", 1),), 50, 50))
    assert (reply.holds, reply.may_load) == ((Hold("n/1", 50),), True)


def test_whoever_has_reported_nothing_after_a_crash_is_not_waited_for_for_ever() -> None:
    shell = Shell()
    shell.runs("e")
    shell.router("r")
    shell.crash()
    shell.wait(RECOVERY_S + ACTOR_TICK_S)
    assert not shell.quota.recovering
    shell.wait(ACTOR_TICK_S)
    assert list(shell.stored) in ([(EntryKind.ENGINE, "e")], [])


def test_the_time_to_report_begins_when_messages_can_arrive() -> None:
    """The nodes may need long to tell their devices; routers cannot say anything before that."""
    shell = Shell()
    reported = shell.runs("e")
    shell.router("r")
    shell.crash(devices_known=False)
    shell.wait(2 * RECOVERY_S)
    shell.quota.on_devices(DEVICES, shell.now)
    shell.engine(reported)
    shell.wait(ACTOR_TICK_S, reported)
    shell.router("new")
    assert shell.limit("new") == 0
    shell.router("r")
    granted = shell.quota.ledger.lease("e").held
    assert granted <= TOKENS


def test_an_engine_whose_device_left_with_the_actor_is_not_waited_for() -> None:
    shell = Shell()
    shell.runs("e")
    shell.crash(devices_known=False)
    shell.quota.on_devices(DEVICES[1:], shell.now)
    assert not shell.quota.recovering


def test_an_engine_that_is_refused_after_a_crash_is_on_no_checkpoint() -> None:
    shell = Shell()
    reported = shell.runs("e", 80)
    shell.stored[EntryKind.ENGINE, "e"] = None  # unreadable, so another engine got its memory
    shell.crash()
    shell.wait(RECOVERY_S / 2)
    shell.engine(replace(reported, owner="f"))
    with pytest.raises(InsufficientMemory):
        shell.engine(reported)
    shell.wait(ACTOR_TICK_S)
    assert [name for kind, name in shell.stored if kind is EntryKind.ENGINE] == ["f"]


def test_two_engines_do_not_load_together_because_the_actor_died_between_them() -> None:
    shell = Shell()
    first = EngineReport("a", "m", (Rank("n", 0),), 40, 40)
    second = replace(first, owner="b")
    reply = shell.engine(first)
    waits = shell.engine(second)
    assert (reply.may_load, waits.may_load) == (True, False)
    shell.crash()
    second = replace(second, holds=waits.holds)
    assert not shell.engine(second).may_load
    shell.engine(replace(first, holds=reply.holds, loading=True))
    assert not shell.engine(second).may_load
    shell.engine(replace(first, holds=reply.holds, kv_tokens=1))
    assert shell.engine(second).may_load


def test_reports_of_several_engines_are_answered_as_one_by_one() -> None:
    alone = Shell()
    together = Shell()
    reports = [EngineReport(name, "m", (Rank("n", device),), 60, 60, slots=4) for device, name in enumerate("ef")]
    for _ in range(2):
        replies = [alone.engine(report) for report in reports]
        assert together.quota.on_engines(reports, together.now) == replies
        together.store()
        pairs = zip(reports, replies, strict=True)
        reports = [replace(report, holds=reply.holds, kv_tokens=TOKENS) for report, reply in pairs]
    assert together.stored == alone.stored
    assert [together.quota.ledger.phase(name) for name in "ef"] == [Phase.COMMITTED, Phase.COMMITTED]


def test_routers_that_speak_of_an_engine_that_has_gone_leave_nothing_behind() -> None:
    shell = Shell()
    shell.runs("e")
    shell.router("r")
    for _ in range(20):
        shell.wait(ACTOR_TICK_S)
        shell.router("r")
    assert list(shell.quota.ending_engines()) == ["e"]
    shell.quota.on_processes_gone("e", shell.now)
    shell.router("r")
    assert shell.limit("r") == 0
    assert shell.quota.queue.accounts.amounts("r") == ()


def test_words_under_an_older_epoch_change_nothing() -> None:
    shell = Shell()
    reported = shell.runs("e")
    shell.crash()
    shell.engine(reported)
    reply = shell.quota.on_exchange(RouterMessage("r", 1, 1, 1, (Hello(()),), 0, 0), shell.now)
    assert (reply.is_stale, reply.epoch, reply.actions) == (True, 2, ())
    assert not shell.quota.ledger.knows("r")


def test_who_waits_for_memory_is_reported_to_the_routers_and_not_for_longer_than_it_does() -> None:
    shell = Shell()
    reported = shell.runs("e")
    blocked = EngineReport("b", "big", (Rank("n", 0),), 90, 90)
    shell.engine(blocked)
    shell.wait(ACTOR_TICK_S, reported, blocked)
    assert shell.router("r").state.blocked == {"big": 1}
    shell.engine(replace(blocked, gone=True))
    shell.wait(ACTOR_TICK_S, reported)
    assert shell.router("r").state.blocked == {}


def test_the_fragmentation_of_each_node_reaches_the_routers() -> None:
    shell = Shell()
    report = shell.runs("e")
    shell.quota.on_devices([use.device for use in shell.quota.ledger.devices()], shell.now)
    shell.wait(ACTOR_TICK_S, report)
    assert dict(shell.router("r").state.fragmentation) == shell.quota.fragmentation_by_node
    assert shell.quota.fragmentation_by_node.keys() == {use.device.node for use in shell.quota.ledger.devices()}


def test_what_could_not_be_stored_is_stored_the_next_time() -> None:
    shell = Shell()
    report = EngineReport("e", "m", (Rank("n", 0),), 40, 40)
    shell.quota.on_engine(report, shell.now)
    first = shell.quota.changes()
    assert list(first) == [(EntryKind.ENGINE, "e")]
    shell.quota.on_engine(replace(report, holds=(Hold("n/0", 40),), gone=True), shell.now)
    assert shell.quota.changes() == {(EntryKind.ENGINE, "e"): (False, None)}, "what came later counts"
    shell.quota.checkpoint.stored(first)
    assert shell.quota.unstored("e"), "what was stored is no longer so"
    shell.quota.checkpoint.stored(shell.quota.changes())
    assert not shell.quota.unstored("e")


@pytest.mark.parametrize("crash", [False, True])
def test_what_has_come_and_gone_leaves_nothing_behind(crash: bool) -> None:
    """Routers, engines and sessions by the hundred; what the brain keeps is what there is."""
    shell = Shell()
    stays = shell.runs("stays", size=10, device=1)
    for number in range(200):
        reported = shell.runs(f"e{number}")
        shell.router(f"r{number}", f"e{number}")
        if not shell.quota.recovering:  # nothing is opened then
            shell.quota.on_open_session(SessionRequest(f"s{number}", "m", 10, 5.0), shell.now)
        shell.engine(replace(reported, gone=True))
        if crash and not number % 50:
            shell.crash()
        shell.wait(ACTOR_TICK_S, stays)
    shell.wait(2 * RECOVERY_S, stays)
    quota = shell.quota
    assert list(shell.stored) == [(EntryKind.ENGINE, "stays")]
    assert quota.grants.owners() == ["stays"]
    sessions = quota.sessions
    openings = quota.queue.session_admission
    kept = [
        quota.queue.accounts.by_router,
        sessions.by_session_id,
        sessions.by_lease,
        sessions.closed_leases,
        openings.pending_sessions,
    ]
    assert [len(one) for one in kept] == [0] * len(kept)
    assert sorted(quota.ledger.lease_owners) == ["sessions", "stays"]
    assert len(list(quota.ledger.leases())) == 1, "an engine"
