"""Outlier ejection: failures put a replica out, one success of a probe brings it back, clients never do either."""

from __future__ import annotations

import random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from serve_app.core.routing.outliers import (
    MAX_CONSECUTIVE_FAILURES,
    MAX_FAILURE_RATE,
    MIN_RESULTS,
    WINDOW_S,
    Eject,
    FailureKind,
    OutlierAction,
    OutlierDetector,
    OutlierState,
    OutlierVerdict,
    Probe,
    Readmit,
)
from serve_app.core.times import FIRST_EJECTION_S, FORGET_EJECTIONS_S, MAX_EJECTION_S

OK = OutlierVerdict.OK
FAILED = OutlierVerdict.FAILED
LOST = OutlierVerdict.LOST
CLIENT = OutlierVerdict.CLIENT


def outliers(*names: str) -> OutlierDetector:
    found = OutlierDetector()
    for name in names:
        found.on_replica(name, 0.0)
    return found


def results(watch: OutlierDetector, name: str, *verdicts: OutlierVerdict, at: float = 1.0) -> list[OutlierAction]:
    """Each of a request sent and ended at one moment; all actions."""
    return [action for verdict in verdicts for action in watch.on_result(name, verdict, at, at)]


def ejected_again(watch: OutlierDetector, name: str, now: float) -> tuple[float, float]:
    """The replica's probe fails as soon as there is one: how long it is out then, and when that ends."""
    assert watch.on_tick(now) == [Probe(name)]
    (action,) = results(watch, name, FAILED, at=now)
    assert isinstance(action, Eject)
    assert action.reason is FailureKind.PROBE
    return action.duration_s, now + action.duration_s


def test_failures_in_a_row_eject() -> None:
    watch = outliers("a", "b")
    assert results(watch, "a", *[FAILED] * (MAX_CONSECUTIVE_FAILURES - 1)) == []
    assert results(watch, "a", FAILED) == [Eject("a", FIRST_EJECTION_S, FailureKind.CONSECUTIVE)]
    assert (watch.state("a"), watch.state("b"), watch.ejected_count) == (OutlierState.EJECTED, OutlierState.HEALTHY, 1)


def test_a_success_between_begins_the_row_anew() -> None:
    assert results(outliers("a", "b"), "a", FAILED, FAILED, OK, FAILED, FAILED) == []


def test_a_lost_connection_ejects_at_once() -> None:
    assert results(outliers("a", "b"), "a", LOST) == [Eject("a", FIRST_EJECTION_S, FailureKind.LOST)]


def test_a_client_never_ejects_a_replica_and_hides_none_of_its_failures() -> None:
    watch = outliers("a", "b")
    assert results(watch, "a", *[CLIENT] * 1000) == []
    assert results(watch, "a", FAILED, CLIENT, FAILED, CLIENT, FAILED) == [
        Eject("a", FIRST_EJECTION_S, FailureKind.CONSECUTIVE)
    ]


def test_a_rate_of_failures_ejects_once_there_are_enough_results() -> None:
    watch = outliers("a", "b")
    seen = 0
    actions: list[OutlierAction] = []
    while not actions:
        seen += 2
        actions = results(watch, "a", OK, FAILED)
    assert actions == [Eject("a", FIRST_EJECTION_S, FailureKind.RATE)]
    assert seen == MIN_RESULTS


def test_a_rate_below_the_bound_ejects_nobody() -> None:
    assert MAX_FAILURE_RATE > 1 / 3
    assert results(outliers("a", "b"), "a", *[OK, FAILED, OK] * 200) == []


def test_old_failures_are_no_rate_of_today() -> None:
    watch = outliers("a", "b")
    results(watch, "a", *[FAILED, FAILED, OK] * 2)
    assert results(watch, "a", *[OK, OK, FAILED] * 5, at=1.0 + 10 * WINDOW_S) == []


def test_a_success_is_never_the_reason() -> None:
    watch = outliers("a", "b")
    results(watch, "a", *[FAILED, FAILED, OK] * 2, FAILED, FAILED, OK)
    assert results(watch, "a", OK) == []


