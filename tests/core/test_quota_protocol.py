"""Routers, sessions and the quota actor over a network that loses, repeats and reorders, with an actor that dies.

What is checked is what matters: no request begins on KV tokens that are not there.
"""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from serve_app.core.memory.budgets import Budgets
from serve_app.core.memory.grants import EngineReport, Rank
from serve_app.core.memory.leases import Device
from serve_app.core.memory.quota import Quota, RouterReply, RouterReport
from serve_app.core.memory.roster import Key, Value
from serve_app.core.memory.sessions import SessionAsk
from serve_app.errors import BadRequest, InsufficientMemory, LeaseConflict, Unavailable

POOL, TOKENS = "engine-1", 100
ROUTERS = ("a", "b", "c")
ENGINE = EngineReport(POOL, "m", (Rank("node", 0),), 1000, 1000)
spans = st.sampled_from([0.0, 0.1, 0.5, 0.5, 1.0, 2.0, 4.5, 10.0])
sizes = st.integers(1, 40)


@dataclass
class Router:
    """What a router's shell does around `Budgets`."""

    name: str
    budgets: Budgets = field(default_factory=Budgets)
    seq: int = 0
    running: dict[str, int] = field(default_factory=dict)
    want: int = 0

    def report(self) -> RouterReport:
        self.seq += 1
        return RouterReport(self.name, self.budgets.epoch, self.seq, (self.budgets.report(POOL, self.want),))

    @property
    def used(self) -> int:
        return sum(self.running.values())


class Network(RuleBasedStateMachine):
    """Three routers, one engine, the actor and everything on its way between them."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.ids = itertools.count()
        self.stored: dict[Key, Value] = {}
        self.routers = {name: Router(name) for name in ROUTERS}
        self.reports: list[tuple[float, RouterReport]] = []
        self.replies: list[tuple[str, float, RouterReply]] = []
        self.excused: set[str] = set()
        self.holds = ENGINE
        self.begun = 0

    @initialize()
    def start(self) -> None:
        self.quota = Quota(1, {}, self.now)
        self.quota.on_devices([Device("node", 0, 1000, 0)], self.now)
        self.engine_speaks()
        self.engine_speaks()
        for router in self.routers.values():
            router.budgets.open(POOL)
            for _ in range(2):  # the first word only brings the epoch
                self.send(router.name)
                self.deliver(0, keep=False)
                self.answer(0, keep=False)

    def persist(self) -> None:
        for key, (keep, value) in self.quota.take_changes().items():
            if keep:
                self.stored[key] = value
            else:
                self.stored.pop(key, None)

    @rule()
    def engine_speaks(self) -> None:
        reply = self.quota.on_engine(self.holds, self.now)
        self.persist()
        if reply.holds:
            self.holds = replace(ENGINE, holds=reply.holds, kv_tokens=TOKENS, kv_bytes=1000)

    @rule(name=st.sampled_from(ROUTERS))
    def send(self, name: str) -> None:
        self.reports.append((self.now, self.routers[name].report()))

    @rule(index=st.integers(0, 5), keep=st.booleans())
    def deliver(self, index: int, keep: bool) -> None:
        """A report reaches the actor that is there now; `keep`: it will do so once more."""
        if index >= len(self.reports):
            return
        sent_at, report = self.reports[index] if keep else self.reports.pop(index)
        reply, _ = self.quota.on_router(report, self.now)
        self.persist()
        self.replies.append((report.router, sent_at, reply))

    @rule(index=st.integers(0, 5), keep=st.booleans())
    def answer(self, index: int, keep: bool) -> None:
        """A reply reaches its router, perhaps one of an actor that is no more."""
        if index >= len(self.replies):
            return
        name, sent_at, reply = self.replies[index] if keep else self.replies.pop(index)
        budgets = self.routers[name].budgets
        if budgets.on_epoch(reply.epoch) and not reply.stale:
            budgets.on_targets(reply.targets, reply.epoch, sent_at)

    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        for line in (self.reports, self.replies):
            if line:
                line.pop(data.draw(st.integers(0, len(line) - 1)))

    @rule(name=st.sampled_from(ROUTERS), tokens=sizes)
    def begin(self, name: str, tokens: int) -> None:
        router, request_id = self.routers[name], f"r{next(self.ids)}"
        if not router.budgets.hold(request_id, POOL, tokens, self.now):
            router.want = tokens
            return
        self.begun += 1
        router.want = 0
        router.running[request_id] = tokens
        taken = sum(one.used for one in self.routers.values() if one.name not in self.excused)
        assert name in self.excused or taken + self.reserved() <= TOKENS, "a request began on tokens that are not there"

    @rule(name=st.sampled_from(ROUTERS))
    def finish(self, name: str) -> None:
        router = self.routers[name]
        if router.running:
            request_id = next(iter(router.running))
            assert router.budgets.release(request_id) == router.running.pop(request_id)
            if not router.running:
                self.excused.discard(name)

    @rule(span_s=spans)
    def wait(self, span_s: float) -> None:
        left_s = span_s
        while left_s > 0:
            step_s = min(left_s, 1.0)
            left_s -= step_s
            self.now += step_s
            self.engine_speaks()
            self.quota.on_tick(self.now)
            self.persist()
        for router in self.routers.values():
            # Silent for too long: what it runs goes on, on tokens that may be another's by now.
            if router.running and not self.quota.ledger.knows(router.name):
                self.excused.add(router.name)

    @rule()
    def crash(self) -> None:
        """The actor dies; another one starts from what was stored."""
        self.quota = Quota(self.quota.epoch + 1, dict(self.stored), self.now)
        self.quota.on_devices([Device("node", 0, 1000, 0)], self.now)
        self.persist()

    @rule(name=st.sampled_from(["s1", "s2"]), tokens=sizes, wait_s=st.sampled_from([None, 5.0]))
    def open_session(self, name: str, tokens: int, wait_s: float | None) -> None:
        ask = SessionAsk(name, "m", tokens, 60.0, None if wait_s is None else self.now + wait_s)
        with contextlib.suppress(InsufficientMemory, LeaseConflict, BadRequest, Unavailable):
            self.quota.on_session(ask, self.now)  # refused or not: what it does to the others is what is looked at
        self.persist()

    @rule(name=st.sampled_from(["s1", "s2"]))
    def close_session(self, name: str) -> None:
        if any(session.session_id == name for session in self.quota.sessions.all(self.now)):
            self.quota.on_close(name)
            self.persist()

    def reserved(self) -> int:
        return sum(session.tokens for session in self.quota.sessions.all(self.now))

    @invariant()
    def the_ledger_never_overflows(self) -> None:
        if not hasattr(self, "quota"):
            return
        for lease in self.quota.ledger.leases():
            assert 0 <= lease.held <= lease.capacity or not lease.held

    @invariant()
    def a_session_has_its_tokens(self) -> None:
        if hasattr(self, "quota"):
            for session in self.quota.sessions.all(self.now):
                assert self.quota.ledger.lease(session.session_id).amount == session.tokens


QUICK = settings(max_examples=100, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck))
LONG = settings(QUICK, max_examples=3000, stateful_step_count=100)


def test_no_request_begins_on_tokens_that_are_not_there_whatever_the_network_does() -> None:
    run_state_machine_as_test(Network, settings=QUICK)


@pytest.mark.long
def test_no_request_begins_on_tokens_that_are_not_there_long() -> None:
    run_state_machine_as_test(Network, settings=LONG)