def test_a_probe_comes_when_the_ejection_is_over_and_its_success_readmits() -> None:
    watch = outliers("a", "b")
    results(watch, "a", LOST)
    assert watch.next_due() == 1.0 + FIRST_EJECTION_S
    assert watch.on_tick(1.0 + FIRST_EJECTION_S - 0.01) == []
    assert watch.on_tick(1.0 + FIRST_EJECTION_S) == [Probe("a")]
    assert (watch.on_tick(9.0), watch.next_due(), watch.state("a")) == ([], None, OutlierState.PROBATION)
    assert results(watch, "a", OK, at=9.0) == [Readmit("a")]
    assert (watch.state("a"), watch.ejected_count) == (OutlierState.HEALTHY, 0)


def test_a_probe_that_says_nothing_is_followed_by_another() -> None:
    watch = outliers("a", "b")
    results(watch, "a", LOST)
    watch.on_tick(3.0)
    assert results(watch, "a", CLIENT, at=3.0) == [Probe("a")]
    assert watch.state("a") is OutlierState.PROBATION


def test_requests_sent_before_do_not_speak_for_the_probe() -> None:
    watch = outliers("a", "b")
    results(watch, "a", LOST, at=1.0)
    assert watch.on_result("a", OK, 0.5, 1.5) == []
    watch.on_tick(2.0)
    assert watch.on_result("a", OK, 0.5, 3.0) == watch.on_result("a", FAILED, 1.9, 3.0) == []
    assert watch.state("a") is OutlierState.PROBATION
    assert results(watch, "a", OK, at=3.0) == [Readmit("a")]
    assert [watch.on_result("a", LOST, 2.5, 4.0) for _ in range(5)] == [[]] * 5


def test_all_requests_of_one_broken_connection_are_one_loss() -> None:
    watch = outliers("a", "b")
    actions = [watch.on_result("a", LOST, 0.5, 1.0 + number / 100) for number in range(50)]
    assert [action for some in actions for action in some] == [Eject("a", FIRST_EJECTION_S, FailureKind.LOST)]
    assert watch.next_due() == 1.0 + FIRST_EJECTION_S


def test_every_further_ejection_is_twice_as_long_up_to_the_longest() -> None:
    watch = outliers("a", "b")
    results(watch, "a", LOST, at=0.0)
    spans = [FIRST_EJECTION_S]
    now = FIRST_EJECTION_S
    for _ in range(10):
        span, now = ejected_again(watch, "a", now)
        spans.append(span)
    assert spans == [min(MAX_EJECTION_S, FIRST_EJECTION_S * 2**number) for number in range(11)]


def test_good_behaviour_is_rewarded() -> None:
    watch = outliers("a", "b")
    results(watch, "a", LOST, at=0.0)
    now = FIRST_EJECTION_S
    for _ in range(3):
        _, now = ejected_again(watch, "a", now)
    watch.on_tick(now)
    results(watch, "a", OK, at=now)
    assert results(watch, "a", LOST, at=now + 2 * FORGET_EJECTIONS_S) == [
        Eject("a", FIRST_EJECTION_S * 4, FailureKind.LOST)
    ]


def test_no_more_than_their_share_are_out_at_once() -> None:
    watch = outliers(*"abcde")
    ejected = [name for name in "abcde" if results(watch, name, LOST)]
    assert ejected == ["a", "b"]
    assert results(watch, "e", *[FAILED] * 50) == []
    watch.on_tick(5.0)
    assert results(watch, "a", OK, at=5.0) == [Readmit("a")]
    assert results(watch, "e", FAILED, at=5.0) == [Eject("e", FIRST_EJECTION_S, FailureKind.CONSECUTIVE)]


def test_one_on_probation_is_still_out() -> None:
    watch = outliers("a", "b", "c")
    results(watch, "a", LOST)
    watch.on_tick(5.0)
    assert results(watch, "b", LOST, at=5.0) == []


def test_the_only_replica_is_paused_and_never_longer_than_the_first_time() -> None:
    watch = outliers("a")
    assert results(watch, "a", LOST, at=0.0) == [Eject("a", FIRST_EJECTION_S, FailureKind.LOST)]
    now = FIRST_EJECTION_S
    for _ in range(5):
        span, now = ejected_again(watch, "a", now)
        assert span == FIRST_EJECTION_S


def test_those_who_are_out_come_back_where_the_others_have_left() -> None:
    watch = outliers(*"abcd")
    results(watch, "a", LOST, at=1.0)
    results(watch, "b", LOST, at=2.0)
    assert watch.on_replica_gone("c", 2.5) == [Readmit("a")]
    assert watch.on_replica_gone("d", 2.5) == []
    assert (watch.state("a"), watch.state("b")) == (OutlierState.HEALTHY, OutlierState.EJECTED)


def test_the_one_on_probation_comes_back_first() -> None:
    watch = outliers(*"abcd")
    results(watch, "a", LOST, at=1.0)
    watch.on_tick(3.0)
    results(watch, "b", LOST, at=3.0)
    assert watch.on_replica_gone("d", 3.5) == [Readmit("a")]


def test_a_replica_that_left_is_forgotten() -> None:
    watch = outliers("a", "b")
    results(watch, "a", LOST)
    assert watch.on_replica_gone("a", 2.0) == watch.on_replica_gone("a", 2.0) == []
    assert results(watch, "a", LOST) == []
    assert (watch.ejected_count, watch.next_due(), watch.state("a")) == (0, None, None)
    watch.on_replica("a", 3.0)
    watch.on_replica("a", 9.0)
    assert watch.on_result("a", LOST, 3.5, 9.5) == [Eject("a", FIRST_EJECTION_S, FailureKind.LOST)]


def test_half_may_be_out_and_at_least_one() -> None:
    assert [outliers(*"abcde"[:count]).max_ejected for count in range(6)] == [0, 1, 1, 1, 2, 2]


class OutlierMachine(RuleBasedStateMachine):
    """Replicas that fail by chance and clients that leave; a shell that does as told, in a record of its own."""

    @initialize()
    def start(self) -> None:
        self.watch = OutlierDetector()
        self.now = 0.0
        self.allowed: dict[str, int | None] = {}  # requests that may still be sent; None: any number
        self.sent: list[tuple[str, float]] = []

    def perform(self, actions: list[OutlierAction]) -> None:
        for action in actions:
            match action:
                case Eject(name, for_s, _):
                    assert FIRST_EJECTION_S <= for_s <= MAX_EJECTION_S
                    assert self.allowed[name] != 0 or self.watch.state(name) is OutlierState.EJECTED
                    self.allowed[name] = 0
                case Probe(name):
                    assert self.allowed[name] == 0
                    self.allowed[name] = 1
                case Readmit(name):
                    assert self.allowed[name] is not None
                    self.allowed[name] = None

    @rule(name=st.sampled_from("abcdefg"))
    def come(self, name: str) -> None:
        self.watch.on_replica(name, self.now)
        self.allowed.setdefault(name, None)

    @precondition(lambda self: self.allowed)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.allowed)))
        del self.allowed[name]
        self.perform(self.watch.on_replica_gone(name, self.now))

    @precondition(lambda self: self.allowed)
    @rule(data=st.data(), count=st.integers(1, 6))
    def send(self, data: st.DataObject, count: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.allowed)))
        for _ in range(count):
            allowed = self.allowed[name]
            if allowed == 0:
                return
            self.allowed[name] = None if allowed is None else allowed - 1
            self.sent.append((name, self.now))

    @precondition(lambda self: self.sent)
    @rule(verdict=st.sampled_from(OutlierVerdict), count=st.integers(1, 6), seed=st.integers(0, 9))
    def end(self, verdict: OutlierVerdict, count: int, seed: int) -> None:
        draw = random.Random(seed)
        for _ in range(min(count, len(self.sent))):
            name, sent = self.sent.pop(draw.randrange(len(self.sent)))
            before = self.watch.state(name)
            actions = self.watch.on_result(name, verdict, sent, self.now)
            self.perform(actions)
            if verdict is CLIENT:
                assert self.watch.state(name) is before
            if verdict is OK:
                assert not any(isinstance(action, Eject) for action in actions)

    @rule(step=st.sampled_from([0.01, 0.5, 1.0, 7.0, 70.0]))
    def wait(self, step: float) -> None:
        self.now += step
        self.perform(self.watch.on_tick(self.now))
        due = self.watch.next_due()
        assert due is None or due > self.now
        assert due is None or due <= self.now + MAX_EJECTION_S

    @invariant()
    def no_more_are_out_than_may_be(self) -> None:
        states = {name: self.watch.state(name) for name in self.allowed}
        out = [name for name, state in states.items() if state is not OutlierState.HEALTHY]
        assert len(out) == self.watch.ejected_count <= self.watch.max_ejected
        assert all((self.allowed[name] is None) == (state is OutlierState.HEALTHY) for name, state in states.items())
        assert all(self.allowed[name] == 0 for name, state in states.items() if state is OutlierState.EJECTED)


TestOutlierMachine = OutlierMachine.TestCase
TestOutlierMachine.settings = settings(deadline=None)
